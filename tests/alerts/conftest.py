from tests.inventory import *  # noqa: F403 (fixtures)
