"""The people of the inventory, and rows of the ledger."""

from tests.console.conftest import make_request  # noqa: F401 (a fixture)
from tests.inventory import *  # noqa: F403 (fixtures)
