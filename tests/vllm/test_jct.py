"""Mean job completion time through the gateway: SSJF against FCFS on the same arrivals, its oracle as the bound.

The short form asserts what must hold: shortest predicted first, everything served, whatever was predicted. The measured one
(`-m truth -s`) prints figures and keeps them in `test-results/jct.json`. Outputs are forced to their length (`max_tokens`
with `ignore_eos`), so their prediction would be exact: the dispatcher gets another one, of a real predictor about real
answers. `LENGTH_DATA_DIR` names the folder of published sets (docs/papers/ordering.md); without it lengths and errors are
drawn, and the report says so.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from msgspec.structs import replace

from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.port import Asked
from controlplane.fleet.models import Deployment
from tests.gateway.conftest import ServedGateway, until
from tests.vllm.conftest import MAX_NUM_SEQS, MODEL, Server, emulated, profile, servers_of
from tests.vllm.gateway import gateway_before

REQUESTS = 300
RUNS = 3
BUSY, QUIET = (0.9, 25), (0.3, 1)  # load, and how many requests come at a time
WARM = 24
LONGEST = 511
SHORTER = 4
"""Times that all lengths are divided by: an hour of a GPU would be a day of a CPU."""


@pytest.fixture
async def served(transactional_db, server: Server, monkeypatch) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    async with gateway_before({"jct": server.url}, MAX_NUM_SEQS) as served:
        yield served


async def order_by(served: ServedGateway, ordering: str) -> None:
    """Change the deployment's row and wait until the gateway goes by it."""
    await database_sync_to_async(Deployment.objects.update)(ordering_policy=ordering)
    served.gateway.dispatching.refresh_now()
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    await until(lambda: endpoint.spec.policy.ordering == ordering)


def foretell(served: ServedGateway, predicted: dict[str, Any]) -> None:
    """Let the dispatcher take *predicted*, by request id, in place of its predictions."""
    served.gateway.dispatching.dispatcher.possible = lambda asked: predicted[asked.request_id]


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
        self.placement = served.gateway.dispatching.dispatcher.placement
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
        await until(lambda count=count: len(served.gateway.dispatching.dispatcher.queue) == count)
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
    possible = served.gateway.dispatching.dispatcher.possible

    def say(asked: Asked) -> int:
        return possible(replace(asked, predicted_tokens=sick[int(asked.request_id)]))

    served.gateway.dispatching.dispatcher.possible = say
    await order_by(served, "ssjf")
    order = await order_of_service(served, {str(number): 10 + number for number in range(len(sick))})
    assert sorted(order) == [str(number) for number in range(len(sick))]


# What is measured


@dataclass(frozen=True)
class Work:
    """One load: when requests come, in mean gaps; what they really produce, and what is predicted."""

    arrival: np.ndarray
    output: np.ndarray
    predicted: np.ndarray


