"""Operators move an application run first or stop it: its calls in queues and on instances, and the answers to tenants."""

import asyncio

import pytest

from controlplane.gateway.explanation import trace_of
from tests.gateway.conftest import until


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 1, "ordering_policy": "hermes"}


def act(served, run, action):
    """Send the command as the console does."""
    tenant_id = served.extra.setdefault(
        "tenant_id", next(iter(served.gateway.dispatching.dispatcher.runs.standings.runs))[0][0]
    )
    values = {"tenant_id": tenant_id, "application": "review", "run": run, "action": action}
    return served.gateway.dispatching.commands.answer({"command": "run", "values": values})


async def ask(served, run):
    return await served.chat({"X-Application": "review", "X-Run": run}, stream=True, max_tokens=20)


async def one_runs_and_three_wait(served):
    """The first run's call is on the only instance; those of the others wait in this order."""
    served.backends[0].script.first_token_s = 0.5
    calls = {}
    for number, run in enumerate(("first", "a", "b", "c")):
        calls[run] = asyncio.create_task(ask(served, run))
        await until(lambda number=number: len(served.gateway.dispatching.dispatcher.requests) == number + 1)
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 3)
    return calls


def waiting(served):
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    return [one.asked.run for one in served.gateway.dispatching.dispatcher.queue.in_order(endpoint)]


async def test_a_run_that_is_moved_first_overtakes_the_others(served):
    calls = await one_runs_and_three_wait(served)
    assert waiting(served) == ["a", "b", "c"]
    assert act(served, "b", "first").answer == 1
    assert waiting(served) == ["b", "a", "c"]
    served.backends[0].script.first_token_s = 0.0
    for call in calls.values():
        assert (await call).status == 200
        await (await call).read()
    rows = await served.rows()
    assert [row.run for row in rows] == ["first", "b", "a", "c"]
    moved = trace_of(rows[1])[0]["run"]
    assert "moved first by an operator" in moved["words"]


async def test_a_run_that_is_stopped_ends_and_is_refused(served):
    calls = await one_runs_and_three_wait(served)
    for run in ("first", "b"):
        act(served, run, "stop")
    for run in ("first", "b"):
        response = await calls[run]
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (409, "run_stopped", "invalid_request_error")
    again = await ask(served, "b")
    assert (again.status, (await again.json())["error"]["code"]) == (409, "run_stopped")
    assert "was stopped" in act(served, "b", "first").refused
    served.backends[0].script.first_token_s = 0.0
    for run in ("a", "c"):
        assert (await calls[run]).status == 200
        await (await calls[run]).read()
    rows = await served.rows()
    ends = {(row.run, row.error_code, row.outcome) for row in rows if row.error_code}
    assert ends == {("first", "run_stopped", "failed"), ("b", "run_stopped", "rejected")}
    assert all(row.slo_met is None for row in rows if row.error_code), "not the fleet's miss"


@pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 1, "ordering_policy": "fcfs"}])
async def test_an_order_without_runs_moves_none(served):
    calls = await one_runs_and_three_wait(served)
    assert "orders by application run" in act(served, "c", "first").refused
    served.backends[0].script.first_token_s = 0.0
    for call in calls.values():
        await (await call).read()
