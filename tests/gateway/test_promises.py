"""Promises at the door over HTTP: what a tenant is answered, and what the ledger and the metrics keep."""

import asyncio
from datetime import datetime

import openai
import pytest
from channels.db import database_sync_to_async

from controlplane.fleet.models import SloClass
from scheduling.queueing.promises import Calibration
from scheduling.queueing.waits.waiting_time import Estimate, Wait
from tests.gateway.conftest import open_sdk, until

WAIT = Wait(30.0, 25.0)
P99_S = Calibration().quantile_s(WAIT)


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 1}


@pytest.fixture
async def busy(served, monkeypatch):
    """A gateway whose only sequence is taken; every other request has an estimated wait of half a minute."""
    waits = served.gateway.dispatching.dispatcher.waits.control
    monkeypatch.setattr(waits, "of", lambda row: Estimate(0, 1, WAIT))
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(served.chat())
    await until(lambda: backend.running == 1)
    yield served
    backend.script.hold.set()
    async with await first as response:
        assert response.status == 200


async def set_class(served, name, **values):
    if to := values.pop("degrades_to", None):
        values["degrades_to"] = await database_sync_to_async(SloClass.objects.get)(name=to)
    await database_sync_to_async(SloClass.objects.filter(name=name).update)(**values)
    await served.gateway.keys.refresh()


def counted(served):
    return {key[2:]: count for key, count in served.gateway.dispatching.measures.at_door.items()}


async def test_an_unreachable_request_is_refused_with_its_wait_and_the_earliest_moment(busy):
    await set_class(busy, "interactive", if_unreachable="refuse")
    before = datetime.now().timestamp()
    async with await busy.chat() as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (429, "deadline_unreachable", "rate_limit_error")
        assert response.headers["x-should-retry"] == "true"
        assert P99_S - 2.0 < float(response.headers["retry-after-ms"]) / 1000 < P99_S
    assert error["estimated_wait_s"] == pytest.approx(30.0)
    earliest_s = datetime.fromisoformat(error["earliest_at"]).timestamp() - before
    assert P99_S < earliest_s < P99_S + 3.0
    async with open_sdk(busy, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="can be promised in"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    rows = [row for row in await busy.rows() if row.error_code == "deadline_unreachable"]
    assert [(row.outcome, row.slo_met, row.unserved, row.slo_class) for row in rows] == [
        ("rejected", False, True, "interactive")
    ] * 2
    assert counted(busy) == {("interactive", "refused"): 2}
    assert not len(busy.gateway.dispatching.dispatcher.queue)


async def test_a_degraded_request_waits_in_the_other_class_as_its_headers_say(busy):
    await set_class(busy, "interactive", if_unreachable="degrade", degrades_to="flexible")
    waiting = asyncio.create_task(busy.chat())
    await until(lambda: len(busy.gateway.dispatching.dispatcher.holding) == 1)  # as all non-interactive work
    (request,) = (each.request for each in busy.gateway.dispatching.dispatcher.held_now(9))
    assert (request.asked.slo_class, request.asked.priority, request.asked.interactive) == ("flexible", 5, False)
    busy.backends[0].script.hold.set()
    async with await waiting as response:
        assert response.status == 200
        assert (response.headers["x-slo-class"], response.headers["x-asked-slo-class"]) == ("flexible", "interactive")
    row = next(row for row in await busy.rows() if row.asked_class)
    assert (row.asked_class, row.slo_class, row.slo_met) == ("interactive", "flexible", True)
    assert row.trace[0]["at_door"] == "degraded"
    assert row.trace[-1]["instance"] == row.instance
    assert counted(busy) == {("interactive", "degraded"): 1}


async def test_a_tenant_is_not_degraded_to_a_class_that_it_may_not_use(busy):
    await set_class(busy, "interactive", if_unreachable="degrade", degrades_to="forbidden")
    waiting = asyncio.create_task(busy.chat())
    await until(lambda: len(busy.gateway.dispatching.dispatcher.queue) == 1)
    busy.backends[0].script.hold.set()
    async with await waiting as response:
        assert response.status == 200
        assert "x-slo-class" not in response.headers
    assert {(row.slo_class, row.asked_class) for row in await busy.rows()} == {("interactive", "")}
    assert counted(busy) == {("interactive", "late"): 1}


async def test_by_default_it_is_admitted_late(busy):
    waiting = asyncio.create_task(busy.chat())
    await until(lambda: len(busy.gateway.dispatching.dispatcher.queue) == 1)
    busy.backends[0].script.hold.set()
    async with await waiting as response:
        assert response.status == 200
    late = next(row for row in await busy.rows() if row.queue_position)
    assert late.trace[0] | {"late_s": 0} == {
        "at_door": "late", "slo_class": "interactive", "wait_p99_s": round(P99_S, 3), "late_s": 0,
        **{name: late.trace[0][name] for name in ("length",) if name in late.trace[0]},
    }  # fmt: skip
