"""The open loop: requests go out at the trace's times whatever becomes of those before, and each one is accounted for."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from controlplane.gateway.replay.sender import Sender, Target, fit
from scheduling.simulation.workload.traces import TraceError, TraceRequest
from tests.replay.conftest import FakeGateway


def make(
    gateway: FakeGateway, *, context_tokens: int = 0, clip: bool = False, connections: int = 100, speed: float = 1e6
) -> Sender:
    target = Target(gateway.url, "good", "m", context_tokens, slo_class="interactive", region="us-east")
    return Sender(target, "replay-x", speed=speed, clip=clip, connections=connections, seed=1)


def requests(count: int, *, every_s: float = 1.0, output_tokens: int = 3) -> list[TraceRequest]:
    return [TraceRequest(number * every_s, 10 + number, output_tokens) for number in range(count)]


async def test_a_stall_is_in_the_mean_gap_of_its_request(gateway: FakeGateway) -> None:
    """C79: as AIPerf and vLLM's bench have it, inter-token latency is the mean of a request, not a gap."""

    async def stalls(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(11):
            await asyncio.sleep(0.2 if number == 5 else 0.0)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 11}}
        await response.write(b"data: " + orjson.dumps(usage) + b"\n\ndata: [DONE]\n\n")
        return response

    gateway.answer = stalls
    sender = make(gateway)
    await sender.run(iter(requests(1, output_tokens=11)))
    (answer,) = sender.tally.answers
    assert answer.itl_ms == pytest.approx(20.0, abs=8.0)


async def test_every_request_is_sent_and_accounted_for(gateway: FakeGateway) -> None:
    sender = make(gateway)
    await sender.run(iter(requests(20)))
    tally = sender.tally
    assert (tally.sent, tally.done, tally.failed.total(), tally.open) == (20, 20, 0, 0)
    assert sum(answer.prompt_tokens for answer in tally.answers) == sum(range(10, 30))
    assert {answer.output_tokens for answer in tally.answers} == {3}
    assert all(0 <= a.ttft_ms <= a.e2e_ms and a.itl_ms >= 0 for a in tally.answers)  # type: ignore[operator]
    body = gateway.bodies[0]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 3, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert sorted(len(body["prompt"]) for body in gateway.bodies) == list(range(10, 30))
    assert {headers["X-Request-Id"] for headers in gateway.headers} == {f"replay-x-{number}" for number in range(1, 21)}
    assert {(h["X-SLO-Class"], h["X-Region"], h["Authorization"]) for h in gateway.headers} == {
        ("interactive", "us-east", "Bearer good")
    }


async def test_a_slow_answer_does_not_hold_up_the_next_request(gateway: FakeGateway) -> None:
    """Not one is answered until all have arrived: a closed loop would wait for ever."""
    gateway.hold = asyncio.Event()
    sender = make(gateway)
    run = asyncio.create_task(sender.run(iter(requests(30))))
    await gateway.has_open(30)
    gateway.hold.set()
    await run
    assert sender.tally.done == sender.tally.most_open == 30


async def test_a_turn_with_a_delay_waits_for_the_answer_before(gateway: FakeGateway) -> None:
    """C25. Two conversations of three turns: no turn is sent before the one above it is answered, the other continues."""
    gateway.hold = asyncio.Event()
    sent = [
        TraceRequest(0.0, 11, 2, session="a"),
        TraceRequest(0.0, 21, 2, session="b"),
        TraceRequest(0.0, 12, 2, session="a", delay_s=0.01),
        TraceRequest(0.0, 13, 2, session="a", delay_s=0.0),
        TraceRequest(0.0, 22, 2, session="b", delay_s=0.01),
        TraceRequest(0.001, 31, 2),
    ]
    sender = make(gateway, speed=1.0, connections=4)
    run = asyncio.create_task(sender.run(iter(sent)))
    await gateway.has_open(3)
    await asyncio.sleep(0.05)
    assert sorted(len(body["prompt"]) for body in gateway.bodies) == [11, 21, 31]
    gateway.hold.set()
    await run
    lengths = [len(body["prompt"]) for body in gateway.bodies]
    assert [length for length in lengths if length < 20] == [11, 12, 13]
    assert [length for length in lengths if 20 < length < 30] == [21, 22]
    assert (sender.tally.sent, sender.tally.done, sender.tally.open) == (6, 6, 0)


async def test_open_requests_are_bounded_and_lateness_is_counted(gateway: FakeGateway) -> None:
    gateway.hold = asyncio.Event()
    sender = make(gateway, connections=4)
    run = asyncio.create_task(sender.run(iter(requests(12))))
    await gateway.has_open(4)
    await asyncio.sleep(0.2)  # longer than what counts as late
    gateway.hold.set()
    await run
    assert gateway.most_open <= 4
    assert (sender.tally.done, sender.tally.most_open) == (12, 4)
    assert sender.tally.late >= 1
    assert sender.tally.latest_s > 0.1


