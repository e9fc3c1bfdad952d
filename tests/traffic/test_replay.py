"""The open loop: requests go out at the trace's times whatever becomes of those before, and each one is accounted for."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web

from scheduling.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest
from tests.traffic.conftest import FakeGateway
from workers.traffic import replay as replaying
from workers.traffic.prompts import IDS, prompt_ids
from workers.traffic.replay import DONE, Replay


def make(gateway: FakeGateway, *, context_tokens: int = 0, speed: float = 1e6) -> Replay:
    return Replay(gateway.url, "m", "replay-x", {"Authorization": "Bearer good"}, context_tokens, speed)


def requests(count: int, *, every_s: float = 1.0, output_tokens: int = 3) -> list[TraceRequest]:
    return [TraceRequest(number * every_s, 10 + number, output_tokens) for number in range(count)]


def test_prompts_are_alike_as_far_as_their_blocks() -> None:
    draw = np.random.default_rng(1)
    size = MOONCAKE_BLOCK_TOKENS
    one, other = (prompt_ids(draw, 3 * size, (7, last)) for last in (8, 9))
    assert len(one) == len(other) == 3 * size
    assert one.min() >= IDS[0]
    assert one.max() < IDS[1]
    assert one[:size].tolist() == other[:size].tolist()
    assert one[size : size + 16].tolist() != other[size : size + 16].tolist()
    assert prompt_ids(draw, 16).tolist() != prompt_ids(draw, 16).tolist()
    assert prompt_ids(draw, 10, (7,)).tolist() == one[:10].tolist()


async def test_every_request_is_sent_and_accounted_for(gateway: FakeGateway) -> None:
    replay = make(gateway, context_tokens=50)
    unfit = [TraceRequest(20.0, 100, 5), TraceRequest(20.0, 10, 0), TraceRequest(20.0, 0, 3)]
    await replay.send(iter([*requests(20), *unfit]))
    report = replay.report()
    assert (report["sent"], report["done"], report["failed"], report["failures"]) == (20, 20, 0, {})
    assert report["skipped"] == {
        "longer than the model's context of 50 tokens": 1,
        "no prompt or output in the trace": 2,
    }
    assert (report["prompt_tokens"], report["output_tokens"]) == (sum(range(10, 30)), 60)
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"] <= report["e2e_ms"]["p99"]
    body = gateway.bodies[0]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 3, True, True)
    assert sorted(len(body["prompt"]) for body in gateway.bodies) == list(range(10, 30))
    assert {headers["X-Request-Id"] for headers in gateway.headers} == {f"replay-x-{number}" for number in range(1, 21)}


async def test_a_slow_answer_does_not_hold_up_the_next_request(gateway: FakeGateway) -> None:
    """Not one is answered until all have arrived: a closed loop would wait for ever."""
    gateway.hold = asyncio.Event()
    replay = make(gateway)
    run = asyncio.create_task(replay.send(iter(requests(30))))
    await gateway.has_open(30)
    gateway.hold.set()
    await run
    assert replay.report()["done"] == 30


async def test_a_turn_with_a_delay_waits_for_the_answer_before(gateway: FakeGateway) -> None:
    """No turn of two conversations is sent before the one above it is answered, and the other continues."""
    gateway.hold = asyncio.Event()
    sent = [
        TraceRequest(0.0, 11, 2, session="a"),
        TraceRequest(0.0, 21, 2, session="b"),
        TraceRequest(0.0, 12, 2, session="a", delay_s=0.01),
        TraceRequest(0.0, 13, 2, session="a", delay_s=0.0),
        TraceRequest(0.0, 22, 2, session="b", delay_s=0.01),
        TraceRequest(0.001, 31, 2),
    ]
    replay = make(gateway, speed=1.0)
    run = asyncio.create_task(replay.send(iter(sent)))
    await gateway.has_open(3)
    assert sorted(len(body["prompt"]) for body in gateway.bodies) == [11, 21, 31]
    gateway.hold.set()
    await run
    lengths = [len(body["prompt"]) for body in gateway.bodies]
    assert [length for length in lengths if length < 20] == [11, 12, 13]
    assert [length for length in lengths if 20 < length < 30] == [21, 22]
    assert replay.report()["done"] == 6


async def test_open_requests_are_bounded_and_lateness_is_counted(gateway: FakeGateway, monkeypatch) -> None:
    monkeypatch.setattr(replaying, "MAX_OPEN", 4)
    monkeypatch.setattr(replaying, "LATE_S", 0.0)
    gateway.hold = asyncio.Event()
    replay = make(gateway)
    run = asyncio.create_task(replay.send(iter(requests(12))))
    await gateway.has_open(4)
    gateway.hold.set()
    await run
    assert gateway.most_open == 4
    assert (replay.report()["done"], replay.late >= 8) == (12, True)


async def test_times_are_divided_by_the_speed(gateway: FakeGateway) -> None:
    """Two requests with 100 s between them, 1,000 times faster: the second waits at least a tenth of a second."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await make(gateway, speed=1000).send(iter(requests(2, every_s=100.0)))
    assert clock() - began_s >= 0.1


async def test_failures_are_distinguished(gateway: FakeGateway) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        number = int(request.headers["X-Request-Id"].rpartition("-")[2])
        if number == 1:
            return web.json_response({"error": {"code": "queue_full", "message": "full"}}, status=429)
        if number == 2:
            return web.Response(status=502, text="bad gateway")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps({"choices": [{"text": " a" * 9000}]}) + b"\n\n")
        if number == 3:
            await response.write(b'data: {"error":{"message":"lost","code":"instance_lost"}}\n\n')
        elif number == 4:
            await response.write(b"data: [DONE]\n\n")
        elif number == 5:
            assert request.transport is not None
            request.transport.abort()
        return response  # 6: ends without [DONE]

    gateway.answer = answer
    replay = make(gateway)
    await replay.send(iter(requests(6)))
    report = replay.report()
    failures = Counter(reason.partition(" (")[0] for reason in report["failures"])
    assert set(failures) == {
        "429 queue_full", "502", "stream ended with instance_lost", "no usage in the stream", "stream cut short",
        "connection lost",
    }  # fmt: skip
    assert report["sent"] == report["failed"] == 6


async def test_a_server_that_is_not_there(gateway: FakeGateway) -> None:
    gateway.url = "http://127.0.0.1:9/v1"
    replay = make(gateway)
    await replay.send(iter(requests(3)))
    assert replay.report()["failures"] == {"not reached": 3}


async def test_stopping_counts_what_is_open(gateway: FakeGateway) -> None:
    gateway.hold = asyncio.Event()
    replay = make(gateway, speed=1.0)
    run = asyncio.create_task(replay.send(iter([*requests(5, every_s=0.0), TraceRequest(3600.0, 10, 3)])))
    await gateway.has_open(5)
    run.cancel()
    await asyncio.wait([run])
    assert replay.report()["failures"] == {"interrupted": 5}
    gateway.hold.set()


async def test_a_trace_that_goes_wrong_halfway(gateway: FakeGateway) -> None:
    def rows() -> Iterator[TraceRequest]:
        yield from requests(3)
        raise TraceError(Path("trace.csv"), 5, "ContextTokens", "'x' is not a number")

    replay = make(gateway)
    await replay.send(rows())
    assert "'x' is not a number" in replay.mistake
    assert [answer.outcome for answer in replay.answers] == [DONE] * 3
