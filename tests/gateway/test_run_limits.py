"""What all calls of a run may use: held before they run, counted over relays and takeovers, and refused for good."""

import asyncio
from datetime import timedelta

import openai
import pytest
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.applications.models import Application
from controlplane.usage.models import UsageHour
from controlplane.usage.run_terms import RunTermsReader
from tests.gateway.conftest import open_sdk, until

PROMPT = 7
"""Tokens that the backend says a prompt has."""


async def limited(served, **limits):
    tenant = await Tenant.objects.aget()
    row, _ = await Application.objects.aupdate_or_create(tenant=tenant, name="review", defaults=limits)
    await served.gateway.dispatching.allowances.refresh()
    return row


def ask(sdk, run, max_tokens, **headers):
    headers = {f"X-Run-{name.replace('_', '-')}": str(value) for name, value in headers.items()}
    return sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=max_tokens,
        extra_headers={"X-Application": "review", "X-Run": run} | headers,
    )  # fmt: skip


def tries(error):
    """How often OpenAI's SDK had sent a call again."""
    return int(error.response.request.headers["x-stainless-retry-count"])


async def test_openai_s_sdk_gives_up_at_the_limit_of_a_run(served):
    await limited(served, run_max_tokens=100)
    sdk = open_sdk(served, max_retries=2)
    for _ in range(2):
        await ask(sdk, "one", 50)
    for run, max_tokens, headers in (("one", 90, {}), ("two", 60, {"Max_Tokens": 50})):
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(sdk, run, max_tokens, **headers)
        error = refused.value
        assert (error.code, error.type, tries(error)) == ("run_limit_reached", "insufficient_quota", 0)
        assert error.response.headers["x-should-retry"] == "false"
    await ask(sdk, "one", 50)
    rows = [row for row in await served.rows() if row.run == "one"]
    assert [row.error_code for row in rows] == ["", "", "run_limit_reached", ""]
    assert sum(row.prompt_tokens + row.output_tokens for row in rows) == 3 * (PROMPT + 3)
    await sdk.close()


async def test_branches_cannot_pass_the_limit_together(served):
    await limited(served, run_max_tokens=100)
    sdk = open_sdk(served, max_retries=2)
    served.backends[0].script.hold = asyncio.Event()
    branches = [asyncio.create_task(ask(sdk, "one", 40)) for _ in range(4)]
    await until(lambda: served.backends[0].running == 2)
    await asyncio.sleep(0.2)
    assert served.backends[0].running == 2
    served.backends[0].script.hold.set()
    assert all([await branch for branch in branches]), "the SDK has sent the other two again"
    await sdk.close()


async def test_dollars_of_a_run_are_at_what_its_models_cost(served):
    tenant = await Tenant.objects.aget()
    await UsageHour.objects.acreate(
        tenant=tenant, hour=timezone.now() - timedelta(hours=2), model="m", prompt_tokens=600, output_tokens=400,
        charged_usd=1.0,
    )  # fmt: skip
    served.gateway.dispatching.allowances.runs.load = RunTermsReader()  # it reads prices once a minute
    await limited(served, run_max_usd=0.1)
    sdk = open_sdk(served, max_retries=0)
    await ask(sdk, "one", 80)
    for run, max_tokens, headers in (("one", 90, {}), ("two", 50, {"Max_Usd": 0.05})):
        with pytest.raises(openai.RateLimitError, match=r"\$0\.") as refused:
            await ask(sdk, run, max_tokens, **headers)
        assert refused.value.code == "run_limit_reached"
    await sdk.close()


async def test_a_run_that_cannot_end_by_its_deadline_is_refused(served):
    await limited(served, run_deadline_s=2.0)
    runs = served.gateway.dispatching.dispatcher.runs
    await until(lambda: runs.deadlines)
    sdk = open_sdk(served, max_retries=2)
    await ask(sdk, "one", 20)
    with pytest.raises(openai.RateLimitError) as refused:
        await ask(sdk, "two", 20, Deadline=0.001)
    assert (refused.value.code, tries(refused.value)) == ("run_deadline_unreachable", 0)
    (one,) = [run for run in runs.standings.runs.values() if run.name == "one"]
    one.due_s -= 2.0
    with pytest.raises(openai.RateLimitError, match="late"):
        await ask(sdk, "one", 20)
    assert not one.calls
    await sdk.close()
