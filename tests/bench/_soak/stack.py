"""The stack of `manage.py up` under test: its lines with their times, its processes by part, its rows."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
UP_WITHIN_S = 600.0
CHILD = "celery child"  # a process of the worker's pool
KEYS = """
import django, json, sys
django.setup()
from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key
tenants = Tenant.objects.filter(name__in=sys.argv[1:])
print(json.dumps({tenant.name: create_api_key(tenant, "soak", "soak")[1] for tenant in tenants}))
"""


class Stack(RunningStack):
    """`make run` in *folder* on its own ports; `stamped` has each line with its arrival time."""

    def __init__(self, folder: Path, *options: str, port: int = 0, emulator_port: int = 0) -> None:
        self.stamped: list[tuple[float, str]] = []
        self.folder = folder
        self.port = port or free_port()
        self.emulator_port = emulator_port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_EMULATOR_PORT": str(self.emulator_port),
            "DATABASE_URL": "",
            "REDIS_URL": "",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        }
        super().__init__(f"--port {self.port}", *options, **self.environment)

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
        for line in [*self.processes(), *self._retitled()]:
            number = int(line.split()[0])
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z":
                    continue
                parents[number] = int(fields[1])
                sizes[number] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
                names[number] = next((part for part, words in PARTS.items() if words in line), "")
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

    def _retitled(self) -> list[str]:
        """Return the process id of Redis from the supervisor: its title overwrites the environment that marks
        processes.
        """
        with contextlib.suppress(OSError, ValueError, KeyError):
            parts = json.loads((self.folder / PARTS_FILE).read_text())
            return [
                f"{one['process_id']} {PARTS['redis']}" for one in parts if one["name"] == "redis" and one["process_id"]
            ]
        return []

    def keys(self, *tenants: str) -> dict[str, str]:
        """Create an API key for each of *tenants*."""
        done = subprocess.run(
            [sys.executable, "-c", KEYS, *tenants],
            cwd=ROOT,
            env={**os.environ, **self.environment, "PILOTHOUSE_SECRET_KEY": "soak"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def cookie(self, link: str) -> dict[str, str]:
        """Sign in by *link*; return the cookies."""
        self.sign_in(link)
        jars = [handler.cookiejar for handler in self._browser.handlers if hasattr(handler, "cookiejar")]
        return {cookie.name: cookie.value or "" for jar in jars for cookie in jar}

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of *query* on the stack's database, read only."""
        with self._database() as connection:
            return [dict(row) for row in connection.execute(query, values)]

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"file:{self.folder / 'pilothouse.sqlite3'}?mode=ro", uri=True, timeout=30)
        connection.row_factory = sqlite3.Row
        try:
            yield connection
        finally:
            connection.close()
