"""Three applications with LoRA adapters on real vLLM: completion times under Hermes and under FCFS, one after the other.

Each round sends the same runs at the same moments. Runs of an application use its adapter, of which the server holds two,
and report a tool between two LLM units. Demand graphs are learned from other runs. The figures are printed (`-s`), and kept
in `test-results/applications.json`.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.conf import settings
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.applications.services import import_graph
from controlplane.fleet.models import Adapter, Deployment, Model
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, Step
from tests.gateway.conftest import ServedGateway, until
from tests.vllm.conftest import MAX_NUM_SEQS, MODEL, servers_of
from tests.vllm.gateway import gateway_before
from tests.vllm.test_jct import order_by

pytestmark = pytest.mark.vllm

APPLICATIONS = {"check": (1, 16, 0.3, 16), "write": (1, 40, 0.4, 80), "merge": (3, 120, 0.5, 200)}
"""Calls and output tokens of the first unit, seconds of the tool, output tokens of the last unit: means."""
SENT = ["check"] * 12 + ["write"] * 6 + ["merge"] * 3
BURST_S = 2.0
ON_GPU = 2
"""Adapters on the GPU and in memory, of the three."""
ROUNDS = ("fcfs", "hermes", "hermes", "fcfs")
UNITS = {"first": Backend("llm", MODEL), "tool": Backend("tool", "tool"), "last": Backend("llm", MODEL)}


def record(application: str, random: np.random.Generator) -> RunRecord:
    """Draw a run: what is long at first is long at last."""
    calls, first, tool_s, last = APPLICATIONS[application]
    scale = float(np.exp(0.3 * random.standard_normal()))
    steps = (
        Step("first", -1, 8.0, max(2.0, round(first * scale)), parallelism=calls),
        Step("tool", 0, duration_s=tool_s),
        Step("last", 1, 8.0, max(2.0, round(last * scale))),
    )
    return RunRecord(steps)


def make_applications(source: str) -> None:
    Deployment.objects.update(max_loras=ON_GPU, max_cpu_loras=ON_GPU)
    tenant, random = Tenant.objects.get(), np.random.default_rng(1)
    for name in APPLICATIONS:
        Adapter.objects.create(name=f"{name}-lora", base=Model.objects.get(name=MODEL), source=source)
        graph = DemandGraph(name, UNITS, [record(name, random) for _ in range(20)])
        import_graph(tenant, graph, "test", timezone.now())


@pytest.fixture(scope="module")
def adapter_server(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with as many adapters on its GPU as the deployment says."""
    with servers_of(vllm_python, tmp_path_factory.mktemp("applications"), tiny_model) as fleet:
        sizes = {"max_loras": ON_GPU, "max_cpu_loras": ON_GPU, "max_lora_rank": 8}
        url = fleet.start("applications", max_num_seqs=MAX_NUM_SEQS, **sizes)
        fleet.wait("applications", url)
        yield url


@pytest.fixture
async def served(transactional_db, adapter_server: str, adapter: Path, monkeypatch) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    options = {"prepare": lambda: make_applications(str(adapter)), "max_concurrent_requests": 1000}
    async with gateway_before({"applications": adapter_server}, MAX_NUM_SEQS, **options) as served:
        await until(lambda: len(served.gateway.dispatching.dispatcher.runs.graphs) == len(APPLICATIONS))
        yield served


async def send(served: ServedGateway, application: str, run: str, record: RunRecord) -> float:
    """Send a run to its end; return the seconds that it took."""
    began_s = time.monotonic()
    marks = {"X-Application": application, "X-Run": run}
    for step in record.steps:
        if step.unit == "tool":
            report = {"application": application, "id": "tool", "unit": "tool", "kind": "tool"}
            for state, wait_s in (("running", step.duration_s), ("done", 0.0)):
                url = f"{served.url}/v1/runs/{run}/units"
                async with served.http.post(url, json=report | {"state": state}, headers=served.headers) as response:
                    assert response.status == 200, await response.text()
                await asyncio.sleep(wait_s)
            continue
        headers = served.headers | marks | {"X-Unit": step.unit}
        tokens = int(step.output_tokens)
        body = {"model": f"{application}-lora", "prompt": [5] * 8, "max_tokens": tokens, "ignore_eos": True}

        async def call(body: dict[str, Any] = body, headers: dict[str, str] = headers) -> None:
            async with served.http.post(f"{served.url}/v1/completions", json=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == 200, answer
                assert answer["usage"]["completion_tokens"] == body["max_tokens"]

        await asyncio.gather(*(call() for _ in range(step.parallelism)))
    return time.monotonic() - began_s


async def one_round(served: ServedGateway, name: str) -> dict[str, list[float]]:
    """Send all runs; return completion times by application."""
    random = np.random.default_rng(7)
    sent = random.permutation(SENT).tolist()
    moments = np.sort(random.uniform(0.0, BURST_S, len(sent))).tolist()
    records = [record(each, random) for each in sent]

    async def one(number: int) -> float:
        await asyncio.sleep(moments[number])
        return await send(served, sent[number], f"{name}-{number}", records[number])

    took = await asyncio.gather(*(one(number) for number in range(len(sent))))
    by_application: dict[str, list[float]] = {each: [] for each in APPLICATIONS}
    for application, seconds in zip(sent, took, strict=True):
        by_application[application].append(seconds)
    return by_application


def counted(served: ServedGateway) -> Counter[str]:
    """Return the calls by where their adapter was, and the adapters that were loaded before their calls."""
    dispatcher = served.gateway.dispatching.dispatcher
    return Counter(dispatcher.adapters.tiers) + Counter(
        {f"prewarmed: {key}": n for key, n in dispatcher.prewarming.counts["adapter"].items()}
    )


@pytest.mark.timeout(400)
async def test_applications_complete_sooner_under_hermes(served: ServedGateway) -> None:
    await order_by(served, "fcfs")
    await send(served, "check", "warm-up", record("check", np.random.default_rng(0)))
    rounds: list[dict[str, Any]] = []
    for number, order in enumerate(ROUNDS):
        await order_by(served, order)
        before = counted(served)
        took_s = await one_round(served, f"round-{number}")
        every = [seconds for each in took_s.values() for seconds in each]
        rounds.append(
            {
                "order": order,
                "mean_s": round(float(np.mean(every)), 2),
                "p95_s": round(float(np.quantile(every, 0.95)), 2),
                **{f"{name}_s": round(float(np.mean(each)), 2) for name, each in took_s.items()},
                "adapters": dict(counted(served) - before),
            }
        )
    text = json.dumps(rounds, indent=1)
    print(text)
    file = Path(settings.BASE_DIR) / "test-results" / "applications.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    means = {
        order: np.mean([each["mean_s"] for each in rounds if each["order"] == order]) for order in ("fcfs", "hermes")
    }
    assert means["hermes"] < means["fcfs"], text
    calls = sum(APPLICATIONS[name][0] + 1 for name in SENT)
    for each in rounds:
        adapters = each["adapters"]
        assert sum(count for name, count in adapters.items() if not name.startswith("prewarmed")) == calls
    prewarmed = [each["adapters"].get("prewarmed: used", 0) for each in rounds if each["order"] == "hermes"]
    assert sum(prewarmed) > 0, text
