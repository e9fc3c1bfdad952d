"""A fork of a living fleet, simulated with the requests that then came, does what the fleet did.

The gateway is the real one, in the test's event loop; its instances are emulated, and slow enough (0.1 s a step) that what
the machine is late by does not count. Minutes of real time: `pytest -m nightly`. What may differ here is what a machine and
HTTP add; `test_fork_on_a_virtual_clock` compares decision for decision.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import numpy as np
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.dispatch.snapshot import Snapshot
from controlplane.fleet.models import Deployment, GpuType, Model, PerformanceProfile
from controlplane.gateway.explanation import trace_of
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.simulation.whatif.fork import fork_of
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario
from tests.gateway.conftest import serving, until
from tests.gateway.rows import SECRET, make_rows
from tests.simulation.whatif.rows import as_it_went
from workers.emulator.server import Fleet, make_app, run
from workers.emulator.spec import read_spec

WARM_UP_S = 30.0
WATCHED_S = float(os.environ.get("FORK_WATCHED_S", "90"))
INSTANCES, SEQUENCES = 3, 4
PER_S = 2.2
ALONE = WATCHED_S >= 600
"""The long run has the machine for itself, the short one runs next to other tests."""
MOST = 0.10 if ALONE else 0.20
"""Of TTFT. In a minute or two next to others up to 14 % were measured, in ten minutes 0.3 and 4.5 %."""
TOKENS_BETWEEN_COUNTS = 2 * SEQUENCES
"""By which what is left to compute may differ: of each sequence on both instances the token of a step."""
STEP_S = 0.13
"""Of a full batch, by the profile."""
PROFILE = {
    "prefill_t0_s": 0.1,
    "prefill_a_s": 0.05,
    "prefill_b_s_per_token": 1e-3,
    "prefill_c_s_per_token2": 0.0,
    "decode_a_s": 0.1,
    "decode_b_s_per_sequence": 0.005,
    "decode_c_s_per_token": 1e-5,
}
SPEC = {
    "model": "m",
    "profile": PROFILE,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "kv_blocks": 1024,
}


@dataclass
class Server:
    name: str
    url: str


def make_profile(ordering: str) -> None:
    PerformanceProfile.objects.create(
        model=Model.objects.get(), gpu_type=GpuType.objects.get(), tensor_parallel=1, source="test", **PROFILE
    )
    Deployment.objects.update(
        ordering_policy=ordering,
        min_instances=INSTANCES,
        max_instances=INSTANCES,
        max_num_batched_tokens=2048,
        requests_ahead_limit=0,
    )


async def ask(http: aiohttp.ClientSession, url: str, prompt: int, output: int) -> None:
    body = {
        "model": "m", "prompt": [7] * prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content:
            pass


async def send(http: aiohttp.ClientSession, url: str, for_s: float, random: np.random.Generator) -> None:
    """Send requests at random times for *for_s*, of random lengths, and wait for all answers."""
    began, at_s = time.monotonic(), 0.0
    async with asyncio.TaskGroup() as tasks:
        while (at_s := at_s + random.exponential(1 / PER_S)) < for_s:
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            prompt, output = int(random.integers(20, 400)), int(np.clip(random.lognormal(3.1, 0.6), 2, 200))
            tasks.create_task(ask(http, url, prompt, output))


def simulate(start: Start) -> Result:
    scenario = Scenario.model_validate(start.scenario)
    return stage_start(start, scenario, 0).run(decisions=True)


def ledger_of(start: Start) -> list[LedgerRow]:
    return list(LedgerRow.objects.filter(arrived_at__gte=start.at).order_by("arrived_at", "pk"))


@pytest.mark.nightly
@pytest.mark.parametrize("ordering", ["fcfs", "qlm"])
async def test_a_fork_does_what_the_fleet_did(transactional_db, monkeypatch, ordering):
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.5)
    async with AsyncExitStack() as stack:
        fleet = Fleet()
        names = [f"m-{number}" for number in range(INSTANCES)]
        for name in names:
            fleet.put(name, read_spec(SPEC))
        runner = await run(make_app(fleet), "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        servers = [Server(name, f"http://127.0.0.1:{runner.addresses[0][1]}/{name}") for name in names]
        await database_sync_to_async(make_rows)(
            servers, regions=["east"] * INSTANCES, max_num_seqs=SEQUENCES, queue_bound=1000
        )
        await database_sync_to_async(make_profile)(ordering)
        gateway = Gateway(ScalingLoop)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)))
        url = await stack.enter_async_context(serving(gateway))
        await until(lambda: gateway.topology.fleet.accepting.sum() == INSTANCES)
        snapshot = Snapshot(gateway.dispatcher, gateway.observation, gateway.requests.last_heard)
        sending = asyncio.create_task(send(http, url, WARM_UP_S + WATCHED_S, np.random.default_rng(1)))
        await asyncio.sleep(WARM_UP_S)
        began_s = time.perf_counter()
        seen = snapshot()
        seen_s = time.perf_counter() - began_s
        start = await database_sync_to_async(fork_of)(seen, WATCHED_S)
        print(f"\nfork: {1000 * (time.perf_counter() - began_s):.0f} ms, {1000 * seen_s:.1f} of them in the gateway")
        await sending
        await gateway.ledger.flush()
        start = await database_sync_to_async(as_it_went)(start, WATCHED_S + 600)
        rows = await database_sync_to_async(ledger_of)(start)
        result = await database_sync_to_async(simulate)(start)
    held = result.requests.count - len(rows)
    assert held == len(start.state.running) + len(start.state.waiting) > 0
    outcomes = result.outcomes[held:]
    print(f"\n{ordering}: {held} held at the fork, {len(rows)} came in {WATCHED_S:.0f} s")
    measured = {
        "ttft": (np.array([row.ttft_ms for row in rows]), 1000 * outcomes["ttft_s"]),
        "queue": (np.array([row.queue_ms for row in rows]), 1000 * outcomes["queue_s"]),
        "e2e": (np.array([row.e2e_ms for row in rows]), 1000 * outcomes["e2e_s"]),
        "itl": (
            np.array([row.itl_ms or np.nan for row in rows]),
            1000 * (outcomes["e2e_s"] - outcomes["ttft_s"]) / np.maximum(result.requests.output_tokens[held:] - 1, 1),
        ),
    }
    off = {}
    for name, (real_ms, simulated_ms) in measured.items():
        for percentile in (50, 95):
            real, simulated = np.nanpercentile(real_ms, percentile), np.nanpercentile(simulated_ms, percentile)
            error = off[name, percentile] = simulated / real - 1 if real else 0.0
            print(f"{name} p{percentile}: ledger {real:8.1f} ms, simulated {simulated:8.1f} ms, {error:+.1%}")
    placed = [names.index(row.instance) for row in rows]
    same = np.array(placed) == outcomes["instance"]
    leading = int(np.argmin(same)) if not same.all() else same.size
    print(f"placements: {same.mean():.1%} the same, the first {leading} of them without a difference")
    if not same.all():
        saw = [(each["instance"], each["score"]) for each in trace_of(rows[leading])[-1]["seen"] if each["room"]]
        other = names[outcomes["instance"][leading]]
        print(f"there the fleet saw {saw} and took {rows[leading].instance}; the simulation took {other}")
        scores = dict(saw)
        # They differ first where two were nearly alike, for tokens are counted ten times a second live, at every decision
        # here; or where a sequence ends on one of them within two steps, before the decision here and after it there.
        at_s = float(result.requests.arrival_s[held + leading] + outcomes["queue_s"][leading])
        ends_s = result.requests.arrival_s + result.outcomes["e2e_s"]
        between = [
            bool((np.abs(ends_s[result.outcomes["instance"] == each] - at_s) <= 2 * STEP_S).any())
            for each in (placed[leading], outcomes["instance"][leading])
        ]
        near = any(between) or abs(scores[rows[leading].instance] - scores[other]) <= TOKENS_BETWEEN_COUNTS
        # With other tests running a step of an instance is late by more than that, and fleet and simulation see different
        # loads: the decisions are judged in the long run, which has the machine for itself.
        assert near or ordering == "qlm" or not ALONE, (
            "by QLM an instance pulls from its own queue, whatever it has left"
        )
    assert abs(off["ttft", 50]) <= MOST
    assert abs(off["ttft", 95]) <= MOST
    assert leading >= 3 or not ALONE
