import gc
import sys

import pytest
from hypothesis import settings

from tests import examples  # noqa: F401 (registers the profiles)

settings.load_profile("few")


@pytest.fixture(scope="session", autouse=True)
def _quick_database():
    from tests import database

    database.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """No search for garbage while millions of objects are made that live to the end, nor among them ever after.

    In each test process a quarter of the time that collection takes went into such searches, and each later one took half
    a second. Later ones are fewer too: among what tests of pages make they took one part in fifteen of all time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(5_000, 20, 100)


@pytest.fixture(autouse=True)
def _values_as_this_test_sets_them():
    """Settings are read again in each test, and whenever it changes a default."""
    from django.core.signals import setting_changed

    from controlplane.tuning.selectors import latest

    def forget(**_):
        latest.forget()

    latest.forget()
    setting_changed.connect(forget)
    yield
    setting_changed.disconnect(forget)


@pytest.fixture(autouse=True)
def _no_live_feed_outlives_its_test():
    """Its thread would continue in later tests, which have no database, and draw random numbers with theirs."""
    yield
    module = sys.modules.get("controlplane.console.live.feed")
    if module is not None:
        module.feed.stop()
