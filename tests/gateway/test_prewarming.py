"""Live prewarming through the gateway: system prompts and backends of other units, with hits, misses and waste."""

import asyncio
import shlex
import sys

import aiohttp
import pytest
import pytest_asyncio
from channels.db import database_sync_to_async

from controlplane.accounts.models import Tenant
from controlplane.applications import backends as module
from controlplane.applications.backends import OF_PROCESS
from controlplane.applications.models import PrewarmRow, UnitBackend
from controlplane.dispatch.prewarming_log import CalledBy
from controlplane.dispatch.queues.next_to_warm import NextToWarmView
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph
from scheduling.routing.prefix_affinity import forget
from tests.gateway.conftest import until

SYSTEM = {"role": "system", "content": "You write code. " * 60}
WRITE = {"messages": [SYSTEM, {"role": "user", "content": "Sort a list."}]}
SERVER = f"{shlex.quote(sys.executable)} -m http.server {{port}} --bind 127.0.0.1"


def graph_of(*units, kinds=()):
    """A run of *units* one after the other, each with 8 tokens of output or 3 seconds."""
    backends = {unit: Backend(dict(kinds).get(unit, "llm"), "m" if unit not in dict(kinds) else unit) for unit in units}
    steps = [
        Step(unit, at - 1, 20.0, 8.0) if backends[unit].kind == "llm" else Step(unit, at - 1, duration_s=3.0)
        for at, unit in enumerate(units)
    ]
    graph = DemandGraph("review", backends, [RunRecord(tuple(steps))] * 10)
    rates = {unit: ServiceRate(0.0, 0.0, 0.1) if one.kind == "llm" else ServiceRate() for unit, one in backends.items()}
    return KnownGraph.of(graph, rates)


async def teach(served, graph):
    tenant = await database_sync_to_async(Tenant.objects.get)(name="acme")
    served.gateway.dispatcher.runs.graphs[tenant.pk, "review"] = graph


async def call(served, run, unit, **body):
    response = await served.chat(headers={"X-Application": "review", "X-Run": run, "X-Unit": unit}, **body)
    return response.status, await response.read()


def bodies_of(served):
    return [body for backend in served.backends for body in backend.bodies if body.get("max_tokens") == 1]


def counts_of(served, kind):
    counted = served.gateway.dispatcher.prewarming.log.counts
    return {fate: count for (of, fate), count in counted.items() if of == kind}


def drop_caches(served):
    topology = served.gateway.topology
    for replica in topology.replicas.values():
        forget(topology.fleet, replica.slot)


@pytest.fixture
def gateway_options():
    return {"regions": ["east", "east"]}


@pytest_asyncio.fixture
async def prompted(served):
    """Two instances behind a router by prefix; the unit `write` was called twice, and what was cached is gone."""
    await database_sync_to_async(Deployment.objects.update)(routing_policy="least_delay")
    await served.gateway.read_inventory()
    await teach(served, graph_of("plan", "write"))
    for run in ("a", "b"):
        assert (await call(served, run, "write", **WRITE))[0] == 200
    drop_caches(served)
    for backend in served.backends:
        backend.script.tokens, backend.script.token_s = 8, 0.1
    return served


async def planned(served):
    """Begin a run whose next call has the system prompt; return the task of its first call."""
    plan = asyncio.create_task(call(served, "c", "plan", stream=True))
    await until(lambda: sum(backend.running for backend in served.backends) == 1)
    return plan


async def test_a_prompt_that_will_follow_is_computed_before_its_call(prompted):
    plan = await planned(prompted)
    prompted.gateway.dispatcher.prewarm()
    log = prompted.gateway.dispatcher.prewarming.log
    await until(lambda: any(one.warm_at for one in log.open("prefix")))
    (warmed,) = log.open("prefix")
    (body,) = bodies_of(prompted)
    assert body["messages"] == [SYSTEM, {"role": "user", "content": "."}]
    assert (body["model"], body["priority"], "stream" in body) == ("m", 2**31 - 1, False)
    prompted.gateway.dispatcher.prewarm()  # it is there now
    assert len(bodies_of(prompted)) == 1
    assert (await plan)[0] == 200
    assert (await call(prompted, "c", "write", **WRITE))[0] == 200
    assert counts_of(prompted, "prefix") == {"miss": 1, "warmed": 1, "hit": 1}  # the first call of all missed
    rows = [row for row in await prompted.rows() if row.unit == "write"]
    assert rows[-1].instance == warmed.place
    assert len(await prompted.rows()) == 4  # what warms is no tenant's request


