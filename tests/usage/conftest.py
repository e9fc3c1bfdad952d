from tests.console.conftest import make_request  # noqa: F401 (fixture)
from tests.inventory import *  # noqa: F403 (fixtures)
