"""An emulated server at work: order, room, disconnects, metrics, sleep."""

import asyncio
import time
from typing import Any

import pytest

from tests.workers.conftest import FAST, SLOW, Emulator, eventually
from workers.vllm.metrics import parse


async def finishing_order(emulator: Emulator, priorities: list[int]) -> list[int]:
    """Fill the only slot, queue one request for each priority, and see in which order they are done."""
    order: list[int] = []

    async def one(priority: int) -> None:
        await emulator.complete(max_tokens=2, priority=priority)
        order.append(priority)

    blocker = asyncio.create_task(emulator.complete(max_tokens=60))
    await emulator.in_work(1, 0)
    tasks = []
    for count, priority in enumerate(priorities, 1):
        tasks.append(asyncio.create_task(one(priority)))
        await emulator.in_work(1, count)
    await asyncio.gather(blocker, *tasks)
    return order


async def test_fcfs_ignores_priority(emulator: Emulator) -> None:
    await emulator.ready(max_num_seqs=1, scheduling_policy="fcfs", profile={**FAST, "decode_a_s": 0.005})
    assert await finishing_order(emulator, [3, -1, 2]) == [3, -1, 2]


async def test_disconnect_while_waiting(emulator: Emulator) -> None:
    await emulator.ready(max_num_seqs=1, profile=SLOW)
    first = asyncio.create_task(emulator.complete(max_tokens=20))
    await emulator.in_work(1, 0)
    second = asyncio.create_task(emulator.complete(max_tokens=20))
    await emulator.in_work(1, 1)
    second.cancel()
    await emulator.in_work(1, 0)
    assert (await first)[0] == 200


async def test_admission_counts_sequences_and_what_it_refuses(emulator: Emulator) -> None:
    await emulator.ready(max_num_queued_reqs=3)
    assert (await emulator.complete(n=4))[0] == 503
    page = (await emulator.call("GET", "/one/metrics"))[1].decode()
    assert 'admission_rejections_total{engine="0",model_name="m"} 1.0' in page
    assert (await emulator.complete(n=3))[0] == 200


async def test_preemption_shows_in_metrics_and_loses_no_token(emulator: Emulator) -> None:
    # Room for 2 blocks of 16 tokens each, wanted are 4 sequences of 5 blocks.
    await emulator.ready(kv_blocks=8, max_model_len=100)
    answers = await asyncio.gather(*(emulator.complete(prompt=[1] * 8, max_tokens=70) for _ in range(4)))
    for status, answer in answers:
        assert status == 200
        assert len(answer["choices"][0]["text"].split()) == 70
    m = await emulator.metrics()
    assert m.preemptions_total > 0
    assert m.generation_tokens_total == 280
    assert m.prompt_tokens_total == 32


async def test_a_caller_who_leaves_while_asleep_is_forgotten(emulator: Emulator) -> None:
    instance = await emulator.ready()
    await emulator.call("POST", "/one/sleep")
    task = asyncio.create_task(emulator.complete())
    await eventually(lambda: instance.unfinished == 1)
    task.cancel()
    await eventually(lambda: instance.unfinished == 0)


async def running_stream(emulator: Emulator, tokens: int) -> asyncio.Task[list[dict[str, Any]]]:
    usage = {"include_usage": True}
    task = asyncio.create_task(emulator.stream(max_tokens=tokens, stream_options=usage))
    await emulator.in_work(1, 0)
    return task


async def test_sleep_waits(emulator: Emulator) -> None:
    await emulator.ready(profile=SLOW)
    streamed = await running_stream(emulator, 20)
    sleeping = asyncio.create_task(emulator.call("POST", "/one/sleep?mode=wait"))
    await eventually(lambda: emulator.fleet.instances["one"]._holding)
    late = asyncio.create_task(emulator.complete())
    assert (await sleeping)[0] == 200
    assert (await streamed)[-1]["usage"]["completion_tokens"] == 20
    assert not late.done()
    await emulator.call("POST", "/one/wake_up")
    assert (await late)[0] == 200


async def test_an_abandoned_sleep_does_not_happen(emulator: Emulator) -> None:
    instance = await emulator.ready(profile=SLOW)
    streamed = await running_stream(emulator, 15)
    sleeping = asyncio.create_task(emulator.call("POST", "/one/sleep?mode=wait"))
    await eventually(lambda: instance._holding)
    sleeping.cancel()
    await eventually(lambda: not instance._holding)
    assert (await streamed)[-1]["usage"]["completion_tokens"] == 15
    assert (await emulator.complete())[0] == 200


