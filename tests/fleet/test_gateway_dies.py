"""The gateway's process is killed in the middle of a swap: nothing is lost or answered twice, and the swap comes to its end.

A whole stack of processes. Clients do what SDKs do: whose connection breaks asks again.
"""

import asyncio
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.supervisor.running import RunningStack
from tests.supervisor.test_up import Address, process_id

pytestmark = [pytest.mark.services, pytest.mark.nightly]

PAIR = ("llama-3-2-3b-us-west-1", "llama-3-1-8b-us-west-1")
MODELS = ("llama-3.2-3b", "llama-3.1-8b")
CLIENTS = 6  # for each model
TOKENS = 400
WITHIN_S = 150.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Address:
    return Address(tmp_path_factory.mktemp("swap"))


@pytest.fixture(scope="module")
def stack(address: Address) -> Iterator[RunningStack]:
    """The emulated fleet, in which two models share the GPUs of one instance; memory holds
    no weights, so loading takes long.
    """
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


def shell(address: Address, code: str) -> Any:
    """Return what *code* prints as JSON in a process next to the stack."""
    said = address.manage("shell", "--no-imports", "-c", "import json\n" + textwrap.dedent(code))
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def secret(stack: RunningStack, address: Address) -> str:
    """A key, once the second of the pair sleeps and shares the GPUs of the first."""
    key: str = shell(
        address,
        f"""
        import time
        from controlplane.accounts.models import Tenant
        from controlplane.accounts.services import create_api_key
        from controlplane.fleet import services
        from controlplane.fleet.models import Instance, SwapGroup
        awake, asleep = (Instance.objects.get(name=name) for name in {PAIR!r})
        services.sleep(asleep, "test", "shares GPUs", 2)
        while Instance.objects.get(pk=asleep.pk).state != "sleeping":
            time.sleep(0.2)
        group = SwapGroup.objects.create(name="us-west-1", cpu_memory_bytes=0)
        Instance.objects.filter(pk=asleep.pk).update(node=awake.node)
        Instance.objects.filter(pk__in=(awake.pk, asleep.pk)).update(swap_group=group)
        services.notify()
        print(json.dumps(create_api_key(Tenant.objects.get(name="acme"), "swap", "a test")[1]))
        """,
    )
    return key


def rows(address: Address) -> dict[str, Any]:
    """Return the states of the pair, and of the last requested swap."""
    answer: dict[str, Any] = shell(
        address,
        f"""
        from controlplane.fleet.models import Instance, Swap
        states = dict(Instance.objects.filter(name__in={PAIR!r}).values_list("name", "state"))
        swap = Swap.objects.order_by("pk").values("state", "message", "drain_s", "load_s").last()
        print(json.dumps({{"states": states, "swap": swap}}))
        """,
    )
    return answer


