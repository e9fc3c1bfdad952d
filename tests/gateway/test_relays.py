"""Relays and dispatchers in separate processes, as far as they share nothing but rows and a socket: requests live through
whatever happens to the owner of the queues."""

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields

import aiohttp
import orjson
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from prometheus_client import generate_latest

from controlplane.accounts.models import Budget, BudgetKind, Tenant
from controlplane.applications.models import Application
from controlplane.dispatch import lease as leases
from controlplane.dispatch import port
from controlplane.dispatch.lease import Lease
from controlplane.dispatch.monitoring.measures import RELAY_SILENT_S
from controlplane.dispatch.monitoring.summary import merged
from controlplane.dispatch.monitoring.windows import Count
from controlplane.fleet.models import Deployment, Instance, Model, Region
from controlplane.gateway import dispatchers
from controlplane.gateway.process import Gateway
from controlplane.operations import Operations
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.planning.plans.waiting import Waiting
from tests.gateway.backend import Backend
from tests.gateway.conftest import ServedGateway, do_once, serving, until
from tests.gateway.rows import make_model, make_rows

MANY = 6


def connected(gateway):
    """Whether every shard has an owner that takes records of *gateway*."""
    return gateway.dispatchers.routes.keys() >= {*gateway.lease.shards}


class Fleet:
    """Processes of one installation."""

    def __init__(self, stack, folder, monkeypatch, backends, http):
        self.stack, self.folder, self.monkeypatch = stack, folder, monkeypatch
        self.backends, self.http = backends, http
        self.dispatchers, self.relays = [], []

    async def dispatcher(self, zone=""):
        """Start a dispatcher, which owns the queues or stands by."""
        address = f"ipc://{self.folder}/{len(self.dispatchers)}"
        self.monkeypatch.setattr(settings, "DISPATCHER_BIND", address)
        self.monkeypatch.setattr(settings, "ZONE", zone)
        gateway = Gateway(ScalingLoop, "dispatcher")
        self.monkeypatch.setattr(settings, "DISPATCHER_BIND", "")
        gateway.lease.owner += f"-{len(self.dispatchers)}"  # they share a process here
        self.monkeypatch.setattr(settings, "DISPATCHER_BIND", address)
        await self.stack.enter_async_context(serving(gateway))
        self.dispatchers.append(gateway)
        return gateway

    async def relay(self, zone=""):
        self.monkeypatch.setattr(settings, "ZONE", zone)
        gateway = Gateway(ScalingLoop, "relay")
        gateway.lease.owner += f"-relay-{len(self.relays)}"
        url = await self.stack.enter_async_context(serving(gateway))
        self.relays.append(ServedGateway(gateway, url, self.backends, self.http))
        await until(lambda: connected(gateway) and gateway.serves())
        return self.relays[-1]

    @property
    def owner(self):
        (owner,) = [one for one in self.dispatchers if one.lease.held]
        return owner

    async def takes_over(self, heir):
        await until(lambda: heir.lease.held)
        await until(lambda: all(connected(each.gateway) for each in self.relays))


