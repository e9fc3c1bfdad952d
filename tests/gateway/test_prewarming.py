"""Live prewarming through the gateway: system prompts, and the webhooks of other units."""

import asyncio

import pytest
import pytest_asyncio
from channels.db import database_sync_to_async

from controlplane.accounts.models import Tenant
from controlplane.applications import warming
from controlplane.applications.models import UnitBackend
from controlplane.fleet.models import Deployment
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph
from scheduling.routing.prefix_affinity import forget
from tests.gateway.conftest import until
from tests.receiver import receiver

SYSTEM = {"role": "system", "content": "You write code. " * 60}
WRITE = {"messages": [SYSTEM, {"role": "user", "content": "Sort a list."}]}


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
    served.gateway.dispatching.dispatcher.runs.graphs[tenant.pk, "review"] = graph


async def call(served, run, unit, **body):
    response = await served.chat(headers={"X-Application": "review", "X-Run": run, "X-Unit": unit}, **body)
    return response.status, await response.read()


def bodies_of(served):
    return [body for backend in served.backends for body in backend.bodies if body.get("max_tokens") == 1]


def counts_of(served):
    return served.gateway.dispatching.dispatcher.prewarming.counts["prefix"]


def drop_caches(served):
    topology = served.gateway.dispatching.topology
    for replica in topology.replicas.values():
        forget(topology.fleet, replica.slot)


@pytest.fixture
def gateway_options():
    return {"regions": ["east", "east"]}


@pytest_asyncio.fixture
async def prompted(served):
    """Two instances behind a router by prefix; the unit `write` was called twice, and what was cached is gone."""
    await database_sync_to_async(Deployment.objects.update)(routing_policy="least_delay")
    await served.gateway.dispatching.read_inventory()
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
    prompted.gateway.dispatching.dispatcher.prewarming.sweep()
    await until(
        lambda: bodies_of(prompted) and not prompted.gateway.dispatching.dispatcher.prewarming.control.prompts.warming
    )
    (body,) = bodies_of(prompted)
    (warmed,) = [backend for backend in prompted.backends if body in backend.bodies]
    assert body["messages"] == [SYSTEM, {"role": "user", "content": "."}]
    assert (body["model"], body["priority"], "stream" in body) == ("m", 2**31 - 1, False)
    prompted.gateway.dispatching.dispatcher.prewarming.sweep()  # it is there now
    assert len(bodies_of(prompted)) == 1
    assert (await plan)[0] == 200
    assert (await call(prompted, "c", "write", **WRITE))[0] == 200
    assert counts_of(prompted) == {"warmed": 1, "used": 1, "wasted": 0}
    rows = [row for row in await prompted.rows() if row.unit == "write"]
    assert rows[-1].instance == warmed.name
    assert len(await prompted.rows()) == 4  # what warms is no tenant's request


async def test_a_salt_is_passed_on_and_separates_prompts(prompted):
    salted = WRITE | {"cache_salt": "acme-1"}
    for run in ("d", "e"):
        assert (await call(prompted, run, "write", **salted))[0] == 200
    drop_caches(prompted)
    plan = await planned(prompted)
    prompted.gateway.dispatching.dispatcher.prewarming.sweep()
    await until(lambda: bodies_of(prompted))
    assert bodies_of(prompted)[0]["cache_salt"] == "acme-1"
    await plan
    assert (await call(prompted, "c", "write", **WRITE))[0] == 200
    assert counts_of(prompted)["used"] == 0


async def test_an_instance_that_dies_while_it_warms(prompted):
    """The prompt is not taken as cached there, is not tried there again soon, and the call is served elsewhere."""
    plan = await planned(prompted)
    (idle,) = [backend for backend in prompted.backends if not backend.running]
    idle.script.first_token_s, idle.script.token_s = 0.0, 60.0
    prompted.gateway.dispatching.dispatcher.prewarming.sweep()
    await until(lambda: idle.running == 1)
    await idle.stop()
    await until(lambda: counts_of(prompted)["wasted"] == 1)
    assert not prompted.gateway.dispatching.dispatcher.prewarming.control.prompts.warming
    assert (await plan)[0] == 200
    status, _ = await call(prompted, "c", "write", **WRITE)
    assert status == 200
    assert (await prompted.rows())[-1].instance != idle.name
    assert sum(body.get("max_tokens") == 1 for body in idle.bodies) == 1


# Backends of other units


async def test_a_webhook_is_called_before_a_unit_begins(served, monkeypatch):
    monkeypatch.setattr(warming, "READ_EVERY", 1)
    prewarming = served.gateway.dispatching.dispatcher.prewarming
    async with receiver() as (there, url):
        await database_sync_to_async(UnitBackend.objects.create)(name="tests", url=f"{url}/takes", secret="s")
        await teach(served, graph_of("plan", "tests", "write", kinds=[("tests", "container")]))
        for backend in served.backends:
            backend.script.tokens, backend.script.token_s = 8, 0.4
        await until(lambda: prewarming.fleet.backends)
        plan = asyncio.create_task(call(served, "c", "plan", stream=True))
        await until(lambda: there.taken)
        await plan
        assert [there.taken[0][name] for name in ("event", "backend", "application", "run", "executions")] == [
            "warm", "tests", "review", "c", 1
        ]  # fmt: skip
        body = {"application": "review", "id": "t1", "unit": "tests", "kind": "container", "backend": "tests"}
        address = f"{served.url}/v1/runs/c/units"
        async with served.http.post(address, json=body | {"state": "running"}, headers=served.headers) as answer:
            assert (await answer.json())["state"] == "running"
        assert served.gateway.dispatching.dispatcher.runs.backends_in_use == {"tests"}
    async with served.http.get(f"{served.url}/metrics") as answer:
        metrics = await answer.text()
    for name in ("pilothouse_prewarmed_total", "pilothouse_prewarmed_used_total"):
        assert f'{name}{{kind="container"}} 1.0' in metrics
    assert prewarming.figures()["container"] == [1, 1]
