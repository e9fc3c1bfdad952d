"""Keep only the tests that use the database: a plugin of pytest, `-p tests.database_only`."""

from collections.abc import Sequence

import pytest

FIXTURES = {"db", "transactional_db", "django_db_reset_sequences", "django_db_serialized_rollback", "live_server"}


def uses_database(item: pytest.Item) -> bool:
    return item.get_closest_marker("django_db") is not None or not FIXTURES.isdisjoint(
        getattr(item, "fixturenames", ())
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others: Sequence[pytest.Item] = [item for item in items if not uses_database(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if uses_database(item)]