async def test_a_salt_is_passed_on_and_separates_prompts(prompted):
    salted = WRITE | {"cache_salt": "acme-1"}
    for run in ("d", "e"):
        assert (await call(prompted, run, "write", **salted))[0] == 200
    drop_caches(prompted)
    plan = await planned(prompted)
    prompted.gateway.dispatcher.prewarm()
    await until(lambda: bodies_of(prompted))
    assert bodies_of(prompted)[0]["cache_salt"] == "acme-1"
    await plan
    assert (await call(prompted, "c", "write", **WRITE))[0] == 200
    assert "hit" not in counts_of(prompted, "prefix")


async def test_one_that_nothing_used_is_waste(prompted):
    plan = await planned(prompted)
    prompted.gateway.dispatcher.prewarm()
    log = prompted.gateway.dispatcher.prewarming.log
    await until(lambda: any(one.warm_at for one in log.open("prefix")))
    await plan
    drop_caches(prompted)
    prompted.gateway.dispatcher.prewarming._warm_prefixes()
    assert counts_of(prompted, "prefix")["waste"] == 1


@pytest.mark.parametrize(("field", "value"), [("PREWARM_SHARE", 0.0), ("PREWARM_BY", "lru"), ("PREWARM_BY", "epwq")])
async def test_none_is_computed_where_it_is_switched_off(prompted, field, value):
    for endpoint in prompted.gateway.topology.endpoints:
        object.__setattr__(endpoint.spec, "tuned", endpoint.spec.tuned.model_copy(update={field: value}))
    plan = await planned(prompted)
    prompted.gateway.dispatcher.prewarm()
    await plan
    assert not bodies_of(prompted)


async def test_an_instance_that_dies_while_it_warms(prompted):
    """The prompt is not taken as cached there, is not tried there again soon, and the call is served elsewhere."""
    plan = await planned(prompted)
    (idle,) = [backend for backend in prompted.backends if not backend.running]
    idle.script.first_token_s, idle.script.token_s = 0.0, 60.0
    prompted.gateway.dispatcher.prewarm()
    await until(lambda: idle.running == 1)
    await idle.stop()
    await until(lambda: counts_of(prompted, "prefix").get("failed") == 1)
    assert not prompted.gateway.dispatcher.prewarming.prompts.warming
    assert (await plan)[0] == 200
    status, _ = await call(prompted, "c", "write", **WRITE)
    assert status == 200
    assert (await prompted.rows())[-1].instance != idle.name
    assert sum(body.get("max_tokens") == 1 for body in idle.bodies) == 1


# Backends of other units


async def keep(served, **values):
    """Keep a backend as of now, and teach that tests follow a plan."""
    await until(lambda: OF_PROCESS.backends is not None)
    row = await database_sync_to_async(UnitBackend.objects.create)(**{"name": "tests", "command": SERVER} | values)
    await teach(served, graph_of("plan", "tests", "write", kinds=[("tests", row.kind)]))
    OF_PROCESS.backends.apply([row])
    for backend in served.backends:
        backend.script.tokens, backend.script.token_s = 8, 0.4
    return row


async def report(served, execution, run="c", **body):
    url = f"{served.url}/v1/runs/{run}/units"
    body = {"application": "review", "id": execution, "unit": "tests", "kind": "container", "backend": "tests"} | body
    async with served.http.post(url, json=body, headers=served.headers) as answer:
        return await answer.json()


def listens(address):
    async def ask():
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{address}/") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    return ask()


