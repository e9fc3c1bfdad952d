from tests.gateway.conftest import *  # noqa: F403 (fixtures)
