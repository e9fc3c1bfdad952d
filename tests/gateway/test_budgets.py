"""Budgets of requests over HTTP."""

import asyncio
from datetime import UTC, datetime

from asgiref.sync import sync_to_async

from controlplane.accounts.models import Budget, BudgetKind, Tenant
from controlplane.events.models import Event
from tests.gateway.conftest import until

USD, REQUESTS = BudgetKind.USD, BudgetKind.REQUESTS


@sync_to_async
def give_budget(**values):
    return Budget.objects.create(**{"tenant": Tenant.objects.get(name="acme")} | values)


@sync_to_async
def events_of(kind):
    return list(Event.objects.filter(kind=kind))


async def test_over_http_a_soft_limit_warns_and_a_hard_one_refuses(served):
    budget = await give_budget(kind=REQUESTS, soft=0, hard=1)
    await served.gateway.dispatching.allowances.refresh()
    async with await served.chat() as response:
        assert response.status == 200
        assert response.headers["x-budget-warning"] == "acme: 1.00 of 1 requests a minute"
    async with await served.chat() as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        assert response.headers["x-budget"] == "acme: 1 requests a minute"
    await served.gateway.dispatching.allowances.refresh()
    await budget.arefresh_from_db()
    assert budget.stopped_at
    assert len(await events_of("budget.reached")) == 1
    await budget.adelete()
    await served.gateway.dispatching.allowances.refresh()
    async with await served.chat() as response:
        assert response.status == 200
    assert {row.error_code for row in await served.rows()} == {"", "rate_limit_exceeded"}


async def test_a_cancelled_and_a_failed_request_release_what_they_reserved(served, monkeypatch):
    await give_budget(kind=USD, hard=100)
    await Budget.objects.aupdate(usd_per_token=0.5, spent_until=datetime.now(UTC))
    await served.gateway.dispatching.allowances.refresh()
    (use,) = served.gateway.dispatching.allowances.budgets.uses.values()
    served.backends[0].script.hold = asyncio.Event()
    task = asyncio.create_task(served.chat(max_tokens=50, ignore_eos=True))
    await until(lambda: served.backends[0].running == 1)
    assert use.reserved_usd > 20
    task.cancel()
    await until(lambda: use.reserved_usd == 0)

    async def broken(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(served.gateway.upstream, "carry", broken)
    async with await served.chat() as response:
        assert response.status == 500
    assert use.reserved_usd == 0
