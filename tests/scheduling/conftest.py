import pytest

from scheduling.dispatch import warm_up


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled():
    """Compile once, outside any test."""
    warm_up()
