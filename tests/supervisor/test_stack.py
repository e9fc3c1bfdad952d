"""What the stack is made of; the whole of it, for real, is in test_up.py."""

import io
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.env import SQLITE_WAITS_S
from controlplane.listening import SHARED
from controlplane.supervisor.keeper import Part, PartError
from controlplane.supervisor.screen import Screen
from controlplane.supervisor.stack import PATIENCE_S, STOP_ORDER, WEB_GRACE_S, Plan, Stack, bound, run
from controlplane.supervisor.state import RESTART_FILE, hold


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


def test_relays_share_the_port_and_each_process_has_one_of_its_own(tmp_path: Path) -> None:
    assert (Plan(tmp_path).gateway, Plan(tmp_path).addresses) == (["web"], {"": ("127.0.0.1", 8000)})
    plan = Plan(tmp_path, host="::", relays=2, dispatchers=1)
    assert plan.gateway == ["dispatcher-1", "relay-1", "relay-2"]
    own = {"dispatcher-1": 8001, "relay-1": 8002, "relay-2": 8003, "relay-3": 8004}
    assert plan.addresses == {"": ("::", 8000)} | {name: ("127.0.0.1", port) for name, port in own.items()}
    plan = Plan(tmp_path, port=0, relays=1, demo=False)
    with bound(plan) as sockets:
        part = Stack(plan, Screen(io.StringIO()), sockets)._serving("relay-1")
        public, private = sockets[""].fileno(), sockets["relay-1"].fileno()
    assert part.sockets == [private, public]
    assert dict(part.environment) == {"PILOTHOUSE_PART": "relay", SHARED: str(public)}
    assert part.argv[part.argv.index("--fd") + 1] == str(private)


async def test_the_port_of_any_process_may_be_taken(
    tmp_path: Path, screen: Screen, said: Callable[[], str], taken_port: int
) -> None:
    assert await run(Plan(tmp_path, port=taken_port - 2, relays=1, dispatchers=1, emulator_port=0), screen) == 1
    assert "cannot be used (Address already in use); choose another with --port.\n" in said()


class Recorder:
    """A keeper that only says what was asked of it; *fails* does not come back."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.fails = fails

    async def run(self, part: Part, on_line: Callable[[str], None] | None = None) -> None:
        self._ask(f"run {part.name}")

    async def start(self, part: Part) -> None:
        self._ask(f"start {part.name}")

    async def restart(self, name: str) -> None:
        self._ask(f"restart {name}")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise PartError(f"{what} failed")

    def end(self, name: str) -> None:
        self.asked.append(f"end {name}")

    async def drained(self) -> None:
        self.asked.append("drained")


@pytest.mark.parametrize(
    ("relays", "fails", "asked", "result"),
    [
        (0, "", "run prepare, restart web, restart beat, restart celery, drained", ""),
        (
            1,
            "",
            "run prepare, start relay-2, restart relay-1, restart dispatcher-2, restart dispatcher-1, restart beat, "
            "restart celery, end relay-2, drained",
            "",
        ),
        (
            1,
            "restart relay-1",
            "run prepare, start relay-2, restart relay-1, end relay-2, drained",
            "restart relay-1 failed; what comes after it was not restarted",
        ),
        *(
            (
                0,
                what,
                f"run prepare{', restart web' * (what[:7] == 'restart')}, drained",
                f"{what} failed; what comes after it was not restarted",
            )
            for what in ("run prepare", "restart web")
        ),
    ],
)
async def test_a_restart_goes_one_by_one_and_ends_with_the_first_failure(
    tmp_path: Path, screen: Screen, said: Callable[[], str], relays: int, fails: str, asked: str, result: str
) -> None:
    plan = Plan(tmp_path, port=0, relays=relays, demo=False)
    with bound(plan) as sockets:
        stack = Stack(plan, screen, sockets)
        stack.keeper = keeper = Recorder(fails)  # type: ignore[assignment]
        stack._ask_to_restart()
        assert (tmp_path / RESTART_FILE).read_text() == "Not restarted: it is still starting"
        stack._up = True
        (tmp_path / RESTART_FILE).unlink()
        for _ in range(2):  # the second is one with the first
            stack._ask_to_restart()
        assert stack._restarting is not None
        await stack._restarting
    assert ", ".join(keeper.asked) == asked
    assert (tmp_path / RESTART_FILE).read_text() == result
    assert result in said()
