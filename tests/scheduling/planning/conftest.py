import pytest

from scheduling.planning import planner


@pytest.fixture(scope="session", autouse=True)
def _search_is_compiled():
    """Compile outside any test: time limits are not meant to hold it."""
    planner.warm_up()
