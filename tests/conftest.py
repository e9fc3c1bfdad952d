import pytest
from hypothesis import settings

from tests import examples  # noqa: F401 (registers the profiles)

settings.load_profile("few")


@pytest.fixture(autouse=True)
def _values_as_this_test_sets_them():
    """Settings are read anew in each test, and whenever it changes a default."""
    from django.core.signals import setting_changed

    from controlplane.tuning.selectors import latest

    def forget(**_):
        latest.forget()

    latest.forget()
    setting_changed.connect(forget)
    yield
    setting_changed.disconnect(forget)
