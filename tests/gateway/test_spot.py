"""A donated instance serves opportunistic requests until it is reclaimed: a gateway before emulated instances."""

import asyncio
import time
from contextlib import AsyncExitStack

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.accounts.models import Tenant
from controlplane.fleet import services as fleet
from controlplane.fleet.models import Donation, GpuType, Instance, SloClass, SloKind
from controlplane.fleet.spot import services as spot
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop
from tests.gateway.conftest import do_once, emulate_two, gateway_before, until
from tests.gateway.test_eviction import events_of, text_of
from tests.workers.conftest import FAST, emulator  # noqa: F401 (fixture)

TOKENS = 120
BODY = {"model": "m", "prompt": list(range(1, 30)), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
KEEPS, ENDS = "spot-requeue", "spot-end"


def _classes() -> None:
    GpuType.objects.update(spot_usd_per_hour=1)
    tenant = Tenant.objects.get()
    for name, on_reclaim in ((KEEPS, "requeue"), (ENDS, "end")):
        row = SloClass.objects.create(
            name=name, title=name, kind=SloKind.OPPORTUNISTIC, priority=2, on_reclaim=on_reclaim
        )
        tenant.slo_classes.add(row)


@pytest.fixture
async def served(transactional_db, emulator, monkeypatch):  # noqa: F811
    """A gateway before two emulated instances with the same seed, neither donated yet."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    do_once(monkeypatch)
    step = {**FAST, "decode_a_s": 0.02}
    _, backends = await emulate_two(emulator, ["east", "east"], 4, profile=step)
    await database_sync_to_async(_classes)()
    async with gateway_before(backends) as served:
        yield served


def _donate(name: str) -> None:
    row = Instance.objects.get(name=name)
    fleet.drain(row, "planner", "the plan asks for one fewer")
    spot.donate(row, "planner", "the plan asks for one fewer")


async def donated(served, name: str = "b") -> None:
    await database_sync_to_async(_donate)(name)
    await sees(served, name, "donated")


async def sees(served, name: str, state: str) -> None:
    await served.gateway.dispatching.read_inventory()
    await until(lambda: replica(served, name).spec.state == state)


async def reclaim(served, name: str = "b") -> None:
    row = await database_sync_to_async(Instance.objects.get)(name=name)
    await database_sync_to_async(spot.reclaim)(row, "planner", "load")
    await served.gateway.dispatching.read_inventory()


def replica(served, name: str):
    return next(one for one in served.gateway.dispatching.topology.replicas.values() if one.name == name)


async def ask(served, slo_class: str = "", **body) -> aiohttp.ClientResponse:
    headers = served.headers | ({"X-SLO-Class": slo_class} if slo_class else {})
    return await served.http.post(f"{served.url}/v1/completions", json=BODY | body, headers=headers)


def running(served, name: str) -> int:
    return len(replica(served, name).requests)


async def test_a_reclaim_under_load_queues_the_request_again_and_it_ends_elsewhere(served):
    await donated(served)
    whole = text_of(await events_of(await ask(served, KEEPS, stream=True)))
    response = await ask(served, KEEPS, stream=True)
    reading = asyncio.create_task(events_of(response))
    await until(lambda: any(one.output_tokens > 10 for one in replica(served, "b").requests))
    began_s = time.monotonic()
    await reclaim(served)
    assert await served.becomes("ready", 1)
    assert time.monotonic() - began_s < TOKENS * 0.02, "it does not wait for the request to end"
    assert text_of(await reading) == whole, "no token is lost or repeated"
    row = (await served.rows())[-1]
    assert (row.outcome, row.output_tokens, row.evictions, row.instance) == ("done", TOKENS, 1, "a")
    donation = await database_sync_to_async(Donation.objects.get)()
    assert (donation.state, donation.evicted_requests, donation.ended_requests) == ("reclaimed", 1, 0)
    assert donation.reclaim_s is not None
    assert donation.offered_usd() == pytest.approx(donation.donated_s() / 3600)
    assert donation.donated_s() > 0
    await sees(served, "b", "ready")
    assert {one.endpoint for one in served.gateway.dispatching.topology.replicas.values()} == set(
        served.gateway.dispatching.topology.own_endpoints
    )
    fleet_arrays = served.gateway.dispatching.topology.fleet
    assert (fleet_arrays.running.sum(), fleet_arrays.kv_tokens.sum(), fleet_arrays.remaining_tokens.sum()) == (0, 0, 0)
    assert fleet_arrays.accepting.sum() == 2


async def test_a_class_may_have_its_requests_ended_with_an_error(served):
    await donated(served)
    asking = asyncio.create_task(ask(served, ENDS))
    await until(lambda: running(served, "b") == 1)
    await reclaim(served)
    answer = await asking
    assert answer.status == 503
    error = (await answer.json())["error"]
    assert (error["code"], "reclaimed" in error["message"]) == ("spot_reclaimed", True)
    assert answer.headers["Retry-After"]
    assert await served.becomes("ready", 1)
    donation = await database_sync_to_async(Donation.objects.get)()
    assert (donation.evicted_requests, donation.ended_requests) == (0, 1)
    (row,) = await served.rows()
    assert (row.outcome, row.error_code) == ("failed", "spot_reclaimed")


async def test_an_answer_that_cannot_be_continued_ends_by_itself(served):
    await donated(served)
    response = await ask(served, KEEPS, stream=True, stop=["horizon"])
    await until(lambda: any(one.output_tokens > 3 for one in replica(served, "b").requests))
    await reclaim(served)
    await events_of(response)
    assert await served.becomes("ready", 1)
    (row,) = await served.rows()
    assert (row.outcome, row.evictions, row.instance) == ("done", 0, "b")


async def test_what_is_donated_is_known_to_the_next_process(served, monkeypatch):
    await donated(served)
    async with AsyncExitStack() as stack:
        gateway = Gateway(ScalingLoop)
        await gateway.dispatching.read_inventory()
        again = next(one for one in gateway.dispatching.topology.replicas.values() if one.name == "b")
        assert again.endpoint.is_spot
        await stack.aclose()
    await database_sync_to_async(_reclaim_row)()
    gateway = Gateway(ScalingLoop)
    await gateway.dispatching.read_inventory()
    again = next(one for one in gateway.dispatching.topology.replicas.values() if one.name == "b")
    assert again.endpoint.is_spot, "so that its heartbeat makes it ready"


def _reclaim_row() -> None:
    spot.reclaim(Instance.objects.get(name="b"), "planner", "load")