async def test_models_are_dealt_to_two_dispatchers_and_moved_between_them(fleet):
    backend = Backend("n-0")
    backend.script.models = ("n",)
    await backend.start()
    fleet.stack.push_async_callback(backend.stop)
    fleet.backends.append(backend)
    await database_sync_to_async(make_model)("n", backend.url)
    (relay,), other = fleet.relays, await fleet.dispatcher()
    await database_sync_to_async(Model.objects.filter(name="n").update)(shard=2)
    await until(lambda: other.dispatching.serving)
    first = next(one for one in fleet.dispatchers if one.lease.held)
    await until(
        lambda: first.dispatching.topology.models.keys() == {"m"} and len(relay.gateway.dispatchers.routes) == 2
    )
    assert other.dispatching.topology.models.keys() == {"n"}
    ready = [one.dispatching.topology.fleet.accepting for one in (first, other)]
    await until(lambda: [each.sum() for each in ready] == [2, 1])
    whole = first.publisher.summary.snapshot([orjson.loads(orjson.dumps(other.publisher.summary.part()))])
    assert whole["models"].keys() == {"m", "n"}
    assert whole["instances"]["name"] == ["m-0", "m-1", "n-0"]
    assert [whole["fleet"][name] for name in ("instances", "instances_ready")] == [3, 3]
    assert whole.keys() == first.publisher.summary.snapshot().keys()
    slowly(fleet)
    asked = [asyncio.create_task(relay.chat(model=model, stream=True)) for model in "mn" * 6]
    requests = [one.dispatching.dispatcher.requests for one in (first, other)]
    await until(lambda: [len(each) for each in requests] == [6, 6])
    await database_sync_to_async(Model.objects.filter(name="n").update)(shard=1)
    await other.dispatching.read_inventory()  # before the relay hears of the move
    assert [len(each) for each in requests] == [6, 0]
    first.dispatching.refresh_now()
    await until(lambda: [len(each) for each in requests] == [12, 0])
    for response in await asyncio.gather(*asked):
        assert response.status == 200
        assert (await response.text()).count('"content"') >= 40
    await until(lambda: not any(requests))
    assert [len(each.bodies) for each in fleet.backends] == [3, 3, 6], "each was given to one instance once"
    counted = first.dispatching.measures
    await until(lambda: counted.totals.total() == 12)
    assert {model: count for (model, *_), count in counted.totals.items()} == {"m": 6, "n": 6}
    assert [arrivals(counted, model) for model in "mn"] == [6, 6]
    assert not other.dispatching.measures.totals


WEST = "shard 1 in eu"
WORK = {field.name: 1.0 for field in fields(Waiting)}


@pytest.fixture
async def zoned(fleet):
    """The fleet with a dispatcher, a relay and the region west, of one instance, in the zone eu."""
    backend = Backend("w-0")
    await backend.start()
    fleet.stack.push_async_callback(backend.stop)
    fleet.backends.append(backend)

    def west():
        east = Deployment.objects.get()
        east.pk, east.region = None, Region.objects.create(name="west", title="West", zone="eu")
        east.save()
        Instance.objects.create(name="w-0", deployment=east, url=backend.url, state="ready")

    await database_sync_to_async(west)()
    await fleet.dispatcher("eu")
    await until(lambda: WEST in fleet.dispatchers[1].dispatching.serving)
    await fleet.relay("eu")
    both = [each.gateway.dispatchers for each in fleet.relays]
    await until(lambda: all({port.FIRST, WEST} <= each.routes.keys() == each.rooms.keys() for each in both))
    await until(lambda: all(one.dispatching.topology.fleet.accepting.any() for one in fleet.dispatchers))
    return fleet


async def test_a_zone_is_served_by_its_own_dispatcher_and_forwards_what_it_has_no_room_for(zoned):
    home, eu = zoned.dispatchers
    names = [sorted(each.name for each in one.dispatching.topology.replicas.values()) for one in zoned.dispatchers]
    assert names == [["m-0", "m-1"], ["w-0"]]
    for relay, region in zip(zoned.relays, ("east", "west"), strict=True):
        assert (await relay.chat()).status == 200
        assert (await relay.rows())[-1].region == region
    slowly(zoned)
    async with streams(zoned.relays[1:], MANY) as tasks:
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    await until(lambda: not (home.dispatching.dispatcher.requests or eu.dispatching.dispatcher.requests))
    rows = (await zoned.relays[1].rows())[-MANY:]
    assert {row.region for row in rows} == {"east", "west"}
    for row in rows:
        way = [step["forwarded"] for step in row.trace if "forwarded" in step]
        assert way == (["zone eu to no zone"] if row.region == "east" else [])
        assert row.own_region == ("west" if row.region == "east" else ""), "it counts as demand where its caller is"
        assert row.queue_ms == pytest.approx(row.trace[-1]["waited_ms"], abs=0.01)
        assert all(step["after_ms"] <= row.queue_ms for step in row.trace if "forwarded" in step)
    both = [one.publisher.summary for one in zoned.dispatchers]
    parts = [orjson.loads(orjson.dumps(each.part() | {"work": {"m": WORK}})) for each in both]
    whole = both[0].snapshot(parts[1:])
    assert (whole["instances"]["name"], whole["models"]["m"]["instances"]) == (["m-0", "m-1", "w-0"], 3)
    assert merged(*parts)["work"] == {"m": {name: 2 * value for name, value in WORK.items()}}


