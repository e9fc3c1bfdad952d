"""A solver that dies or answers nonsense: the dispatcher continues by due time, and the next solve works."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import redis

from controlplane.dispatch import reordering, solving
from controlplane.dispatch.solving import KEY, CelerySolver
from controlplane.jobs.broker import answering_workers
from scheduling.queueing.global_scheduler import solve
from tests.dispatch.test_reordering import late  # noqa: F401 (fixture)
from tests.gateway.conftest import until
from tests.gateway.test_redis import redis_server  # noqa: F401 (fixture)
from workers.celery import app

NUMBERS = [*range(1, 25)]
"""Of the requests of `late`."""


class Mailbox:
    """Redis as the solver knows it, with one letter in it."""

    def __init__(self, letter: bytes) -> None:
        self.letter = letter

    async def blpop(self, keys: list[str], timeout: float) -> tuple[bytes, bytes]:
        return keys[0].encode(), self.letter

    async def aclose(self) -> None:
        pass


LETTERS = {
    "nothing": lambda queues: b"",
    "no text": lambda queues: b"\x93NUMPY\x01\x00",
    "no queues": lambda queues: b"1",
    "another message": lambda queues: b'{"order":1}',
    "a group that does not exist": lambda queues: b"[[0,1,99],[2]]",
    "a huge group": lambda queues: b"[[0,1,99999999999999999999],[2]]",
    "a negative group": lambda queues: b"[[0,-1],[1,2]]",
    "a group twice": lambda queues: b"[[0,1,0],[2]]",
    "a queue too many": lambda queues: msgspec.json.encode([*queues, []]),
    "no whole numbers": lambda queues: b"[[0.5,1],[2]]",
}


@pytest.mark.parametrize("name", LETTERS)
async def test_an_answer_that_cannot_be_carried_out_is_none(late, monkeypatch, name):  # noqa: F811
    """Compiled code would follow it without checks and corrupt the queues."""
    monkeypatch.setattr(reordering, "IN_PROCESS_GROUPS", 1)
    monkeypatch.setattr(solving, "send_task", lambda *args, **options: True)
    solver = CelerySolver("redis://127.0.0.1:1/0")
    late.dispatcher.reordering.ask = solver.ask
    before = late.seen().previous.queues()
    solver._redis = Mailbox(LETTERS[name](before))
    late.dispatcher.sweep()
    await until(lambda: late.dispatcher.reordering.fallbacks == 1)
    assert late.seen().previous.queues() == before

    seen = late.seen()
    solver._redis = Mailbox(msgspec.json.encode(solve(seen, moves=1_000).order.queues()))
    late.dispatcher.sweep()
    await until(lambda: late.dispatcher.reordering.control.reordered)
    assert sorted(late.drain()) == NUMBERS
    await solver.stop()


@contextmanager
def worker(url: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a Celery worker of one process in a separate process group, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-q", "-A", "workers.celery", "worker", "--queues", "control",
         "--concurrency", "1", "--without-gossip", "--without-mingle"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "PILOTHOUSE_DEBUG": "true",
             "PILOTHOUSE_STATE_DIR": str(folder), "DATABASE_URL": "", "REDIS_URL": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def solvers(process: "subprocess.Popen[bytes]") -> list[int]:
    """Return the pool's processes, which solve, without the one that started them."""
    children = (Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children").read_text()
    return [int(child) for child in children.split()]


def spent_s(process: "subprocess.Popen[bytes]") -> float:
    """Return the pool's processor time in seconds."""
    stats = [(Path("/proc") / str(one) / "stat").read_text().rpartition(")")[2].split() for one in solvers(process)]
    return sum(int(each[11]) for each in stats) / os.sysconf("SC_CLK_TCK")


def kill_pool(process: "subprocess.Popen[bytes]") -> None:
    for child in solvers(process):
        os.kill(child, signal.SIGKILL)


@pytest.mark.services
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(kill, id="the worker", marks=pytest.mark.nightly),
        pytest.param(kill_pool, id="its process", marks=pytest.mark.gate),
    ],
)
async def test_a_worker_is_killed_while_it_solves(late, redis_server, monkeypatch, tmp_path, end):  # noqa: F811
    url = redis_server.url
    for option in ("broker_url", "broker_write_url"):
        monkeypatch.setattr(app.conf, option, url)
    monkeypatch.setattr(reordering, "IN_PROCESS_GROUPS", 1)
    scheduler = late.dispatcher.reordering
    solver = CelerySolver(url)
    scheduler.ask = solver.ask
    with redis.Redis.from_url(url) as client:
        with worker(url, tmp_path) as process:
            # A worker that is asked while it starts may be too late already for the dispatcher's patience.
            await until(lambda: answering_workers(url, 1.0), 100)
            assert not look(late)
            # It says that a task is done after it only, and what computes then solves, for a second at least.
            await until(lambda: client.hlen("unacked"))
            before_s = spent_s(process)
            await until(
                lambda: spent_s(process) >= before_s + 0.05, 30
            )  # a busy machine may give it no more in a second
            end(process)
            assert not client.keys(f"{KEY}*"), "it had answered"
            assert not scheduler.control.reordered
            assert scheduler.pending_s is not None
            fallbacks = scheduler.fallbacks
            order = [late.placed[0].number, late.placed[1].number]
            late.finish()  # meanwhile who is due first is served
            assert late.placed[-1].number not in order
            await until(lambda: scheduler.fallbacks > fallbacks, reordering.PATIENCE_S + 20)
            kill(process)
        assert not scheduler.control.reordered
        with worker(url, tmp_path):
            await until(lambda: look(late), 120)
    assert scheduler.changes[-1].after_late_s < scheduler.changes[-1].before_late_s
    assert sorted([order[0], *late.drain()]) == NUMBERS
    await solver.stop()


def look(late) -> bool:  # noqa: F811
    """Do the gateway's periodic work; return whether an answer has arrived."""
    late.dispatcher.sweep()
    return bool(late.dispatcher.reordering.control.reordered)
