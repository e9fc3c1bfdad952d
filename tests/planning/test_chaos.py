"""A whole stack of which parts die in the middle of a surge: it continues serving, and its floor continues adding instances.

Celery and Redis are stopped (SIGSTOP), not killed: the supervisor would start them again at once, and a part that hangs is
worse than one that is gone. The solver is broken from the start.
"""

import asyncio
import json
import os
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.supervisor.running import RunningStack
from tests.supervisor.test_up import Address

pytestmark = [pytest.mark.services, pytest.mark.nightly]

WITHIN_S = 150.0
REQUESTS = 100  # more than all instances of a model in the demo run at once
BROKEN_SOLVER = """
    import importlib.abc, importlib.util, sys

    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "scheduling.planning.planner":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            real = spec.loader.exec_module

            def exec_module(module):
                real(module)
                def solve(*args, **kwargs):
                    raise ArithmeticError("the solver is broken")
                module.solve = solve

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Broken())
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Address:
    return Address(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def stack(address: Address, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Emulated fleet without traffic, planned by the minute with a solver that always fails."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(BROKEN_SOLVER))
    environment = {**address.environment, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "PYTHONPATH": str(folder)}
    stack = RunningStack(f"--port {address.port} --no-traffic", **environment)
    try:
        stack.wait_until_up()
        yield stack
    finally:
        stack.kill()


def shell(address: Address, code: str) -> str:
    """Return what *code* prints in a process next to the stack."""
    said = address.manage("shell", "--no-imports", "-c", textwrap.dedent(code))
    assert said.returncode == 0, said.stderr
    return said.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def secret(stack: RunningStack, address: Address) -> str:
    return shell(
        address,
        """
        from controlplane.accounts.models import Tenant
        from controlplane.accounts.services import create_api_key
        print(create_api_key(Tenant.objects.get(name="acme"), "chaos", "a test")[1])
        """,
    )


def moves(address: Address, model: str) -> list[dict]:
    """Return moves of *model*, oldest first, each with the state of its instance."""
    return json.loads(
        shell(
            address,
            f"""
            import json
            from controlplane.fleet.models import Instance
            from controlplane.planning.models import ScalingMove
            states = dict(Instance.objects.values_list("name", "state"))
            rows = ScalingMove.objects.filter(model={model!r}).order_by("pk").values("source", "delta", "region", "instance")
            print(json.dumps([row | {{"state": states[row["instance"]]}} for row in rows]))
            """,
        )
    )


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    parent_of = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent_of[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parent_of


def processes_called(stack: RunningStack, word: str) -> list[int]:
    """Return processes of *stack* with *word* in their command line; Redis overwrites its
    environment, so descent decides.
    """
    parent, keys = parents(), []
    for process in parent:
        at = process
        while at > 1 and at != stack.process.pid:
            at = parent.get(at, 0)
        with suppress(OSError):
            if at == stack.process.pid and word in (Path("/proc") / str(process) / "cmdline").read_text():
                keys.append(process)
    return keys


@contextmanager
def hanging(stack: RunningStack, word: str) -> Iterator[None]:
    """Suspend every process of the stack called *word* for the block."""
    stopped = processes_called(stack, word)
    assert stopped, f"nothing of the stack is called {word}"
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)


async def surge(
    address: Address, secret: str, model: str, tokens: int, until_moved, requests: int = REQUESTS
) -> list[int]:
    """Send long requests at once; their statuses, when all are answered. *until_moved* is awaited meanwhile."""
    body = {"model": model, "prompt": list(range(1, 400)), "max_tokens": tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {secret}", "X-Region": "us-east"}
    timeout = aiohttp.ClientTimeout(total=400)

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send() -> int:
            async with session.post(f"{address.url}/v1/completions", json=body, headers=headers) as response:
                await response.read()
                return response.status

        sent = [asyncio.create_task(send()) for _ in range(requests)]
        await until_moved()
        return list(await asyncio.gather(*sent))


def added_and_ready(address: Address, model: str, before: int):
    """Wait until the floor has added an instance of *model* beyond *before* moves, and it is ready."""

    async def wait() -> None:
        async with asyncio.timeout(WITHIN_S):
            while True:
                new = (await asyncio.to_thread(moves, address, model))[before:]
                if any(move["source"] == "floor" and move["delta"] == 1 and move["state"] == "ready" for move in new):
                    return
                await asyncio.sleep(1.0)

    return wait


@pytest.mark.parametrize(
    ("word", "model", "tokens"),
    [("workers.celery", "llama-3.2-3b", 3000), ("redis-server", "llama-2-70b", 800)],
    ids=["celery", "redis"],
)
async def test_a_surge_is_served_and_the_floor_adds_an_instance(stack, address, secret, word, model, tokens):
    before = len(moves(address, model))
    with hanging(stack, word):
        statuses = await surge(address, secret, model, tokens, added_and_ready(address, model, before))
    assert set(statuses) == {200}
    assert "ok" in stack.get(f"{address.url}/healthz").lower()


async def test_all_of_it_was_with_a_solver_that_fails_and_says_so(stack, address, secret):
    """A plan is due every minute once two minutes of demand are known; each fails, which
    is one event, and no plan is made.
    """

    async def moved() -> None:
        """The surge is all that is requested."""

    async def failed() -> bool:
        said = await asyncio.to_thread(
            shell,
            address,
            """
            from controlplane.events.models import Event
            from controlplane.planning.models import ScalingPlan
            events = Event.objects.filter(kind="job.failing", subject_id="plans", reason__contains="the solver is broken")
            print(events.count(), ScalingPlan.objects.count())
            """,
        )
        return said == "1 0"

    async with asyncio.timeout(WITHIN_S):
        while not await failed():
            await surge(address, secret, "llama-3.2-3b", 10, moved, requests=1)
            await asyncio.sleep(5.0)


def test_a_stalled_instance_continues(stack: RunningStack, address: Address) -> None:
    """The returning workers find no command left, and the stack stops normally."""
    left = shell(
        address,
        """
        from controlplane.fleet.models import InstanceCommand
        print(InstanceCommand.objects.filter(actor="safety autoscaler", state="pending").count())
        """,
    )
    assert left == "0"
    assert Path(f"/proc/{stack.process.pid}").exists()
    stack.interrupt()
    assert stack.processes() == []
