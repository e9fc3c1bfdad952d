"""The stack of `manage.py up` under test: its lines with their times, its processes by part, its rows."""

import contextlib
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from controlplane.supervisor.state import PARTS_FILE
from tests.bench.gateway import free_port
from tests.supervisor.running import ROOT, RunningStack

PARTS = {  # words of a part's command line
    "redis": "redis-server",
    "web": "uvicorn",
    "celery": "celery -q -A workers.celery worker",
    "beat": "celery -q -A workers.celery beat",
    "emulator": "workers.emulator",
    "traffic": "workers.traffic",
}
GATEWAY = ("web", "relay", "dispatcher")
UP_WITHIN_S = 600.0
CHILD = "celery child"  # a process of the worker's pool
KEYS = """
from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key
tenants = Tenant.objects.filter(name__in=values)
answer = {tenant.name: create_api_key(tenant, "soak", "soak")[1] for tenant in tenants}
"""


class Stack(RunningStack):
    """`manage.py up` in *folder* on its own ports; `stamped` has each line with its arrival time."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        emulator_port: int = 0,
        database_url: str = "",
        gateway: int = 0,
    ) -> None:
        self.stamped: list[tuple[float, str]] = []
        self.folder = folder
        self.port = port or free_ports(1 + gateway + 1)
        self.emulator_port = emulator_port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database_url = database_url
        self.addresses = [f"http://127.0.0.1:{self.port + n}" for n in range(1, gateway + 1)] or [self.url]
        """Of each process of the gateway."""
        self.environment = {
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_EMULATOR_PORT": str(self.emulator_port),
            "DATABASE_URL": database_url,
            "REDIS_URL": "",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        }
        super().__init__(f"--port {self.port}", *options, **self.environment)

    def command(self, options: str) -> list[str]:
        """Without `make`, which may install: the soak has what it needs."""
        return [sys.executable, "manage.py", "up", *options.split()]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stamped.append((time.time(), line.rstrip("\n")))
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, what: str, condition: Callable[[], Any], within_s: float = UP_WITHIN_S) -> Any:
        """As for any stack, with more time for a busy machine."""
        return super().wait_for(what, condition, within_s)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def redis_url(self) -> str:
        return (self.folder / "redis_url").read_text().strip()

    def pids(self, part: str) -> list[int]:
        """Return the current processes of *part*: one, or those of the worker's pool."""
        return sorted(self.by_part().get(part, {}))

    def by_part(self) -> dict[str, dict[int, int]]:
        """Return the processes of each part and their resident bytes."""
        parents, names, sizes = {}, {}, {}
        gateway = {pid: part for pid, name in self.named().items() if (part := name.partition("-")[0]) in GATEWAY}
        for line in [*self.processes(), *self._retitled()]:
            number = int(line.split()[0])
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z":
                    continue
                parents[number] = int(fields[1])
                sizes[number] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
                names[number] = gateway.get(number) or next(
                    (part for part, words in PARTS.items() if words in line), ""
                )
        supervisor = [number for number in parents if not names[number] and any(p == number for p in parents.values())]
        sizes_by_part: dict[str, dict[int, int]] = {}
        for number, name in names.items():
            parent = parents[number]
            if names.get(parent) == "celery":
                sizes_by_part.setdefault(CHILD, {})[number] = sizes[number]
            elif name and names.get(parent) != name:
                sizes_by_part.setdefault(name, {})[number] = sizes[number]
            elif number in supervisor:
                sizes_by_part.setdefault("supervisor", {})[number] = sizes[number]
        return sizes_by_part

    def named(self) -> dict[int, str]:
        """Return the name of each part by its process id, from the supervisor."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            parts = json.loads((self.folder / PARTS_FILE).read_text())
            return {one["process_id"]: one["name"] for one in parts if one["process_id"]}
        return {}

    def _retitled(self) -> list[str]:
        """Return the process id of Redis from the supervisor: its title overwrites the environment that marks
        processes.
        """
        return [f"{pid} {PARTS['redis']}" for pid, name in self.named().items() if name == "redis"]

    def keys(self, *tenants: str) -> dict[str, str]:
        """Create an API key for each of *tenants*."""
        return dict(self.shell(KEYS, *tenants))

    def shell(self, code: str, *values: str) -> Any:
        """Run *code* with *values* against the stack's database; return its `answer`."""
        before = "import django, json, sys\ndjango.setup()\nvalues = sys.argv[1:]\n"
        done = subprocess.run(
            [sys.executable, "-c", f"{before}{code}\nprint(json.dumps(answer))", *values],
            cwd=ROOT,
            env={**os.environ, **self.environment, "PILOTHOUSE_SECRET_KEY": "soak"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    def cookie(self, link: str) -> dict[str, str]:
        """Sign in by *link*; return the cookies."""
        self.sign_in(link)
        jars = [handler.cookiejar for handler in self._browser.handlers if hasattr(handler, "cookiejar")]
        return {cookie.name: cookie.value or "" for jar in jars for cookie in jar}

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of *query* on the stack's database, read only; times are ISO texts in UTC."""
        if self.database_url:
            with psycopg.connect(self.database_url, row_factory=dict_row, options="-c timezone=UTC") as postgres:
                found = postgres.execute(query.replace("?", "%s"), values or None).fetchall()  # type: ignore[arg-type]
            return [{name: _text(value) for name, value in row.items()} for row in found]
        with self._database() as connection:
            return [dict(row) for row in connection.execute(query, values)]

    def rows_or_none(self, query: str) -> list[dict[str, Any]]:
        """Return no rows while the database is away."""
        with contextlib.suppress(psycopg.OperationalError, sqlite3.OperationalError):
            return self.rows(query)
        return []

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"file:{self.folder / 'pilothouse.sqlite3'}?mode=ro", uri=True, timeout=30)
        connection.row_factory = sqlite3.Row
        try:
            yield connection
        finally:
            connection.close()


def free_ports(number: int) -> int:
    """Return the first of *number* successive ports that are free: below those that the system gives to connections."""
    while True:
        first = random.randrange(12_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as bound:
            for port in range(first, first + number):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _text(value: Any) -> Any:
    return value.astimezone(UTC).replace(tzinfo=None).isoformat() if isinstance(value, datetime) else value
