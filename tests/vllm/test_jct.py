"""What the gateway gives a server first by each order, and that all of it is served, whatever was predicted."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from msgspec.structs import replace

from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.port import Submit
from controlplane.fleet.models import Deployment
from tests.gateway.conftest import ServedGateway, until
from tests.vllm.conftest import MAX_NUM_SEQS, MODEL, Server
from tests.vllm.gateway import gateway_before


@pytest.fixture
async def served(transactional_db, server: Server, monkeypatch) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    async with gateway_before({"jct": server.url}, MAX_NUM_SEQS) as served:
        yield served


async def order_by(served: ServedGateway, ordering: str) -> None:
    """Change the deployment's row and wait until the gateway goes by it."""
    await database_sync_to_async(Deployment.objects.update)(ordering_policy=ordering)
    served.gateway.refresh_now()
    (endpoint,) = served.gateway.topology.endpoints
    await until(lambda: endpoint.spec.policy.ordering == ordering)


def foretell(served: ServedGateway, predicted: dict[str, Any]) -> None:
    """Let the dispatcher take *predicted*, by request id, in place of its predictions."""
    served.gateway.dispatcher.possible = lambda asked: predicted[asked.request_id]


async def ask(served: ServedGateway, request_id: str, tokens: int) -> float:
    """Send one request; return seconds until its last byte."""
    body = {"model": MODEL, "prompt": [7, 8, 9, 10], "max_tokens": tokens, "ignore_eos": True}
    began_s = time.monotonic()
    async with served.http.post(
        f"{served.url}/v1/completions", json=body, headers=served.headers | {"X-Request-Id": request_id}
    ) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == tokens
    return time.monotonic() - began_s


# What must hold


class Held:
    """Nothing is given out before `let_go`; then *given* lists the requests in their order."""

    def __init__(self, served: ServedGateway) -> None:
        self.placement = served.gateway.dispatcher.placement
        self.given: list[str] = []
        self._pump, self._explain = self.placement.pump, self.placement._explain
        self.placement.pump = lambda endpoint: None
        self.placement._explain = self.explain

    def explain(self, request: Request, *arguments: Any, **options: Any) -> dict[str, object]:
        self.given.append(request.asked.request_id)
        return self._explain(request, *arguments, **options)

    def let_go(self) -> None:
        self.placement.pump = self._pump
        self.placement.pump_all()


async def order_of_service(served: ServedGateway, jobs: dict[str, int]) -> list[str]:
    """Ask all *jobs* (tokens by id) before anything is given out; the order in which they are."""
    held = Held(served)
    asked = []
    for count, (request_id, tokens) in enumerate(jobs.items(), 1):
        asked.append(asyncio.create_task(ask(served, request_id, tokens)))
        await until(lambda count=count: len(served.gateway.dispatcher.queue) == count)
    held.let_go()
    await asyncio.gather(*asked)
    return held.given


async def test_the_shortest_predicted_is_served_first_by_ssjf_and_the_first_come_by_fcfs(served):
    jobs = {f"job-{number}": tokens for number, tokens in enumerate([90, 30, 60, 120, 12, 45, 75, 20, 105])}
    predicted = {request_id: 3 * tokens + 1 for request_id, tokens in jobs.items()}
    foretell(served, predicted)
    for ordering, order in (("ssjf", sorted(jobs, key=predicted.__getitem__)), ("fcfs", list(jobs))):
        await order_by(served, ordering)
        assert await order_of_service(served, jobs) == order


async def test_whatever_is_predicted_everything_is_served(served):
    sick = [math.nan, math.inf, -math.inf, 0, -5, 10**12, 0.3, 1]
    possible = served.gateway.dispatcher.possible

    def say(asked: Submit) -> int:
        return possible(replace(asked, predicted_tokens=sick[int(asked.request_id)]))

    served.gateway.dispatcher.possible = say
    await order_by(served, "ssjf")
    order = await order_of_service(served, {str(number): 10 + number for number in range(len(sick))})
    assert sorted(order) == [str(number) for number in range(len(sick))]