async def test_a_container_is_started_before_its_unit_and_handed_to_it(served):
    await keep(served)
    plan = asyncio.create_task(call(served, "c", "plan", stream=True))
    kept = OF_PROCESS.backends.kept["tests"]
    await until(lambda: kept.running)
    await plan  # else another one may follow
    handed = await report(served, "t1", state="running")
    assert handed["warm"] is True
    assert not served.gateway.dispatcher.prewarming.due_now("container")  # whatever was likely before it came
    assert await listens(handed["address"])
    assert await report(served, "t1", state="running") == handed
    second = await report(served, "t2", state="running")
    assert (second["warm"], second["address"]) == (False, None)
    ended = await report(served, "t1", state="done")
    assert (ended["warm"], ended["address"]) == (True, handed["address"])
    await until(lambda: not kept.running)
    for _ in range(200):
        if not await listens(handed["address"]):
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the container of an execution that has ended still runs")
    assert counts_of(served, "container") == {"warmed": 1, "hit": 1, "miss": 1}

    def rows():
        return [(row.kind, row.run, row.fate) for row in PrewarmRow.objects.order_by("pk")]

    for _ in range(500):
        if len(await database_sync_to_async(rows)()) == 2:
            break
        await asyncio.sleep(0.02)
    assert await database_sync_to_async(rows)() == [("container", "c", "hit"), ("container", "c", "miss")]
    async with served.http.get(f"{served.url}/v1/runs/c?application=review", headers=served.headers) as answer:
        shown = (await answer.json())["prewarmed"]
    assert [(one["kind"], one["fate"]) for one in shown] == [("container", "hit"), ("container", "miss")]
    async with served.http.get(f"{served.url}/metrics") as answer:
        assert 'pilothouse_prewarmed_total{fate="hit",kind="container"} 1.0' in await answer.text()


async def test_a_dnn_server_is_shared_and_stays_warm(served):
    await keep(served, kind="dnn")
    plan = asyncio.create_task(call(served, "c", "plan", stream=True))
    kept = OF_PROCESS.backends.kept["tests"]
    await until(lambda: kept.running)
    first, second = [await report(served, each, kind="dnn", state="running") for each in ("t1", "t2")]
    assert first["address"] == second["address"]
    assert (first["warm"], second["warm"]) == (True, True)
    await report(served, "t1", kind="dnn", state="done")
    await report(served, "t2", kind="dnn", state="done")
    assert await listens(first["address"])
    await plan


async def test_one_that_fails_to_start_is_given_up_and_units_are_served_without(served, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    fails = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such image {port}')"])
    await keep(served, command=fails)
    for backend in served.backends:
        backend.script.token_s = 1.0
    plan = asyncio.create_task(call(served, "c", "plan", stream=True))

    def events():
        return list(Event.objects.filter(kind="backend.warm_failed").order_by("pk"))

    for _ in range(1000):
        if len(seen := await database_sync_to_async(events)()) >= module.MOST_TRIES:
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(1.5)
    seen = await database_sync_to_async(events)()
    assert [event.inputs["tries"] for event in seen] == [1, 2, 3]
    assert "ended with status 1: no such image" in seen[0].reason
    assert "It rests for 300 s." in seen[-1].reason
    handed = await report(served, "t1", state="running")
    assert (handed["state"], handed["warm"]) == ("running", False)
    assert counts_of(served, "container") == {"warmed": 3, "failed": 3, "miss": 1}
    plan.cancel()


async def test_what_is_kept_ends_with_the_gateway(served):
    await keep(served)
    plan = asyncio.create_task(call(served, "c", "plan", stream=True))
    keeper = OF_PROCESS.backends
    await until(lambda: keeper.kept["tests"].running)
    (running,) = keeper.kept["tests"].running.values()
    await asyncio.to_thread(keeper.stop)
    assert not running.actuator.runs(running.started.handle)
    assert counts_of(served, "container")["waste"] == 1
    plan.cancel()


async def test_what_starts_next_is_published_until_it_is_being_warmed(served):
    await teach(served, graph_of("plan", "tests", kinds=[("tests", "container")]))
    served.gateway.dispatcher.prewarming.starts_s = lambda: {"tests": 0.1}
    for backend in served.backends:
        backend.script.tokens, backend.script.token_s = 8, 0.1
    plan = await planned(served)
    served.gateway.dispatcher.prewarm()
    view = NextToWarmView(served.gateway.dispatcher.prewarming)
    (row,) = view.rows()
    assert (row.kind, row.backend, row.application, row.run, row.unit) == ("container", "tests", "review", "c", "tests")
    assert (row.probability, row.k, row.why) == (1.0, 0.5, "tests follows with 100%")
    assert 0.0 < row.in_s < 1.0, "after the rest of the plan, less the time to start one"
    assert view()["run"] == ["c"]
    log, caller = served.gateway.dispatcher.prewarming.log, CalledBy(row.tenant_id)
    log.begin("container", "tests", "", "", caller)
    assert view.rows() == []
    await plan
