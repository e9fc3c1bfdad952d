"""What a tenant used it pays, however its request ends: the ledger, usage, budgets and limits agree on it."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from channels.db import database_sync_to_async
from django.db.models import Sum
from django.utils import timezone

from controlplane.accounts.models import Budget, BudgetKind, Tenant
from controlplane.dispatch.allowances.limits import Limits
from controlplane.fleet.models import Instance
from controlplane.usage.budgets import count_budgets
from controlplane.usage.counting import count_usage
from controlplane.usage.models import InstanceHour, UsageHour
from tests.examples import at_night_but
from tests.gateway.backend import Backend
from tests.gateway.conftest import until

LIMIT = 100_000
pytestmark = pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])


async def done(served, ask):
    assert await ask() == 200


async def left(served, ask):
    """Before its first token, while an engine works for it."""
    for backend in served.backends:
        backend.script.hold = asyncio.Event()
    task = asyncio.create_task(ask())
    await until(lambda: sum(backend.running for backend in served.backends) == 1)
    await asyncio.sleep(0.1)
    task.cancel()


async def left_midway(served, ask):
    for backend in served.backends:
        backend.script.tokens, backend.script.token_s = 500, 0.02
    task = asyncio.create_task(ask())
    await until(lambda: sum(backend.running for backend in served.backends) == 1)
    await asyncio.sleep(0.2)
    task.cancel()


async def left_waiting(served, ask):
    """Its model still loads: it waits, and leaves."""
    await Instance.objects.aupdate(state="stopped")
    served.gateway.dispatching.refresh_now()
    await until(lambda: not served.gateway.dispatching.topology.replicas)
    for backend in served.backends:
        backend.script.metrics = False
    await Instance.objects.aupdate(state="loading")
    served.gateway.dispatching.refresh_now()
    await until(lambda: served.gateway.dispatching.topology.replicas)
    task = asyncio.create_task(ask())
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 1)
    task.cancel()
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 0)


async def failed_midway(served, ask):
    for backend in served.backends:
        backend.script.die = "midway"
    await ask()


async def failed_everywhere(served, ask):
    for backend in served.backends:
        backend.script.status = 500
    assert await ask() == 502


async def retried(served, ask):
    """The first instance fails after a tenth of a second, the other one answers."""
    answer, failures = Backend._answer, []

    async def once(self, request, body):
        if failures:
            return await answer(self, request, body)
        failures.append(self.name)
        await asyncio.sleep(0.1)
        return web.json_response({"error": {"message": "failed", "code": 500}}, status=500)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "_answer", once)
        assert await ask() == 200


async def refused_by_the_instance(served, ask):
    for backend in served.backends:
        backend.script.status = 400
    assert await ask() == 400


async def busy(served, ask):
    for backend in served.backends:
        backend.script.status, backend.script.retry_after = 503, "1"
    assert await ask() == 503


async def refused_by_a_limit(served, ask):
    await Tenant.objects.aupdate(tokens_per_minute=1)
    served.gateway.keys._grants.clear()
    served.gateway.dispatching.allowances.limits._use[(await Tenant.objects.aget()).pk] = SimpleNamespace(
        sequences=0, tokens=0.0, refilled_s=asyncio.get_running_loop().time()
    )
    assert await ask() == 429


WORKED = [done, left, left_midway, failed_midway, failed_everywhere, retried]
FREE = [left_waiting, refused_by_the_instance, busy, refused_by_a_limit]


@pytest.mark.parametrize(
    ("happens", "how"),
    at_night_but(
        [*((happens, "streamed") for happens in WORKED + FREE), (done, "in one piece"), (retried, "in one piece")],
        [(happens, how) for happens in WORKED + FREE for how in ("streamed", "in one piece")],
    ),
)
async def test_ledger_usage_budgets_and_limits_agree(served, happens, how):
    tenant = await Tenant.objects.aget()
    await Tenant.objects.aupdate(tokens_per_minute=LIMIT)
    for kind in (BudgetKind.TOKENS, BudgetKind.USD):
        now = timezone.now()
        await Budget.objects.acreate(tenant=tenant, kind=kind, hard=1e6, usd_per_token=0.5, spent_until=now)
    served.gateway.keys._grants.clear()
    served.gateway.dispatching.allowances.limits = limits = Limits()
    await served.gateway.dispatching.allowances.refresh()

    async def ask() -> int:
        async with await served.chat(stream=how == "streamed", ignore_eos=True, max_tokens=500) as response:
            await response.read()
            return response.status

    try:
        await happens(served, ask)
    except aiohttp.ClientError:  # a stream that breaks off
        assert happens is failed_midway
    await until(lambda: served.gateway.active == 0)
    (row,) = await served.rows()
    tokens = row.prompt_tokens + row.output_tokens
    assert (tokens > 0) == (happens in WORKED)

    uses = {use.terms.kind: use for use in served.gateway.dispatching.allowances.budgets.uses.values()}
    clock, wall = (
        served.gateway.dispatching.allowances.budgets.clock,
        served.gateway.dispatching.allowances.budgets.wall_clock,
    )
    assert uses[BudgetKind.TOKENS].used(clock(), wall()) == tokens
    assert uses[BudgetKind.USD].used(clock(), wall()) == pytest.approx(0.5 * tokens)
    assert limits.sequences(tenant.pk) == 0
    if happens is not refused_by_a_limit:
        assert LIMIT - limits._use[tenant.pk].tokens == pytest.approx(tokens)

    await database_sync_to_async(count_usage)(timezone.now())
    await database_sync_to_async(count_budgets)(timezone.now())
    sums = {name: Sum(name) for name in ("prompt_tokens", "output_tokens", "gpu_s", "cost_usd", "charged_usd")}
    usage = await UsageHour.objects.filter(tenant=tenant).aaggregate(**sums)
    assert (usage["prompt_tokens"], usage["output_tokens"]) == (row.prompt_tokens, row.output_tokens)
    spans_ms = [end - begin for _, begin, end in row.ran or [("", row.queue_ms, row.e2e_ms)]] if tokens else []
    assert len(spans_ms) == (row.attempts if happens in WORKED else 0)
    assert happens is not retried or row.attempts == 2
    assert usage["gpu_s"] == pytest.approx(sum(spans_ms) / 1000, abs=1e-3)
    budget = await Budget.objects.aget(kind=BudgetKind.USD)
    assert budget.spent_usd == pytest.approx(usage["charged_usd"])
    by_instance = await InstanceHour.objects.exclude(work="idle").aaggregate(**sums)
    assert by_instance == pytest.approx(usage)
    idle = await UsageHour.objects.filter(tenant=None).aaggregate(**sums)
    whole = await InstanceHour.objects.aaggregate(**sums)
    assert whole["cost_usd"] == pytest.approx(idle["cost_usd"] + usage["cost_usd"])
