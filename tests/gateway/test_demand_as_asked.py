"""Demand in the ledger and the minute rows: its origin, and the unserved part."""

import asyncio
from dataclasses import replace

import pytest
from channels.db import database_sync_to_async

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Region
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning.forecasts import demand
from controlplane.planning.models import Quantity
from tests.gateway.conftest import ServedGateway, until


def asked_in(region: str) -> tuple[float, float]:
    """Return prompt and output tokens requested in *region* in the one window of the test."""
    minutes = MinuteRow.objects.order_by("minute")
    series = demand.read(minutes[0].minute, minutes.reverse()[0].minute + demand.LAG * 2, 60)
    prompt, output = (
        float((60 * series.of(("m", region), quantity))[series.of(("m", region), quantity) >= 0].sum())
        for quantity in Quantity
    )
    return round(prompt), round(output)


async def rows_by_id(served: ServedGateway) -> dict[str, LedgerRow]:
    return {row.request_id: row for row in await served.rows()}


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "west"], "max_num_seqs": 4}])
async def test_demand_is_where_the_caller_is(served):
    """The fourth request finds west over 70 % and runs in the east; the fifth names no region that serves."""
    await database_sync_to_async(Region.objects.create)(name="moon", title="Moon")
    await until(lambda: "moon" in served.gateway.keys.words.regions)
    west = served.backends[1]
    west.script.hold = asyncio.Event()
    tasks = [
        asyncio.create_task(served.chat(headers={"X-Region": "west", "X-Request-Id": f"w{number}"}))
        for number in range(4)
    ]
    assert (await tasks[3]).status == 200
    assert (await served.chat(headers={"X-Region": "moon", "X-Request-Id": "m"})).status == 200
    west.script.hold.set()
    assert [(await task).status for task in tasks] == [200] * 4
    rows = await rows_by_id(served)
    assert (rows["w0"].region, rows["w0"].caller_region, rows["w0"].own_region) == ("west", "west", "")
    assert (rows["w3"].region, rows["w3"].caller_region) == ("east", "west")
    assert rows["m"].caller_region == "east"  # its preferred endpoint
    assert not any(row.unserved for row in rows.values())
    prompt, output = rows["w0"].prompt_tokens, rows["w0"].output_tokens
    assert await database_sync_to_async(asked_in)("west") == (4 * prompt, 4 * output)
    assert await database_sync_to_async(asked_in)("east") == (prompt, output)


@pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 1, "queue_bound": 1}])
async def test_refused_and_abandoned_requests_count_as_demand(served):
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()

    def ask(name: str) -> asyncio.Task:
        headers = {"X-Request-Id": name, "X-Region": "east"}
        return asyncio.create_task(served.chat(headers=headers, max_tokens=50, ignore_eos=True))

    running = ask("runs")
    await until(lambda: backend.running == 1)
    waiting = ask("leaves")
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 1)
    async with await ask("refused") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
    waiting.cancel()
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 0)
    backend.script.hold.set()
    assert (await running).status == 200
    await until(lambda: served.gateway.active == 0)
    rows = await rows_by_id(served)
    assert {name: row.unserved for name, row in rows.items()} == {"runs": False, "leaves": True, "refused": True}
    for name in ("leaves", "refused"):
        row = rows[name]
        assert (row.prompt_tokens, row.output_tokens, row.predicted_output_tokens) == (0, 0, 50)
        assert (row.predicted_prompt_tokens > 0, row.caller_region) == (True, "east")
    minutes = await database_sync_to_async(lambda: list(MinuteRow.objects.all()))()
    asked = rows["leaves"].predicted_prompt_tokens + rows["refused"].predicted_prompt_tokens
    assert sum(row.unserved for row in minutes) == 2
    assert sum(row.unserved_prompt_tokens for row in minutes) == asked
    assert sum(row.unserved_output_tokens for row in minutes) == 100
    served_tokens = rows["runs"].prompt_tokens, rows["runs"].output_tokens
    assert await database_sync_to_async(asked_in)("east") == (served_tokens[0] + asked, served_tokens[1] + 100)


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "west"]}])
async def test_what_expired_while_it_was_held_is_unserved_demand_of_its_caller(served):
    for backend in served.backends:
        backend.script.hold = asyncio.Event()
    held = [asyncio.create_task(served.chat(headers={"X-Region": "west"})) for _ in range(17)]
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 1)
    topology = served.gateway.dispatching.topology
    for endpoint in topology.endpoints:
        endpoint.spec = replace(endpoint.spec, tuned=endpoint.spec.tuned.model_copy(update={"MAX_HOLD_S": 0.0}))
    served.gateway.dispatching.dispatcher.sweep()
    for backend in served.backends:
        backend.script.hold.set()
    assert sorted([(await task).status for task in held]) == [200] * 16 + [503]
    (row,) = [row for row in await served.rows() if row.unserved]
    assert (row.error_code, row.caller_region) == ("hold_expired", "west")


async def test_a_tenants_own_quota_and_a_bad_request_are_no_demand(served):
    served.backends[0].script.status = 400
    assert (await served.chat()).status == 400
    await database_sync_to_async(Tenant.objects.update)(tokens_per_minute=1)
    served.gateway.keys._grants.clear()
    served.backends[0].script.status = 200
    answers = [(await served.chat()).status for _ in range(2)]
    assert answers[-1] == 429
    assert not any(row.unserved for row in await served.rows())


async def test_what_every_instance_failed_was_asked_for(served):
    served.backends[0].script.status = 500
    assert (await served.chat()).status == 502
    (row,) = await served.rows()
    assert (row.outcome, row.unserved, row.prompt_tokens) == ("failed", True, 1)  # an instance worked on it


@pytest.mark.parametrize("gateway_options", [{"regions": ["east"]}])
async def test_a_caller_says_how_long_its_request_waits(served):
    for bad in ("0", "-1", "nan", "inf", "soon"):
        response = await served.chat(headers={"X-Max-Wait": bad})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "X-Max-Wait")
    (backend,) = served.backends
    backend.script.hold = asyncio.Event()
    running = [asyncio.create_task(served.chat()) for _ in range(8)]
    await until(lambda: backend.running == 8)
    waiting = [asyncio.create_task(served.chat(headers={"X-Max-Wait": wait})) for wait in ("0.001", "60")]
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 2)
    served.gateway.dispatching.dispatcher.sweep()
    response = await waiting[0]
    assert (response.status, (await response.json())["error"]["code"]) == (504, "max_wait_expired")
    assert int(response.headers["Retry-After"]) >= 1
    backend.script.hold.set()
    assert {(await task).status for task in (*running, waiting[1])} == {200}
    assert [row.error_code for row in await served.rows() if row.error_code] == ["max_wait_expired"]