async def test_a_zone_without_a_dispatcher_is_another_ones_until_it_has_one_again(zoned):
    home, eu = zoned.dispatchers
    slowly(zoned)
    async with streams(zoned.relays, MANY) as tasks:
        await until(lambda: all(len(backend.bodies) >= 2 for backend in zoned.backends))
        stops_dead(eu)
        await until(lambda: WEST in home.dispatching.serving)
        answers = await asyncio.gather(*tasks)
    assert {status for status, _ in answers} == {200}
    assert all(text.count('"content"') >= 40 and text.endswith("data: [DONE]\n\n") for _, text in answers)
    assert sum(len(backend.bodies) for backend in zoned.backends) == 2 * MANY, "each was given to one instance once"
    assert home.dispatching.topology.zones == {"east": "", "west": "eu"}
    again = await zoned.dispatcher("eu")
    await until(lambda: WEST in again.dispatching.serving)
    assert home.dispatching.serving.keys() == {port.FIRST}
    await until(lambda: all(connected(each.gateway) for each in zoned.relays))
    assert (await zoned.relays[1].chat()).status == 200
    await until(lambda: not (home.dispatching.dispatcher.requests or again.dispatching.dispatcher.requests))


@pytest.mark.parametrize("lost", ["instances", "owner and database"])
async def test_what_waits_in_a_zone_that_is_lost_is_served_in_another(zoned, lost, monkeypatch):
    monkeypatch.setattr(dispatchers, "GONE_S", 0.5)
    _, eu = zoned.dispatchers
    slowly(zoned, token_s=0.0, tokens=3)
    if lost == "instances":
        await zoned.backends[2].stop()
    else:  # nobody may take over what it owned
        monkeypatch.setattr(Lease, "_take", lambda *given: False)
        monkeypatch.setattr(dispatchers, "SILENT_S", 0.5)
        stops_dead(eu)
    asked = [asyncio.create_task(zoned.relays[1].chat()) for _ in range(3)]
    assert {(await each).status for each in asked} == {200}
    rows = (await zoned.relays[1].rows())[-3:]
    assert {(row.region, row.outcome) for row in rows} == {("east", "done")}


def arrivals(measures, model):
    """Return the arrivals for *model* of the last minutes."""
    windows = measures.windows
    windows.advance(measures.clock() + 1)  # a second counts when it is over
    return windows.total(windows.group(f"model {model}"), Count.REQUESTS, 300)


def metrics(gateway):
    return generate_latest(Operations(gateway).registry).decode()


async def test_the_first_dispatcher_has_the_figures_of_all_relays_and_each_relay_its_own(fleet):
    relays, dispatcher = [fleet.relays[0], await fleet.relay()], fleet.owner
    for relay in relays:
        assert [(await relay.chat(model=model)).status for model in "mn"] == [200, 404]
    error = 'pilothouse_relay_errors_total{code="model_not_found",relay="%s",status="404"} 1.0'
    names = [relay.gateway.lease.owner for relay in relays]
    await until(lambda: all(error % name in metrics(dispatcher) for name in names))
    page, of_relay = metrics(dispatcher), metrics(relays[0].gateway)
    of_requests = 'pilothouse_requests_total{model="m",outcome="done",region="east",slo_class="interactive"} 2.0'
    assert of_requests in page
    assert "pilothouse_requests_total" not in of_relay
    assert 'pilothouse_errors_total{code="model_not_found",status="404"} 1.0' in of_relay

    def shown():
        return dispatcher.publisher.summary.snapshot()["relays"]

    assert [each["name"] for each in shown()] == sorted(names)  # which end in drawn characters
    assert {(each["state"], each["active"], each["streaming"], each["pid"]) for each in shown()} == {
        ("serving", 0, 0, os.getpid())
    }
    relays[0].gateway.step_down()
    states = dict(zip(names, ("draining", "serving"), strict=True))
    await until(lambda: {each["name"]: each["state"] for each in shown()} == states)
    clock = dispatcher.dispatching.measures.clock
    dispatcher.dispatching.measures.clock = lambda: clock() + 2 * RELAY_SILENT_S
    assert shown() == []
    assert "pilothouse_relay_active_requests{" not in metrics(dispatcher)


