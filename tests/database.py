"""The test database is quickly there, and quickly empty again.

Migrations take four seconds of processor time, in every test process: what they made is kept in a file next to compiled
tests, named after a digest of all that it is made of, and copied.

Tests that commit leave empty tables behind, as Django's own do. Django also deletes content types and permissions, which no
test writes, and rebuilds them from all models: nine parts in ten of that work, a quarter of a second after each such test.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import django
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connections, transaction
from django.db.backends.base.creation import BaseDatabaseCreation
from django.db.backends.sqlite3.creation import DatabaseCreation
from django.test import TransactionTestCase

Built = TypeVar("Built")
KEPT_TABLES = frozenset({"django_content_type", "auth_permission"})
FOLDER = Path(__file__).parent / "__pycache__"
_counted: dict[str, dict[str, int]] = {}
"""By database: how many rows the kept tables have, as Django made them."""
_migrate = DatabaseCreation.create_test_db
_drop = BaseDatabaseCreation._destroy_test_db


def migrated() -> Path:
    """Where the database is kept that migrations make of no rows: named after them, and after what permissions come of."""
    digest = hashlib.sha256(django.__version__.encode())
    for model in apps.get_models(include_auto_created=True):
        meta = model._meta
        digest.update(
            repr((meta.label, str(meta.verbose_name_raw), meta.permissions, meta.default_permissions)).encode()
        )
    for app in apps.get_app_configs():
        for path in sorted(Path(app.path, "migrations").glob("*.py")):
            digest.update(f"{app.label}/{path.name}".encode() + b"\0" + path.read_bytes())
    return FOLDER / f"database-{digest.hexdigest()[:16]}.sqlite3"


def create(creation: Any, *arguments: Any, **options: Any) -> str:
    """In place of `create_test_db` of SQLite: a copy of what is kept, or what migrations make, which is then kept."""
    connection, kept = creation.connection, migrated()
    name = str(creation._get_test_db_name())
    if creation.is_in_memory_db(name):
        return _migrate(creation, *arguments, **options)
    if kept.is_file():
        connection.close()
        shutil.copyfile(kept, name)
        settings.DATABASES[connection.alias]["NAME"] = connection.settings_dict["NAME"] = name
        connection.ensure_connection()
        return name
    _migrate(creation, *arguments, **options)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [copy := f"{folder}/database"])
        os.replace(copy, kept)
    for other in FOLDER.glob("database-*.sqlite3"):
        if other != kept:
            other.unlink(missing_ok=True)
    return name


def count(connection: Any) -> dict[str, int]:
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(f"SELECT '{table}', COUNT(*) FROM {table}" for table in sorted(KEPT_TABLES)))
        return dict(cursor.fetchall())


def empty(alias: str) -> None:
    """Empty every table of the database *alias*; content types and permissions are as after a migration."""
    connection = connections[alias]
    if _counted.get(alias) != count(connection):  # the first time, or a test has made or deleted some
        call_command("flush", verbosity=0, interactive=False, database=alias, reset_sequences=False)
        _counted[alias] = count(connection)
        return
    tables = set(connection.introspection.django_table_names(only_existing=True, include_views=False)) - KEPT_TABLES
    connection.ops.execute_sql_flush(connection.ops.sql_flush(no_style(), sorted(tables)))


def _empty_all(case: Any) -> None:
    for alias in case._databases_names(include_mirrors=False):
        empty(alias)


def destroy(creation: Any, name: str, verbosity: int) -> None:
    """In place of `_destroy_test_db` of every database but SQLite's, which has its own.

    Threads of a gateway that has ended may hold a session for a moment more, and PostgreSQL drops no database that has one.
    """
    if creation.connection.vendor == "postgresql":
        with creation._nodb_cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                [name],
            )
    _drop(creation, name, verbosity)


def install() -> None:
    """From now on, in this process."""
    DatabaseCreation.create_test_db = create
    BaseDatabaseCreation._destroy_test_db = destroy
    TransactionTestCase._fixture_teardown = _empty_all


def rows_of(connection: Any) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Rows by SQLite's number of them, by table."""
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    selected = {table: connection.connection.execute(f'SELECT rowid, * FROM "{table}"') for table in sorted(tables)}
    return {table: {row[0]: tuple(row[1:]) for row in rows} for table, rows in selected.items()}


_written: dict[Any, dict[str, list[tuple[Any, ...]]]] = {}
"""Which rows a function wrote, by the function and the rows that there were before it."""


def write(build: Any) -> None:
    """What *build* writes; in SQLite it is called once in a process, and then the same rows are put in as they were.

    For rows that do not depend on the time of day. It may only add rows, and where others are there than before, by their
    numbers, it is called again.
    """
    connection = connections["default"]
    if connection.vendor != "sqlite":
        build()
        return
    connection.ensure_connection()
    before = rows_of(connection)
    known = build, tuple((table, *rows) for table, rows in before.items())
    if known in _written:
        for table, rows in _written[known].items():
            places = ", ".join("?" * len(rows[0]))
            connection.connection.executemany(f'INSERT INTO "{table}" VALUES ({places})', rows)
        return
    build()
    after = rows_of(connection)
    for table, rows in before.items():
        assert all(after[table].get(number) == row for number, row in rows.items()), f"{table} is changed"
    new = {table: [row for number, row in rows.items() if number not in before[table]] for table, rows in after.items()}
    _written[known] = {table: rows for table, rows in new.items() if rows}


@contextmanager
def standing(blocker: Any, build: Callable[[], Built]) -> Iterator[Built]:
    """What *build* makes, with its rows for all tests until the end, which undoes them.

    *blocker* is `django_db_blocker`. Each test is undone by itself, as ever; none of them may be one of real transactions.
    """
    outer = transaction.atomic()
    outer._from_testcase = True  # as of a test: a durable transaction may begin in it
    with blocker.unblock():
        outer.__enter__()
    try:
        with blocker.unblock():
            built = build()
        yield built
    finally:
        with blocker.unblock():
            transaction.set_rollback(True)
            outer.__exit__(None, None, None)