@dataclass(frozen=True)
class Predictor:
    """Real answers and what a predictor says of them, in tokens."""

    name: str
    output: np.ndarray
    predicted: np.ndarray

    def work(self, count: int, seed: int, burst: int) -> Work:
        """Return *count* requests in bursts of *burst*: queueing then hardly depends on how
        well the server's pace is known.
        """
        random = np.random.default_rng(seed)
        at = random.integers(0, self.output.size, count)
        gaps = np.where(np.arange(count) % burst == 0, burst * random.exponential(1.0, count), 0.0)
        output, predicted = (np.maximum(tokens[at] // SHORTER, 1) for tokens in (self.output, self.predicted))
        return Work(np.cumsum(gaps) / gaps.mean(), output, predicted)


def predictors() -> list[Predictor]:
    folder = os.environ.get("LENGTH_DATA_DIR", "")
    if not folder:
        random = np.random.default_rng(3)
        output = np.clip(random.lognormal(np.log(110), 1.0, 4000), 2, LONGEST).astype(int)
        said = np.clip(output * random.lognormal(0.0, 0.8, 4000), 1, LONGEST)
        return [Predictor("drawn, no LENGTH_DATA_DIR", output, np.rint(said).astype(int))]
    from controlplane.experiments.ssjf import read_lengths
    from forecasting.lengths import bundled
    from forecasting.lengths.datasets import FREE, UNSEEN_SHARE, read_sets

    bert = read_lengths(Path(folder))
    samples = read_sets(Path(folder), FREE, UNSEEN_SHARE).test
    tokens = np.array([sample.output_tokens for sample in samples])
    said = bundled().predict([sample.query for sample in samples]).tokens
    kept = tokens <= LONGEST
    trees = np.maximum(np.rint(said[kept]), 1).astype(int)
    return [
        Predictor("BERT of SSJF's authors, LMSYS-Chat-1M", bert.output, bert.predicted),
        Predictor("our trees, held-out prompts of arena_bench_v1 and gpteacher", tokens[kept], trees),
    ]


async def drive(served: ServedGateway, work: Work, per_s: float, predicted: np.ndarray, run: str) -> np.ndarray:
    """Return the JCT of every request of *work*, sent at *per_s* requests a second."""
    foretell(served, {f"{run}-{number}": int(tokens) for number, tokens in enumerate(predicted)})
    began_s = time.monotonic() + 0.2

    async def one(number: int) -> float:
        await asyncio.sleep(began_s + work.arrival[number] / per_s - time.monotonic())
        return await ask(served, f"{run}-{number}", int(work.output[number]))

    return np.array(await asyncio.gather(*(one(number) for number in range(work.output.size))))


async def capacity_per_s(served: ServedGateway, predictor: Predictor) -> float:
    """Return the server's requests per second when all arrive at once. The first ones also load code."""
    work = predictor.work(WARM, 99, 1)
    at_once = Work(np.zeros(WARM), work.output, work.predicted)
    await drive(served, at_once, 1.0, work.output, "warm")
    again = Work(np.zeros(3 * WARM), np.tile(work.output, 3), np.tile(work.predicted, 3))
    return 3 * WARM / float((await drive(served, again, 1.0, again.output, "full")).max())


async def compare(
    served: ServedGateway, predictor: Predictor, load: float, burst: int, runs: int, requests: int = REQUESTS
) -> dict[str, Any]:
    """Each run has its own arrivals, the same for every ordering; orderings alternate in being first."""
    await order_by(served, "fcfs")
    most_per_s = await capacity_per_s(served, predictor)
    lines = []
    names = ["fcfs", "ssjf", "oracle"]
    for run in range(runs):
        work = predictor.work(requests, 100 + run, burst)
        jct_s = {}
        for name in names[run % 3 :] + names[: run % 3]:
            await order_by(served, "fcfs" if name == "fcfs" else "ssjf")
            said = work.output if name == "oracle" else work.predicted
            jct_s[name] = await drive(served, work, load * most_per_s, said, f"{run}-{name}")
        lines.append({name: round(float(values.mean()), 3) for name, values in jct_s.items()})
        lines[-1] |= {f"{name}_p99": round(float(np.percentile(values, 99)), 3) for name, values in jct_s.items()}
    # The median over runs: a machine that does something else for a while spoils one of them.
    reduction, bound = (float(np.median([1 - line[name] / line["fcfs"] for line in lines])) for name in names[1:])
    return {
        "predictor": predictor.name,
        "load": load,
        "burst": burst,
        "capacity_per_s": round(most_per_s, 2),
        "mean_jct_s": lines,
        "reduction_pct": round(100 * reduction, 1),
        "oracle_reduction_pct": round(100 * bound, 1),
        "share_of_oracle_pct": round(100 * reduction / bound, 1) if bound > 0.02 else None,
    }


async def report(served: ServedGateway, where: str) -> list[dict[str, Any]]:
    comparisons = []
    for predictor in predictors():
        comparisons.append(await compare(served, predictor, *BUSY, RUNS))
        print(json.dumps(comparisons[-1], indent=1))
    comparisons.append(await compare(served, predictor, *QUIET, RUNS, REQUESTS // 3))
    print(json.dumps(comparisons[-1], indent=1))
    file = Path(settings.BASE_DIR) / "test-results" / f"jct-{where}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(comparisons, indent=1))
    return comparisons


@pytest.fixture(scope="module")
def quiet_server(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The only server that runs meanwhile."""
    with servers_of(vllm_python, tmp_path_factory.mktemp("jct"), tiny_model) as fleet:
        url = fleet.start("jct", max_num_seqs=MAX_NUM_SEQS)
        fleet.wait("jct", url)
        yield url


@pytest.mark.truth
@pytest.mark.timeout(3600)
async def test_mean_jct_on_real_vllm(transactional_db, quiet_server, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    async with gateway_before({"jct": quiet_server}, MAX_NUM_SEQS) as served:
        comparisons = await report(served, "vllm")
    assert len(comparisons) >= 2


async def slower(url: str) -> str:
    """Return another instance of the emulator at *url*, with steps of 10 ms, so that other overheads are small."""
    body = {"model": MODEL, "max_num_seqs": MAX_NUM_SEQS, "profile": profile(0.01, 0.01, 0.01, 1e-4)}
    address = f"{url.rpartition('/')[0]}/emulator/instances/jct"
    async with aiohttp.ClientSession() as http, http.put(address, json=body) as response:
        return str((await response.json())["url"])


@pytest.mark.truth
@pytest.mark.timeout(3600)
async def test_mean_jct_on_an_emulated_server(transactional_db, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    process, url = emulated()
    with process:
        try:
            async with gateway_before({"jct": await slower(url)}, MAX_NUM_SEQS) as served:
                comparisons = await report(served, "emulated")
        finally:
            process.terminate()
    assert len(comparisons) >= 2