def stops_dead(gateway):
    """Have *gateway* say and do nothing from now on, as one that was killed."""
    for task in [*gateway._tasks, gateway.lease._task]:
        task.cancel()
    gateway.dispatching.relays._socket.close()


@pytest.fixture
async def fleet(transactional_db, tmp_path, monkeypatch):
    for name, value in {"HEARTBEAT_S": 0.1, "KEY_CACHE_S": 0.2}.items():
        monkeypatch.setattr(settings, name, value)
    for name, value in {
        "LEASE_S": 1.0,
        "ALONE_S": 1.0,
        "RENEW_S": 0.1,
        "SHARDS_S": 0.2,
        "SPREAD_S": 0.3,
        "AFAR_S": 0.5,
    }.items():
        monkeypatch.setattr(leases, name, value)
    do_once(monkeypatch)
    async with AsyncExitStack() as stack:
        backends = [Backend("m-0"), Backend("m-1")]
        for backend in backends:
            await backend.start()
            stack.push_async_callback(backend.stop)
        await database_sync_to_async(make_rows)(backends, regions=["east", "east"], max_num_seqs=2, queue_bound=100)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Fleet(stack, tmp_path, monkeypatch, backends, http)
        await fleet.dispatcher()
        await until(lambda: fleet.dispatchers[0].lease.held)
        await fleet.relay()
        yield fleet


def slowly(fleet, token_s=0.02, tokens=40):
    for backend in fleet.backends:
        backend.script.token_s, backend.script.tokens = token_s, tokens


