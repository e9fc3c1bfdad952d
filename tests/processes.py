"""Web processes, Celery and an emulated instance beside a database and a Redis of the test, each started by itself."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg

from tests.supervisor.test_up import ROOT, free_port


class Stack:
    """PostgreSQL, Redis, an emulated instance and web processes of one state folder."""

    def __init__(self, folder: Path, database_url: str, redis_url: str, **environment: str) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PILOTHOUSE_")} | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_SECRET_KEY": "of-a-test",
            "PILOTHOUSE_DRAIN_S": "0",
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            **environment,
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.log = (folder / "web.log").open("w+")
        self.rows_at = database_url.replace("pgbouncer=true", "")

    def manage(self, *words: str) -> str:
        command = [sys.executable, "manage.py", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shell(self, code: str, **values: object) -> Any:
        code = f"import json\nvalues = json.loads({json.dumps(values)!r})\n" + textwrap.dedent(code)
        said = self.manage("shell", "--no-imports", "-c", code + "\nprint(json.dumps(answer, default=str))")
        return json.loads(said.strip().splitlines()[-1])

    def start(self, *words: str, more: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        environment = self.environment | dict(more or {})
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, env=environment, text=True, stderr=self.log, **options
        )
        self.processes.append(process)
        return process

    def web(self, part: str = "whole") -> tuple[subprocess.Popen[str], int]:
        port, more = free_port(), {"PILOTHOUSE_PART": part}
        if part == "dispatcher":
            more["PILOTHOUSE_DISPATCHER_BIND"] = f"ipc://{self.folder / f'{port}.ipc'}"
        options = ["--port", str(port), "--lifespan", "on", "--http", "controlplane.listening:HttpProtocol"]
        process = self.start("uvicorn", "controlplane.asgi:application", "--no-access-log", *options, more=more)
        until(lambda: checks_of(port), 120)
        return process, port

    def emulator(self) -> str:
        """Start an emulated instance of the model `m`; return its address."""
        process = self.start("workers.emulator", "--port", "0", "--single", "m", stdout=subprocess.PIPE)
        return "http://" + process.stdout.readline().rsplit("http://", 1)[1].split()[0].rstrip("/")

    def celery(self) -> subprocess.Popen[str]:
        """Start a worker for all but nodes' queues, with beat in it."""
        options = ["--queues", "control,simulation", "--concurrency", "2", "--without-mingle", "--without-gossip"]
        schedule = ["--beat", "--schedule", str(self.folder / "celerybeat-schedule"), "--loglevel", "WARNING"]
        return self.start("celery", "-q", "-A", "workers.celery", "worker", *options, *schedule)

    def one(self, query: str) -> tuple[Any, ...]:
        with psycopg.connect(self.rows_at, target_session_attrs="primary") as rows:
            return rows.execute(query).fetchone() or ()

    def said(self) -> str:
        """Return what the processes have logged."""
        return (self.folder / "web.log").read_text()

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()
        print(self.said()[-6000:])
        self.log.close()


def checks_of(port: int) -> dict[str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as response:
            return json.load(response)["checks"]
    except urllib.error.HTTPError as error:
        return json.load(error)["checks"]
    except OSError:
        return {}


def until(condition: Callable[[], object], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.2)
