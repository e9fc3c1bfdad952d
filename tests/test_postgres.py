"""Tests that write rows, once more on a real PostgreSQL, in their own processes.

The gate runs those marked `sql`: claims, constraints, the ledger, bulk writes, text and time in queries. That migrations
make the tables out of nothing is shown by the test database itself. The night runs whole suites.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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


def program(name: str) -> str:
    """A program of PostgreSQL: Debian keeps `initdb` and `pg_ctl` off the PATH."""
    path = shutil.which(name) or next((str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if path is None:
        pytest.fail(f"no {name}: install postgresql (`make tools` does as root)")
    return path


@pytest.fixture
def database_url():
    """A new cluster on a free port; PostgreSQL refuses to run as root, so root lends it to the user `postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="pilothouse-postgres-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    control = [*as_user, program("pg_ctl"), "-D", str(data), "-w"]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"

    def run(*command: str) -> None:
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder, check=True)

    run(*as_user, program("initdb"), "-D", str(data), "-U", "pilothouse", "-A", "trust")
    run(*control, "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgres://pilothouse@127.0.0.1:{port}/postgres"
        run(*control, "-m", "immediate", "stop")
    finally:
        print((folder / "log").read_text()[-3000:])
        shutil.rmtree(folder, ignore_errors=True)


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
