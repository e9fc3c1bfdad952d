import pytest

from scheduling.planning.planner import plan_fast
from tests.scheduling.planning.problems import synthetic


@pytest.fixture(scope="session", autouse=True)
def _search_is_compiled():
    """Compile outside any test: time limits are not meant to hold it."""
    plan_fast(synthetic(1, 1, 1, seed=0))
