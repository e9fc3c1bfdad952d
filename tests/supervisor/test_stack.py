"""What the stack is made of; the whole of it, for real, is in test_up.py."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.env import SQLITE_WAITS_S
from controlplane.supervisor.screen import Screen
from controlplane.supervisor.stack import PATIENCE_S, STOP_ORDER, WEB_GRACE_S, Plan, run
from controlplane.supervisor.state import hold


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")],
)
def test_the_address_for_a_browser_on_this_machine(tmp_path: Path, host: str, url: str) -> None:
    assert Plan(tmp_path, host=host).url == url


def test_a_stop_waits_longer_for_the_gateway_than_it_may_take_and_less_than_five_seconds_for_the_rest() -> None:
    others = PATIENCE_S | {"web": 0.0}
    assert sum(max(others[name] for name in stage) for stage in STOP_ORDER) < 5
    assert PATIENCE_S["web"] > WEB_GRACE_S + SQLITE_WAITS_S
    assert {name for stage in STOP_ORDER for name in stage} == set(PATIENCE_S)


@pytest.mark.parametrize(("taken", "option"), [("port", "--port"), ("emulator_port", "PILOTHOUSE_EMULATOR_PORT")])
async def test_a_taken_port_is_said_in_one_line(
    tmp_path: Path, screen: Screen, said: Callable[[], str], taken_port: int, taken: str, option: str
) -> None:
    ports = {"port": 0, "emulator_port": 0, taken: taken_port}
    assert await run(Plan(tmp_path, **ports), screen) == 1
    assert said() == (
        f"Port {taken_port} of 127.0.0.1 cannot be used (Address already in use); choose another with {option}.\n"
    )


async def test_a_second_stack_is_refused(tmp_path: Path, screen: Screen, said: Callable[[], str]) -> None:
    with hold(tmp_path, "http://127.0.0.1:8000"):
        assert await run(Plan(tmp_path, port=0, emulator_port=0), screen) == 1
    assert said().startswith(f"Pilothouse already runs in {tmp_path}: process ")
    assert said().count("\n") == 1


async def test_a_redis_that_does_not_answer(tmp_path: Path, screen: Screen, said: Callable[[], str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{closed.getsockname()[1]}/0"
    assert await run(Plan(tmp_path, port=0, redis_url=url, demo=False), screen) == 1
    assert f"Redis does not answer at {url.replace(':secret@', '')} (REDIS_URL)" in said()
    assert "secret" not in said()
