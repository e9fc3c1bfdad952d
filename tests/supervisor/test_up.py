"""The whole stack by `make run`, for real: minutes of starting and stopping real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.running import ROOT, RunningStack, moving

pytestmark = [pytest.mark.services, pytest.mark.gate]

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{number:02d}.000,{100 + 37 * number},{1 + number % 20}\n" for number in range(40)
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Address:
    """Where one stack runs, and how commands alongside it find it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "PILOTHOUSE_STATE_DIR": str(folder),
            "PILOTHOUSE_EMULATOR_PORT": str(free_port()),
            "DATABASE_URL": "",
            "REDIS_URL": "",
        }

    def manage(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env={**environment, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Address:
    return Address(tmp_path_factory.mktemp("var"))


@pytest.fixture(scope="module")
def stack(address: Address) -> Iterator[RunningStack]:
    """One stack for the tests below, in order; the last one stops it."""
    environment = {**address.environment, "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    stack = RunningStack(f"--port {address.port}", **environment)
    yield stack
    stack.kill()


def process_id(stack: RunningStack, words: str) -> int:
    (line,) = [line for line in stack.processes() if words in line]
    return int(line.split()[0])


def test_it_starts_and_every_part_has_its_line(stack: RunningStack, address: Address) -> None:
    link = stack.wait_until_up()
    assert link.startswith(f"{address.url}/sign-in/")
    for part in (
        "redis",
        "database",
        "static",
        "demo",
        "emulated",
        "emulator",
        "web",
        "celery",
        "beat",
        "instances",
        "traffic",
    ):
        assert re.search(rf"^  {part} +\S.* s$", stack.text, re.MULTILINE), part
    assert re.search(r"instances +(\d+) of \1 ready", stack.text)
    assert_no_traceback(stack)


def test_the_link_signs_in_once_and_the_overview_moves(stack: RunningStack, address: Address) -> None:
    link = stack.wait_until_up()
    stack.sign_in(link)
    overview = stack.get(f"{address.url}/")
    assert all(region in overview for region in ("us-east", "us-central", "us-west"))
    stack.wait_for("moving loads", moving(stack, address.url))
    assert "This link has ended" not in overview


def test_a_second_one_says_who_runs(stack: RunningStack, address: Address) -> None:
    said = address.manage("up", "--port", str(free_port()))
    assert said.returncode == 1
    assert re.fullmatch(rf"Pilothouse already runs in \S+: process \d+, {address.url}, since .*\n", said.stdout)


def test_a_concurrent_replay_balances_with_the_ledger(stack: RunningStack, address: Address, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    said = address.manage("replay", str(trace), "--format", "azure", "--speed", "20", "--url", f"{address.url}/v1")
    assert said.returncode == 0, said.stderr + said.stdout
    report = json.loads(said.stdout)
    assert (report["sent"], report["done"], report["failed"]) == (40, 40, 0)
    assert report["ledger"] == {"sent": 40, "done": 40}
    assert report["output_tokens"] == sum(1 + number % 20 for number in range(40))
    assert report["prompt_tokens"] == sum(100 + 37 * number for number in range(40))


def test_a_killed_web_process_comes_back(stack: RunningStack, address: Address) -> None:
    os.kill(process_id(stack, "uvicorn"), signal.SIGKILL)
    stack.wait_for("restart", lambda: re.search(r"web ended \(SIGKILL.*starting it again", stack.text))
    stack.wait_for("web", lambda: "web is back after" in stack.text)
    assert "ok" in stack.get(f"{address.url}/healthz").lower()


def test_instances_are_restarted_after_the_emulator_died(stack: RunningStack, address: Address) -> None:
    os.kill(process_id(stack, "workers.emulator"), signal.SIGKILL)
    stack.wait_for("restart", lambda: "emulator is back after" in stack.text)
    stack.wait_for("revival", lambda: stack.text.count("asked to start") == 2)

    def all_ready() -> bool:
        fleet = stack.summary(address.url)["fleet"]
        return bool(fleet["instances"]) and fleet["instances_ready"] == fleet["instances"] - 1  # one is swapped to

    stack.wait_for("ready instances", all_ready)


def assert_no_traceback(stack: RunningStack) -> None:
    at = stack.text.find("Traceback")
    assert at < 0, stack.text[max(0, at - 2000) : at + 6000]


def part(address: Address, name: str) -> dict[str, Any]:
    """Return the supervisor's status of a part, from the file that the web process reads."""
    written = json.loads((Path(address.environment["PILOTHOUSE_STATE_DIR"]) / "parts.json").read_text())
    return next(row for row in written if row["name"] == name)


def test_no_part_ends_it_whichever_dies_with_which(stack: RunningStack, address: Address) -> None:
    """Kill Redis with Celery, whose probe needs it; three at a time; the same one again."""
    names = ("redis", "web", "celery", "beat", "emulator", "traffic")

    def running() -> bool:
        return all(part(address, name)["state"] == "running" for name in names)

    for victims in (("redis", "celery"), ("beat", "emulator", "traffic"), ("redis", "web"), ("celery",), ("celery",)):
        before = {name: part(address, name) for name in victims}
        for row in before.values():
            os.kill(row["process_id"], signal.SIGKILL)
        for name, row in before.items():
            stack.wait_for(
                f"{name} to be started again",
                lambda name=name, row=row: part(address, name)["restarts"] > row["restarts"],
            )
        stack.wait_for(f"all parts after the death of {victims}", running)
    assert part(address, "celery")["restarts"] >= 3

    def well() -> bool:
        body = json.loads(stack.get(f"{address.url}/readyz"))
        return body["status"] == "ready" and all(job["state"] in ("ok", "never") for job in body["jobs"].values())

    stack.wait_for("jobs that are done again", well)
    assert_no_traceback(stack)


def test_ctrl_c_ends_it_and_leaves_nothing(stack: RunningStack) -> None:
    assert len(stack.processes()) > 6
    stack.interrupt()
    assert re.search(r"^Stopped in \d+\.\d s\.$", stack.text, re.MULTILINE)
    assert stack.processes() == []
    assert "may be lost" not in stack.text
