import pytest
from hypothesis import settings

from scheduling.dispatch import warm_up

# Examples are judged by what they find, not by how long they take on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled():
    """Compile once, outside any test."""
    warm_up()