@pytest.mark.parametrize(("level", "preemptions"), [(0, 0), (1, 1), (2, 1)])
async def test_sleep_keeps(emulator: Emulator, level: int, preemptions: int) -> None:
    instance = await emulator.ready(profile=SLOW)
    streamed = await running_stream(emulator, 12)
    await eventually(lambda: instance.metrics.generation_tokens > 2)
    await emulator.call("POST", f"/one/sleep?mode=keep&level={level}")
    produced = instance.metrics.generation_tokens
    await asyncio.sleep(0.1)
    assert instance.metrics.generation_tokens == produced
    assert (await emulator.metrics()).running == 1
    await emulator.call("POST", "/one/wake_up")
    assert (await streamed)[-1]["usage"]["completion_tokens"] == 12
    assert (await emulator.metrics()).preemptions_total == preemptions


@pytest.mark.parametrize(("level", "steps"), [(1, ["sleep", "wake_up"]), (2, ["reload"])])
async def test_sleep_and_wake_take_their_time(emulator: Emulator, level: int, steps: list[str]) -> None:
    await emulator.ready(sleep_s=0.2, wake_s=0.2, reload_s=0.2)
    took = {}
    for name, path, body in (
        ("sleep", f"sleep?level={level}", None),
        ("reload", "collective_rpc", {"method": "reload_weights"}),
        ("wake_up", "wake_up", None),
    ):
        if name == "reload" and level == 1:
            continue
        began_s = time.monotonic()
        assert (await emulator.call("POST", f"/one/{path}", body))[0] == 200
        took[name] = time.monotonic() - began_s
    assert [name for name in took if took[name] >= 0.2] == steps


async def test_only_weights_are_reloaded(emulator: Emulator) -> None:
    await emulator.ready()
    assert (await emulator.call("POST", "/one/collective_rpc", {"method": "dance"}))[0] == 500


async def test_the_prefix_cache_is_reset_by_hand_and_by_sleep(emulator: Emulator) -> None:
    instance = await emulator.ready(enable_prefix_caching=True, profile=SLOW)
    prompt = list(range(100))

    async def hits() -> int:
        before = (await emulator.metrics()).prefix_hits_total
        await emulator.complete(prompt=prompt)
        return (await emulator.metrics()).prefix_hits_total - before

    assert (await hits(), await hits()) == (0, 96)
    assert await emulator.call("POST", "/one/reset_prefix_cache") == (200, {"success": True})
    assert (await hits(), await hits()) == (0, 96)
    await emulator.call("POST", "/one/sleep")
    await emulator.call("POST", "/one/wake_up")
    assert await hits() == 0
    streamed = await running_stream(emulator, 12)
    await eventually(lambda: instance.metrics.generation_tokens > 2)
    assert await emulator.call("POST", "/one/reset_prefix_cache") == (200, {"success": False})
    await streamed


@pytest.mark.parametrize("query", ["level=7", "level=x", "mode=zz"])
async def test_wrong_sleep(emulator: Emulator, query: str) -> None:
    await emulator.ready()
    status, answer = await emulator.call("POST", f"/one/sleep?{query}")
    assert status == 400
    assert answer["error"]["param"] == f"query.{query.split('=')[0]}"


async def test_adapters_take_their_place_in_memory_and_their_time(emulator: Emulator) -> None:
    """One on the GPU, two in memory: as vLLM the server loads again what it had to drop, within the request."""
    await emulator.ready(max_loras=1, max_cpu_loras=2, adapter_storage_s=0.2, adapter_memory_s=0.1)
    took_s = {}
    for name in ("a", "b", "c"):
        began_s = time.perf_counter()
        status, _ = await emulator.call("POST", "/one/v1/load_lora_adapter", {"lora_name": name, "lora_path": "acme/x"})
        took_s[f"load {name}"] = time.perf_counter() - began_s
        assert status == 200
    for name in ("c", "b", "a"):
        began_s = time.perf_counter()
        call = {"model": name, "prompt": "hi", "max_tokens": 1}
        assert (await emulator.call("POST", "/one/v1/completions", call))[0] == 200
        took_s[name] = time.perf_counter() - began_s
    assert took_s["load a"] >= 0.2
    assert took_s["c"] < 0.1 <= took_s["b"]
    assert took_s["a"] >= 0.2


async def test_kv_that_left_the_gpu_is_restored_from_cpu_memory(emulator: Emulator) -> None:
    """Two prompts of all of the GPU's memory in turn: as vLLM the server says what it restored, and how long that took."""
    link = {"restore_s": 1e-5, "restore_s_per_token": 1e-8}
    sizes = {"max_model_len": 256, "kv_blocks": 16, "max_num_batched_tokens": 256}
    instance = await emulator.ready(
        enable_prefix_caching=True, offload_blocks=100, profile=FAST | {"prefill_b_s_per_token": 1e-4}, **sizes, **link
    )
    for first in (0, 1000, 0):
        call = {"prompt": list(range(first, first + 255)), "max_tokens": 1}
        assert (await emulator.complete(**call))[0] == 200
    page = parse(instance.metrics.render())
    assert (page.restored_tokens_total, page.prefix_hits_total) == (240.0, 0.0)
    assert page.restore_s_total == pytest.approx(1e-5 + 240 * 1e-8)
