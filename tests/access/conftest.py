from tests.console.conftest import *  # noqa: F403 (fixtures: a live state under the test's hand, and an inventory)
