"""What the browser tests run against: a real uvicorn in its own process, a real Redis, and a feed of live numbers.

The gateway is not started (`--lifespan off`): the feed speaks in its place, so that a test decides what the fleet does.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import redis

from controlplane.dispatch.wire import HISTORY_KEY
from tests.console.feed import Feed, fill_history, publish
from tests.redis_server import RedisServer

ROOT = Path(__file__).parent.parent.parent
SECRET_KEY = "a key for browser tests, long enough and with enough different characters 0123456789"
STARTS_WITHIN_S = 120


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(condition, timeout_s: float = STARTS_WITHIN_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.1)


class Process:
    """A child that can be stopped, killed and started again at the same address."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.command, self.log, self.env = command, log, env
        self.process: subprocess.Popen | None = None

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.env, stdout=log, stderr=log)
        wait_until(lambda: self.alive() and self.answers())

    def alive(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.command[0]} ended: {self.log.read_text()[-2000:]}")
        return True

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class WebServer(Process):
    def __init__(self, folder: Path, redis_url: str, database_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("PILOTHOUSE_")}
        env |= {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_SECRET_KEY": SECRET_KEY,
            "REDIS_URL": redis_url,
            "DATABASE_URL": database_url,
        }
        command = [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--lifespan", "off"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        super().__init__(command, folder / "web.log", env)

    def collect_static(self) -> None:
        command = [sys.executable, "manage.py", "collectstatic", "--noinput", "-v0"]
        subprocess.run(command, cwd=ROOT, env=self.env, check=True, timeout=120)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/sign-in/", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


class Speaker:
    """Publishes *feed* twice a second until `stop`."""

    def __init__(self, client: redis.Redis, feed: Feed) -> None:
        self.client, self.feed = client, feed
        self._quiet = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        fill_history(self.client, self.feed, 240)
        self._quiet.clear()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        sampled = time.time()
        while not self._quiet.wait(0.5):
            try:
                publish(self.client, self.feed)
                if time.time() - sampled >= 5:
                    sampled = time.time()
                    self.client.rpush(HISTORY_KEY, json.dumps(self.feed.sample(sampled)))
            except redis.RedisError:
                continue  # a test has stopped Redis

    def stop(self) -> None:
        self._quiet.set()
        if self._thread:
            self._thread.join(5)


class ConsoleServer:
    """One console with its own Redis, database and feed."""

    def __init__(self, folder: Path, database: Path, rows: list[dict[str, Any]]) -> None:
        self.redis = RedisServer()
        self.web = WebServer(folder, self.redis.url, f"sqlite:///{database}")
        self.speaker = Speaker(self.redis.client, Feed(rows))

    @property
    def url(self) -> str:
        return self.web.url

    def start(self) -> None:
        self.redis.start()
        self.web.collect_static()
        self.speaker.start()
        self.web.start()

    def stop(self) -> None:
        self.speaker.stop()
        self.web.stop()
        self.redis.stop()


def chromium() -> str | None:
    """Return the browser: `$CHROMIUM`, or the first one on PATH."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def missing_tools() -> str:
    """Return what these tests need and the machine lacks; empty if nothing is missing."""
    return "" if chromium() else "Chromium"
