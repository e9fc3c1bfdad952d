"""PostgreSQL servers of a test, each a new cluster on a free port; replicas that follow one; PgBouncer before one."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

STARTS_WITHIN_S = 20.0


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL: Debian keeps `initdb` and `pg_ctl` off the PATH."""
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), Path("/usr/sbin")]
    path = shutil.which(name) or next((str(each / name) for each in folders if (each / name).exists()), None)
    if path is None:
        pytest.fail(f"no {name}: install postgresql and pgbouncer (`make tools` does as root)")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Server:
    """A server in a folder of its own. PostgreSQL refuses to run as root, so root lends the folder to `postgres`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pilothouse-postgres-"))
        self.as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
            self.as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"postgres://pilothouse@{self.host}/postgres"
        self.data = str(self.folder / "data")

    def run(self, name: str, *arguments: str) -> None:
        command = [program(name), *arguments]
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=self.folder, check=True, **self.as_user)

    def control(self, *arguments: str) -> None:
        self.run("pg_ctl", "-D", self.data, "-w", *arguments)

    def start(self, *settings: str) -> None:
        fixed = ["listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}", "fsync=off"]
        options = " ".join([f"-p {self.port}", *(f"-c {setting}" for setting in (*fixed, *settings))])
        self.control("-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """As `kill -9` of all its processes leaves it, but for its lock file."""
        self.control("-m", "immediate", "stop")

    def remove(self) -> None:
        with suppress(subprocess.CalledProcessError):  # a test has stopped it
            self.stop()
        print((self.folder / "log").read_text()[-3000:])
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def server(*settings: str) -> Iterator[Server]:
    """Yield a new cluster that runs, with *settings* (`name=value`)."""
    new = Server()
    new.run("initdb", "-D", new.data, "-U", "pilothouse", "-A", "trust")
    new.start(*settings)
    try:
        yield new
    finally:
        new.remove()


@contextmanager
def cluster() -> Iterator[str]:
    """Yield the `DATABASE_URL` of a new cluster."""
    with server() as new:
        yield new.url


@contextmanager
def replica(primary: Server) -> Iterator[Server]:
    """Yield a standby that streams from *primary* and can be promoted: `control("promote")`."""
    new = Server()
    source = ["-h", "127.0.0.1", "-p", str(primary.port), "-U", "pilothouse"]
    new.run("pg_basebackup", *source, "-D", new.data, "-R", "-c", "fast")
    new.start()
    try:
        yield new
    finally:
        new.remove()


@contextmanager
def pgbouncer(of: Server, *settings: str) -> Iterator[str]:
    """Yield the address of a PgBouncer in transaction mode before *of* that gives each transaction a new session: what one
    leaves in it the next does not find."""
    port, folder = free_port(), of.folder
    (folder / "users").write_text('"pilothouse" ""\n')
    lines = [
        "[databases]",
        f"* = host=127.0.0.1 port={of.port}",
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        f"listen_port = {port}",
        "unix_socket_dir =",
        "auth_type = trust",
        f"auth_file = {folder / 'users'}",
        "pool_mode = transaction",
        "server_lifetime = 0",
        *settings,
    ]
    (folder / "pgbouncer.ini").write_text("\n".join(lines))
    command = [program("pgbouncer"), str(folder / "pgbouncer.ini")]
    with (folder / "pgbouncer.log").open("w+") as log, subprocess.Popen(command, stderr=log, **of.as_user) as process:
        try:
            end_s = time.monotonic() + STARTS_WITHIN_S
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert time.monotonic() < end_s
                time.sleep(0.05)
            yield f"postgres://pilothouse@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            process.wait(10)
            log.seek(0)
            print(log.read()[-3000:])
