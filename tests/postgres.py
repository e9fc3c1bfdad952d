"""A PostgreSQL server of a test: a new cluster on a free port."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL: Debian keeps `initdb` and `pg_ctl` off the PATH."""
    path = shutil.which(name) or next((str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if path is None:
        pytest.fail(f"no {name}: install postgresql (`make tools` does as root)")
    return path


@contextmanager
def cluster() -> Iterator[str]:
    """Yield the `DATABASE_URL` of a new cluster; PostgreSQL refuses to run as root, so root lends it to `postgres`."""
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
    finally:
        run(*control, "-m", "immediate", "stop")
        print((folder / "log").read_text()[-3000:])
        shutil.rmtree(folder, ignore_errors=True)
