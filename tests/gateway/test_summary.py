"""The live summary: tokens a second as instances count them, use of instances, and the requests that the SLO covers."""

import asyncio
import time

import pytest
from channels.db import database_sync_to_async

from controlplane.fleet.models import Instance
from tests.gateway.conftest import until


def tables(served) -> tuple[dict, dict, dict]:
    """Return the fleet's tile, and the first instance and endpoint, of a new summary."""
    summary = served.gateway.publisher.summary.snapshot()
    first = [{name: values[0] for name, values in summary[table].items()} for table in ("instances", "endpoints")]
    return summary["fleet"], *first


async def test_tokens_count_while_an_answer_is_made(served):
    """Nothing is streamed and nothing has ended: the instance's own counters show that it works."""
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    asked = asyncio.create_task(served.chat())
    await until(lambda: backend.running == 1)

    async def produce():
        while True:
            backend.generated += 20
            backend.prefilled += 50
            await asyncio.sleep(0.1)

    working = asyncio.create_task(produce())
    await until(lambda: tables(served)[1]["output_tokens_per_s"] > 0)
    began_s, before = time.monotonic(), backend.generated
    await asyncio.sleep(2.0)
    fleet, instance, endpoint = tables(served)
    paced = (backend.generated - before) / (time.monotonic() - began_s)  # a slow machine produces more slowly
    assert instance["output_tokens_per_s"] == pytest.approx(paced, rel=0.5)
    assert endpoint["output_tokens_per_s"] == fleet["output_tokens_per_s"] == instance["output_tokens_per_s"]
    assert endpoint["prompt_tokens_per_s"] == pytest.approx(2.5 * endpoint["output_tokens_per_s"], rel=0.3)
    working.cancel()
    backend.generated = 0  # as after a restart: nothing negative, nothing made up
    await until(lambda: tables(served)[1]["output_tokens_per_s"] == 0.0)
    backend.script.hold.set()
    await asked


@pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 2}])
async def test_use_is_the_fuller_of_sequences_and_kv_cache(served):
    backend = served.backends[0]
    await until(lambda: tables(served)[1]["kv_ratio"] == 0.25)
    assert tables(served)[1]["use_ratio"] == 0.25
    backend.script.hold = asyncio.Event()
    asked = [asyncio.create_task(served.chat()) for _ in range(2)]
    await until(lambda: backend.running == 2)
    _, instance, _ = tables(served)
    assert (instance["running"], instance["max_num_seqs"], instance["use_ratio"]) == (2, 2, 1.0)
    await database_sync_to_async(Instance.objects.update)(state="draining")
    served.gateway.dispatching.refresh_now()
    await until(lambda: tables(served)[1]["state"] == "draining")
    fleet = tables(served)[0]
    assert (fleet["running"], fleet["instances_ready"], fleet["instances"]) == (2, 0, 0)  # it leaves, and is not missed
    backend.script.hold.set()
    await asyncio.gather(*asked)


async def test_the_headline_is_the_class_that_does_worst_against_its_own_percentile(served):
    """Twenty flexible requests in time do not hide that each interactive one missed its first token."""
    await asyncio.gather(*(served.chat(headers={"X-SLO-Class": "flexible"}) for _ in range(20)))
    backend = served.backends[0]
    backend.script.first_token_s = 1.05
    for _ in range(2):
        answer = await served.chat(stream=True)
        await answer.read()

    def fleet() -> dict:
        return tables(served)[0]

    await until(lambda: fleet()["slo_judged"] == 22)
    shown = fleet()
    assert (shown["slo_class"], shown["slo_met_ratio"], shown["slo_objective_ratio"]) == ("interactive", 0.0, 0.95)
    assert shown["slo_burn"] == pytest.approx(20.0)
    by_class = {row["slo_class"]: (row["met"], row["judged"]) for row in shown["slo_classes"]}
    assert by_class == {"flexible": (20, 20), "interactive": (0, 2)}
    model = served.gateway.publisher.summary.snapshot()["models"]["m"]
    assert model["slo_classes"] == shown["slo_classes"]


async def test_the_slo_says_of_how_many_requests_it_speaks(served):
    """The class promises a time to first token: an answer in one piece shows none, so it is not judged."""
    for asked in ({"stream": True}, {}, {"prompt_logprobs": 1}):
        answer = await served.chat(**asked)
        await answer.read()
    flexible = await served.chat(headers={"X-SLO-Class": "flexible"})  # promises an end, which every answer has
    await flexible.read()
    rows = await served.rows()
    assert [row.slo_met for row in rows] == [True, None, None, True]

    def loads() -> tuple:
        fleet, _, _ = tables(served)
        return fleet["slo_ended"], fleet["slo_judged"], fleet["slo_met_ratio"]

    await until(lambda: loads() == (4, 2, 1.0))
