"""Real Celery workers for what-ifs, as separate processes, with a separate database and Redis."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controlplane.supervisor.redis_server import own_redis
from tests.bench.gateway import free_port

ROOT = Path(__file__).parents[3]
ASK = """
import json, time
from controlplane.simulation.whatif import selectors, services, working
from controlplane.simulation.whatif.starts.begin import Begin, start_of
body = {body!r}
start = start_of(Begin.model_validate(body.pop("begin", {{}})), body["horizon_s"]).model_dump(mode="json")
given = body.pop("futures")
futures = [services.future_of(one.get("name", ""), one.get("preset", ""), one.get("changes", [])) for one in given]
row = services.ask(body | {{"start": start}}, futures, "test")
while selectors.progress(row.pk)["state"] in working.OPEN:
    if not {here} or working.work() is None:
        time.sleep(0.5)
print(json.dumps({{"id": row.pk, **selectors.comparison(row)}}))
"""


class Place:
    """A folder, and the environment of those who work there, with its database and Redis."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    @classmethod
    def new(cls, folder: Path, redis_port: int) -> "Place":
        """Return the settings with a separate database in *folder*."""
        values = {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_DEBUG": "true",
            "DATABASE_URL": f"sqlite:///{folder / 'what-if.sqlite3'}",
            "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        }
        made = cls(folder, {**os.environ, **values})
        made.manage("migrate", "--verbosity", "0")
        return made

    def manage(self, *words: str) -> str:
        """Return what `manage.py` prints for *words*."""
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def asking(self, body: dict[str, Any], *, here: bool = False) -> "subprocess.Popen[str]":
        """Start a process that asks *body*, makes its runs if they are made *here*, and prints its comparison."""
        command = [sys.executable, "manage.py", "shell", "-v", "0", "-c", ASK.format(body=body, here=here)]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def worker(self, name: str, processes: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a Celery worker that makes runs, in a separate process group."""
        command = [sys.executable, "-m", "celery", "-q", "-A", "workers.celery", "worker", "--queues", "simulation"]
        command += ["--concurrency", str(processes), "--hostname", f"{name}@%h", "--loglevel", "WARNING"]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        process = subprocess.Popen(command, cwd=ROOT, env=self.environment, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """Run in a new place with a separate Redis, which ends with it."""
    port = free_port()
    redis = own_redis()
    command = [redis.binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield Place.new(folder, port)
    finally:
        server.terminate()
        server.wait(10)