@dataclass
class Clients:
    """Ask again and again, and the same once more where no answer came."""

    url: str
    secret: str
    over: bool = False
    asked: int = 0
    answers: list[str] = field(default_factory=list)
    """The gateway's id of each request that was answered."""
    broken: int = 0
    waited: int = 0
    """Answers whose request found no room when it came."""

    async def ask(self, http: aiohttp.ClientSession, model: str) -> None:
        body = {"model": model, "prompt": list(range(1, 50)), "max_tokens": TOKENS, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.secret}", "X-Region": "us-west"}
        while not self.over:
            self.asked += 1
            while (answer := await self._once(http, body, headers)) is None:
                self.broken += 1
                await asyncio.sleep(0.2)
            assert answer["usage"]["completion_tokens"] == TOKENS
            assert answer["model"] == model
            self.answers.append(answer["request_id"])
            self.waited += answer["waited"]

    async def _once(
        self, http: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        try:
            async with http.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
                if response.status in (502, 503):
                    return None  # the gateway comes up, or its instance went
                assert response.status == 200, await response.text()
                answer: dict[str, Any] = await response.json()
                waited = "x-queue-position" in response.headers
                return answer | {"request_id": response.headers["x-request-id"], "waited": waited}
        except (aiohttp.ClientError, ConnectionError):
            return None


async def until_state(address: Address, name: str, states: set[str]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await asyncio.to_thread(rows, address))["states"][name] not in states:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("where", "ordering"),
    [("while who is awake drains", "fcfs"), ("while the other loads", "fcfs"), ("while the other loads", "qlm")],
)
async def test_a_gateway_that_dies_within_a_swap(stack, address, secret, where, ordering):
    if ordering == "qlm":
        await asyncio.to_thread(shell, address, order_by_groups())
    awake = next(name for name, state in rows(address)["states"].items() if state == "ready")
    (asleep,) = set(PAIR) - {awake}
    clients = Clients(address.url, secret)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        asking = [asyncio.create_task(clients.ask(http, model)) for model in MODELS for _ in range(CLIENTS)]
        while not len(clients.answers):
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in asking)
        name, state = (awake, "draining") if where == "while who is awake drains" else (asleep, "loading")
        within = await asyncio.to_thread(
            shell, address, swap_to_and_kill(asleep, name, state, process_id(stack, "uvicorn"))
        )
        assert within == "in_progress"
        await until_state(address, asleep, {"ready"})
        done = await asyncio.to_thread(rows, address)
        before = len(clients.answers)
        async with asyncio.timeout(WITHIN_S):
            while len(clients.answers) < before + 2 * CLIENTS:
                await asyncio.sleep(0.1)
                assert not any(task.done() and task.exception() for task in asking)
        clients.over = True
        await asyncio.gather(*asking)
    assert done["states"] == {awake: "sleeping", asleep: "ready"}
    assert clients.broken > 0, "it was not killed while something ran"
    assert ordering == "fcfs" or clients.waited > 2 * CLIENTS, "few stood in request groups"
    assert len(clients.answers) == len(set(clients.answers)) == clients.asked
    await asyncio.sleep(2.0)  # the ledger is written twice a second
    ledger_says = await asyncio.to_thread(shell, address, ledger(clients.answers))
    assert ledger_says["swap"] == "succeeded"
    assert ledger_says["twice"] == 0
    assert ledger_says["open_commands"] == 0
    # The rows of the last half second of a process that is killed may be lost, no other ones.
    assert ledger_says["rows"] >= len(clients.answers) - 2 * CLIENTS


def order_by_groups() -> str:
    """Have the pair serve by request groups, two requests at once, so that most stand in a virtual queue."""
    return f"""
        from controlplane.fleet.models import Deployment
        from controlplane.fleet.services import notify
        of = Deployment.objects.filter(instances__name__in={PAIR!r})
        of.update(ordering_policy="qlm", max_num_seqs=2)
        notify()
        print("null")
        """


def swap_to_and_kill(asleep: str, name: str, state: str, gateway: int) -> str:
    """Ask for the swap, kill the process *gateway* once the instance *name* is in *state*, and print the swap's state then.

    In one process: on a busy machine one more takes as long to start as weights to load.
    """
    return f"""
        import os, signal, time
        from controlplane.fleet.models import Instance, Swap
        from controlplane.fleet.swaps import services as swaps
        swaps.request(Instance.objects.get(name={asleep!r}), "test", "its turn")
        while Instance.objects.get(name={name!r}).state != {state!r}:
            time.sleep(0.02)
        os.kill({gateway}, signal.SIGKILL)
        print(json.dumps(Swap.objects.order_by("pk").last().state))
        """


def ledger(answers: list[str]) -> str:
    """Return how many of *answers* the ledger has, and has twice, and the outcome of the swap."""
    return f"""
        from collections import Counter
        from controlplane.fleet.models import Swap, InstanceCommand
        from controlplane.gateway.models import LedgerRow
        wanted = set({answers!r})
        rows = LedgerRow.objects.filter(outcome="done").values_list("request_id", flat=True)
        counted = Counter(row for row in rows if row in wanted)
        print(json.dumps({{
            "rows": len(counted),
            "twice": sum(times > 1 for times in counted.values()),
            "swap": Swap.objects.order_by("pk").last().state,
            "open_commands": InstanceCommand.objects.open().count(),
        }}))
        """
