"""What the dispatcher says that a request will wait, where it is written, and what it learns from what then happened."""

import asyncio

import pytest

from tests.gateway.conftest import until

pytestmark = pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 2, "queue_bound": 4}])


async def fill(served, requests: int) -> list[asyncio.Task]:
    """Return *requests* calls; those that do not run wait."""
    dispatcher, tasks = served.gateway.dispatching.dispatcher, []
    for number in range(requests):
        tasks.append(asyncio.create_task(served.chat(max_tokens=50)))
        await until(lambda came=number + 1: len(dispatcher.queue) + served.backends[0].running == came)
    return tasks


async def warm(served, times: int = 2) -> None:
    for _ in range(times):
        (await served.chat()).release()


async def test_answers_say_where_they_waited_and_how_long_was_expected(served):
    await warm(served)
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 4)
    backend.script.hold.set()
    answers = [await task for task in tasks]
    assert [answer.headers["X-Queue-Position"] for answer in answers] == ["0", "0", "1", "2"]
    estimated = [float(answer.headers["X-Estimated-Wait-S"]) for answer in answers]
    assert estimated[:2] == [0.0, 0.0]
    assert 0 < estimated[2] <= estimated[3]
    rows = await served.rows()
    rows = sorted(rows[2:], key=lambda row: row.arrived_at)
    assert [row.queue_position for row in rows] == [0, 0, 1, 2]
    assert [row.estimated_wait_s for row in rows] == pytest.approx(estimated, abs=1e-3)
    assert all(row.estimated_wait_p99_s >= row.estimated_wait_s for row in rows)


async def test_a_stream_says_it_too_and_a_full_queue_says_it_in_its_refusal(served):
    await warm(served)
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 6)
    refused = await served.chat()
    assert refused.status == 429
    wait_s = (await refused.json())["error"]["estimated_wait_s"]
    assert wait_s > 0
    assert float(refused.headers["X-Estimated-Wait-S"]) == pytest.approx(wait_s, abs=1e-3)
    assert float(refused.headers["Retry-After"]) >= 1
    backend.script.hold.set()
    for task in tasks:
        (await task).release()
    stream = await served.chat(stream=True)
    assert stream.headers["X-Queue-Position"] == "0"
    stream.release()
    rows = await served.rows()
    (row,) = [row for row in rows if row.status_code == 429]
    assert row.queue_position is None
    assert row.estimated_wait_s is None


async def test_nothing_is_said_before_anything_is_known(served):
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 3)
    backend.script.hold.set()
    answers = [await task for task in tasks]
    assert answers[2].headers["X-Queue-Position"] == "1"
    assert "X-Estimated-Wait-S" not in answers[2].headers
    (*_, row) = sorted(await served.rows(), key=lambda row: row.arrived_at)
    assert (row.queue_position, row.estimated_wait_s) == (1, None)


async def test_nothing_is_learned_from_waits_before_lengths_are_known(served):
    """Answers count with 256 tokens at first, but have three: their waits would suggest eighty times the speed."""
    backend = served.backends[0]
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 6)
    backend.script.hold.set()
    for task in tasks:
        (await task).release()
    assert served.gateway.dispatching.dispatcher.waits.control.correction(endpoint.index, "").batches == 0