async def test_times_are_divided_by_the_speed(gateway: FakeGateway) -> None:
    """Two requests with 100 s between them, 1,000 times faster: the second waits at least a tenth of a second."""
    sender = make(gateway, speed=1000)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await sender.run(iter(requests(2, every_s=100.0)))
    assert clock() - began_s >= 0.1


@pytest.mark.parametrize(
    ("request_", "context", "clip", "expected"),
    [
        (TraceRequest(0, 100, 20), 0, False, (100, 20)),
        (TraceRequest(0, 100, 20), 120, False, (100, 20)),
        (TraceRequest(0, 101, 20), 120, False, "longer than the model's context of 120 tokens"),
        (TraceRequest(0, 101, 20), 120, True, (100, 20)),
        (TraceRequest(0, 9, 500), 120, True, (1, 119)),
        (TraceRequest(0, 0, 5), 120, True, "no prompt in the trace"),
        (TraceRequest(0, 5, 0), 120, False, "no output in the trace"),
    ],
)
def test_what_does_not_fit(request_: TraceRequest, context: int, clip: bool, expected: tuple[int, int] | str) -> None:
    fitted = fit(request_, context, clip=clip)
    lengths = fitted if isinstance(fitted, str) else (fitted.prompt_tokens, fitted.output_tokens)
    assert lengths == expected


async def test_left_out_and_shortened_requests_are_counted(gateway: FakeGateway) -> None:
    rows = [TraceRequest(0, 10, 5), TraceRequest(0, 100, 5), TraceRequest(0, 10, 0)]
    sender = make(gateway, context_tokens=50)
    await sender.run(iter(rows))
    assert (sender.tally.sent, sender.tally.skipped.total(), sender.tally.clipped) == (1, 2, 0)
    sender = make(gateway, context_tokens=50, clip=True)
    await sender.run(iter(rows))
    assert (sender.tally.sent, sender.tally.skipped.total(), sender.tally.clipped) == (2, 1, 1)


async def test_failures_are_distinguished(gateway: FakeGateway) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        number = int(request.headers["X-Request-Id"].rpartition("-")[2])
        if number == 1:
            return web.json_response({"error": {"code": "queue_full", "message": "full"}}, status=429)
        if number == 2:
            return web.Response(status=502, text="bad gateway")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"text":" a"}]}\n\n')
        if number == 3:
            await response.write(b'data: {"error":{"message":"lost","code":"instance_lost"}}\n\n')
        elif number == 4:
            await response.write(b"data: [DONE]\n\n")
        elif number == 5:
            assert request.transport is not None
            request.transport.abort()
        return response  # 6: ends without [DONE]

    gateway.answer = answer
    sender = make(gateway)
    await sender.run(iter(requests(6)))
    failed = sender.tally.failed
    lost = [reason for reason in failed if reason.startswith("connection lost")]
    assert len(lost) == 1
    assert dict(failed) == {
        "429 queue_full": 1,
        "502": 1,
        "stream ended with instance_lost": 1,
        "no usage in the stream": 1,
        "stream cut short": 1,
        lost[0]: 1,
    }
    assert sender.tally.sent == sender.tally.failed.total() == 6


async def test_a_server_that_is_not_there(gateway: FakeGateway) -> None:
    gateway.url = "http://127.0.0.1:9/v1"
    sender = make(gateway)
    await sender.run(iter(requests(3)))
    assert dict(sender.tally.failed) == {"not reached": 3}


async def test_stopping_cuts_what_is_open_and_counts_it(gateway: FakeGateway) -> None:
    gateway.hold = asyncio.Event()
    sender = make(gateway, speed=1.0)
    rows = [*requests(5, every_s=0.0), TraceRequest(3600.0, 10, 3)]
    run = asyncio.create_task(sender.run(iter(rows)))
    await gateway.has_open(5)
    sender.stop()
    await run
    assert dict(sender.tally.failed) == {"interrupted": 5}
    assert sender.tally.sent == 5
    gateway.hold.set()


async def test_a_trace_that_goes_wrong_halfway(gateway: FakeGateway) -> None:
    def rows() -> Iterator[TraceRequest]:
        yield from requests(3)
        raise TraceError(Path("trace.csv"), 5, "ContextTokens", "'x' is not a number")

    sender = make(gateway)
    with pytest.raises(TraceError):
        await sender.run(rows())
    assert sender.tally.sent == sender.tally.done == 3


async def test_usage_is_found_behind_a_long_stream(gateway: FakeGateway) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(200):
            await response.write(b"data: " + orjson.dumps({"choices": [{"text": "x" * 200}]}) + b"\n\n")
        await response.write(
            b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":200}}\n\ndata: [DONE]\n\n'
        )
        return response

    gateway.answer = answer
    sender = make(gateway)
    await sender.run(iter(requests(1)))
    (answered,) = sender.tally.answers
    assert (answered.outcome, answered.prompt_tokens, answered.output_tokens) == ("done", 7, 200)
