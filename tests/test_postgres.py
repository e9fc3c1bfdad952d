"""Tests that write rows, once more on a real PostgreSQL, in their own processes.

The gate runs those marked `sql`: claims, constraints, the ledger, bulk writes, text and time in queries. That migrations
make the tables out of nothing is shown by the test database itself. The night runs whole suites.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres import cluster, pgbouncer, server

ROOT = Path(__file__).parents[1]
SUITES = [
    "tests/accounts",
    "tests/api",
    "tests/events",
    "tests/fleet",
    "tests/gateway",
    "tests/lengths",
    "tests/planning/test_executor.py",
]


def marked() -> list[str]:
    """Files with tests marked `sql`: to collect the others takes longer than to run these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in files if "pytest.mark.sql" in path.read_text() and path != Path(__file__)]


@pytest.fixture
def database_url():
    with cluster() as url:
        yield url


@pytest.fixture
def through_pgbouncer():
    with server("timezone=Europe/Berlin") as behind, pgbouncer(behind) as url:
        yield f"{url}?pgbouncer=true"


def run_on(database_url: str, *selected: str) -> None:
    """Run tests against the database, and fail with what pytest said."""
    options = ["-p", "no:cacheprovider", "-p", "tests.database_only", "-n", "2", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *selected]
    environment = os.environ | {"DATABASE_URL": database_url}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    print(done.stdout.splitlines()[-1])


@pytest.mark.services
@pytest.mark.gate
def test_what_speaks_sql_itself_passes_on_postgresql(database_url):
    run_on(database_url, "-m", "sql", *marked())


@pytest.mark.services
@pytest.mark.nightly
def test_the_suites_that_write_rows_pass_on_postgresql(database_url):
    run_on(database_url, *SUITES, *marked())


@pytest.mark.services
@pytest.mark.nightly
def test_what_speaks_sql_itself_passes_through_pgbouncer(through_pgbouncer):
    run_on(through_pgbouncer, "-m", "sql", *marked())
