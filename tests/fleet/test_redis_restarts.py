"""Redis restarts again and again while Celery's workers connect: what is asked for is done without a restart of theirs.

A whole stack of processes, with a Redis that is not one of them.
"""

import json
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.redis_server import RedisServer
from tests.supervisor.running import RunningStack
from tests.supervisor.test_up import Address, assert_no_traceback

pytestmark = [pytest.mark.services, pytest.mark.nightly]
RESTARTS, WITHIN_S = 4, 3.0
DONE_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer().start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Address:
    address = Address(tmp_path_factory.mktemp("redis"))
    address.environment["REDIS_URL"] = redis_server.url
    return address


@pytest.fixture(scope="module")
def stack(address: Address) -> Iterator[RunningStack]:
    environment = {
        **address.environment,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "PILOTHOUSE_FLOOR": "false",
    }
    stack = RunningStack(f"--port {address.port} --no-traffic", **environment)
    try:
        stack.wait_until_up()
        yield stack
    finally:
        stack.kill()


def shell(address: Address, code: str) -> object:
    """Return what *code* prints as JSON in a process next to the stack."""
    said = address.manage("shell", "--no-imports", "-c", textwrap.dedent(code))
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.strip().splitlines()[-1])


def ask(address: Address, verb: str, state: str, chosen: str) -> list[str]:
    """Ask for *verb* of the instances *chosen* in *state*, and return their names."""
    names = shell(
        address,
        f"""
        import json
        from controlplane.fleet import services
        from controlplane.fleet.models import Instance
        chosen = list(Instance.objects.filter(state={state!r}).order_by("name"){chosen})
        for instance in chosen:
            services.{verb}(instance, "test", "Redis restarts")
        print(json.dumps([instance.name for instance in chosen]))
        """,
    )
    assert isinstance(names, list)
    return names


def until_state(address: Address, names: list[str], state: str) -> None:
    end_s = time.monotonic() + DONE_WITHIN_S
    code = f"""
        import json
        from controlplane.fleet.models import Instance
        print(json.dumps(sorted(set(Instance.objects.filter(name__in={names!r}).values_list("state", flat=True)))))
        """
    while (states := shell(address, code)) != [state]:
        assert time.monotonic() < end_s, f"{names} are {states} after {DONE_WITHIN_S:.0f} s"
        time.sleep(0.5)


def restart_often(server: RedisServer) -> None:
    for _ in range(RESTARTS):
        server.stop()
        server.start()
        time.sleep(WITHIN_S / RESTARTS)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with tasks running"])
def test_a_start_is_done_after_four_restarts_of_redis(stack, address, redis_server, busy):
    """C39."""
    stopped = ask(address, "stop", "ready", "[:2]")
    if not busy:
        until_state(address, stopped, "stopped")
    restart_often(redis_server)
    until_state(address, stopped, "stopped")
    ask(address, "start", "stopped", f".filter(name__in={stopped!r})")  # one may be started by a plan already
    until_state(address, stopped, "ready")
    redis_server.stop()
    stack.wait_for("Redis to be shown as down", lambda: "redis" in down_parts(stack, address), DONE_WITHIN_S)
    redis_server.start()
    stack.wait_for("all parts to be back", lambda: not down_parts(stack, address), DONE_WITHIN_S)
    assert [line for line in stack.lines if "starting it again" in line] == []
    assert_no_traceback(stack)


def down_parts(stack: RunningStack, address: Address) -> list[str]:
    """Return parts that the gateway's metrics show as down."""
    lines = stack.get(f"{address.url}/metrics").splitlines()
    prefix = 'pilothouse_part_up{part="'
    return [
        line.removeprefix(prefix).partition('"')[0]
        for line in lines
        if line.startswith(prefix) and line.endswith(" 0.0")
    ]