@asynccontextmanager
async def streams(relays, count):
    """Open *count* streams at each of *relays*; yields tasks that return status and text."""

    async def one(relay):
        response = await relay.chat(stream=True)
        return response.status, (await response.read()).decode()

    tasks = [asyncio.create_task(one(relay)) for relay in relays for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


async def test_a_relay_answers_by_what_another_process_decides(fleet):
    (relay,) = fleet.relays
    response = await relay.chat()
    assert (response.status, (await response.json())["usage"]["completion_tokens"]) == (200, 3)
    row = await relay.new_row()
    assert (row.instance in ("m-0", "m-1"), row.region, row.outcome) == (True, "east", "done")
    async with relay.http.get(f"{relay.url}/v1/models", headers=relay.headers) as models:
        assert [model["id"] for model in (await models.json())["data"]] == ["m"]
    assert not fleet.owner.dispatching.dispatcher.requests
    assert (await relay.chat(model="n")).status == 404


async def test_two_relays_share_the_room_of_instances_and_the_order(fleet):
    relays = [fleet.relays[0], await fleet.relay()]
    slowly(fleet)
    async with streams(relays, MANY) as tasks:
        dispatcher = fleet.owner.dispatching.dispatcher
        await until(lambda: len(dispatcher.requests) == 2 * MANY)
        assert sum(len(one.requests) for one in dispatcher.topology.replicas.values()) == 4
        assert len(dispatcher.queue) == 2 * MANY - 4
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
    await until(lambda: not dispatcher.requests)


@pytest.mark.parametrize("how", ["stops", "dies", "freezes"])
async def test_the_next_owner_takes_up_what_waits_and_runs(fleet, how):
    heir = await fleet.dispatcher()
    relays = [fleet.relays[0], await fleet.relay()]
    slowly(fleet)
    first = fleet.owner
    assert first is not heir
    async with streams(relays, MANY) as tasks:
        await until(lambda: len(first.dispatching.dispatcher.queue) == 2 * MANY - 4)
        await until(lambda: all(backend.bodies for backend in fleet.backends))
        order = [each.asked.number for each in first.dispatching.dispatcher.queue.in_order(endpoint_of(first))]
        if how == "stops":
            first.step_down()
        elif how == "dies":
            stops_dead(first)
        else:
            first.lease._task.cancel()  # it finds out by its own clock
        await fleet.takes_over(heir)
        dispatcher = heir.dispatching.dispatcher
        await until(lambda: len(dispatcher.requests) + sum(task.done() for task in tasks) >= 2 * MANY)
        left = [each.asked.number for each in dispatcher.queue.in_order(endpoint_of(heir))]
        assert left == [number for number in order if number in left]
        answers = await asyncio.gather(*tasks)
    assert {status for status, _ in answers} == {200}
    assert all(text.count('"content"') >= 40 and text.endswith("data: [DONE]\n\n") for _, text in answers)
    assert sum(len(backend.bodies) for backend in fleet.backends) == 2 * MANY, "each was given to one instance once"
    await until(lambda: not dispatcher.requests)
    assert not any(one.requests for one in dispatcher.topology.replicas.values())


async def test_the_next_owner_gives_nobody_the_room_of_a_relay_that_registers_late(fleet):
    heir = await fleet.dispatcher()
    late, other = fleet.relays[0], await fleet.relay()
    slowly(fleet, tokens=200)
    async with streams([late], 4):
        await until(lambda: sum(backend.running for backend in fleet.backends) == 4)
        async with streams([other], MANY):
            await until(lambda: len(fleet.owner.dispatching.dispatcher.requests) == 4 + MANY)
            follow, late.gateway.dispatchers.follow = late.gateway.dispatchers.follow, lambda: None
            stops_dead(fleet.owner)
            await until(lambda: len(heir.dispatching.dispatcher.requests) == MANY)
            assert not any(one.requests for one in heir.dispatching.topology.replicas.values())
            assert [one.running for one in fleet.backends] == [2, 2]
            late.gateway.dispatchers.follow = follow
            await until(lambda: heir.dispatching.registrations.complete(port.FIRST))
            await until(lambda: len(heir.dispatching.dispatcher.requests) == 4 + MANY)
            assert [one.running for one in fleet.backends] == [2, 2]


def endpoint_of(gateway):
    return gateway.dispatching.topology.endpoint("m", "east")


async def test_a_relay_that_dies_leaves_its_room_to_others(fleet, monkeypatch):
    monkeypatch.setattr("controlplane.dispatch.relays.GONE_S", 0.6)
    dead, lives = fleet.relays[0], await fleet.relay()
    slowly(fleet, tokens=400)
    dispatcher = fleet.owner.dispatching.dispatcher
    async with streams([dead], 4):
        await until(lambda: sum(len(one.requests) for one in dispatcher.topology.replicas.values()) == 4)
        dead.gateway.dispatchers.follow = lambda: None
        for session in dead.gateway.dispatchers.sessions.values():
            session._socket.close()
        dead.gateway.requests.report = lambda: None
        await until(lambda: not dispatcher.requests)
        slowly(fleet, tokens=3)
        assert (await lives.chat()).status == 200


async def test_an_inventory_that_was_read_before_a_change_of_owners_is_not_applied(fleet, monkeypatch):
    slowly(fleet)
    dispatching, owned = fleet.owner.dispatching, Lease.owned
    before = [{}]
    async with streams(fleet.relays, MANY):
        await until(lambda: len(dispatching.dispatcher.requests) == MANY)
        of_then = property(lambda lease: before.pop() if before and lease is dispatching.lease else owned.fget(lease))
        monkeypatch.setattr(Lease, "owned", of_then)
        await dispatching.read_inventory()
        assert (len(dispatching.dispatcher.requests), before) == (MANY, [])


async def test_requests_wait_while_there_is_no_owner(fleet):
    first, (relay,) = fleet.owner, fleet.relays
    stops_dead(first)
    asked = asyncio.create_task(relay.chat())
    await asyncio.sleep(0.5)
    assert not asked.done()
    await fleet.takes_over(await fleet.dispatcher())
    assert (await asked).status == 200


async def test_a_relay_that_steps_down_is_not_ready_and_goes_on_with_what_reaches_it(fleet):
    (relay,) = fleet.relays
    slowly(fleet)
    async with streams([relay], MANY) as tasks:
        await until(lambda: len(fleet.owner.dispatching.dispatcher.queue) == MANY - 4)
        relay.gateway.step_down()
        for path in ("/readyz", "/health"):
            async with relay.http.get(f"{relay.url}{path}") as answer:
                assert answer.status == 503
        assert (await relay.chat()).status == 200
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_limits_and_budgets_hold_over_all_relays_and_a_takeover(fleet):
    """As many run as the tenant may, whichever relay they came to, before and after another dispatcher counts."""
    (one,), heir = fleet.relays, await fleet.dispatcher()
    other = await fleet.relay()
    tenant = await Tenant.objects.aget()
    await Tenant.objects.aupdate(max_concurrent_requests=4)
    await Budget.objects.acreate(tenant=tenant, kind=BudgetKind.REQUESTS, soft=0, hard=1_000)
    for relay in (one, other):
        await relay.gateway.keys.refresh()
    await fleet.owner.dispatching.allowances.refresh()
    slowly(fleet, tokens=400)

    async def load(relay):
        async with relay.http.get(f"{relay.url}/load", headers=relay.headers) as response:
            return (await response.json())["server_load"]

    asked = await asyncio.gather(*((one, other)[at % 2].chat(stream=True) for at in range(7)))
    assert sorted(response.status for response in asked) == [200] * 4 + [429] * 3
    running = [response for response in asked if response.status == 200]
    assert all("x-budget-warning" in response.headers for response in running)
    assert [await load(relay) for relay in (one, other)] == [4, 4]
    before = fleet.owner
    stops_dead(before)
    await fleet.takes_over(heir)
    assert [(await relay.chat()).status for relay in (one, other)] == [429, 429]
    assert [await load(relay) for relay in (one, other)] == [4, 4]
    assert heir.dispatching.allowances.limits.sequences(tenant.pk) == 4
    assert all([(await response.text()).count('"content"') >= 400 for response in running])
    await until(lambda: heir.dispatching.allowances.limits.sequences(tenant.pk) == 0)
    slowly(fleet, tokens=2)
    assert (await other.chat()).status == 200


async def test_the_limit_of_a_run_holds_over_all_relays_and_a_takeover(fleet):
    """What runs holds its tokens, and what has ended counts by the ledger."""
    (one,), heir = fleet.relays, await fleet.dispatcher()
    other = await fleet.relay()
    tenant = await Tenant.objects.aget()
    await Application.objects.acreate(tenant=tenant, name="review", run_max_tokens=1_000)
    await fleet.owner.dispatching.allowances.refresh()
    marks = {"X-Application": "review", "X-Run": "one"}
    ended = await one.chat(marks, max_tokens=500)
    assert (ended.status, await ended.read() != b"") == (200, True)
    await one.rows()
    slowly(fleet, tokens=400)
    asked = await asyncio.gather(*((one, other)[at % 2].chat(marks, stream=True, max_tokens=300) for at in range(5)))
    assert sorted(response.status for response in asked) == [200] * 3 + [429] * 2
    stops_dead(fleet.owner)
    await fleet.takes_over(heir)
    codes = [(await (await relay.chat(marks, max_tokens=90)).json())["error"]["code"] for relay in (one, other)]
    assert codes == ["run_limit_held"] * 2
    assert (await other.chat(marks | {"X-Run": "two"}, max_tokens=1)).status == 200
    (use,) = [each for key, each in heir.dispatching.allowances.runs._uses.items() if key[2] == "one"]
    assert use.done.tokens == 7 + 3
    running = [response for response in asked if response.status == 200]
    assert all([(await response.text()).count('"content"') >= 300 for response in running])
    await until(lambda: use.held.tokens == 0)
    assert use.done.tokens == 7 + 3 + 3 * (7 + 300)
    refused = await other.chat(marks, max_tokens=100)
    assert (refused.status, (await refused.json())["error"]["code"]) == (429, "run_limit_reached")
