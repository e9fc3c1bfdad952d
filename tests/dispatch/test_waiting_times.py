"""What the dispatcher says that a request will wait, where it is written, and what it learns from what then happened."""

import asyncio

import pytest

from scheduling.control.waits import ENOUGH_BATCHES
from tests.gateway.conftest import until

pytestmark = pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 2, "queue_bound": 4}])


async def fill(served, requests: int) -> list[asyncio.Task]:
    """Return *requests* calls; those that do not run wait."""
    dispatcher, tasks = served.gateway.dispatcher, []
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
    (endpoint,) = served.gateway.topology.endpoints
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 6)
    backend.script.hold.set()
    for task in tasks:
        (await task).release()
    assert served.gateway.dispatcher.waits.control.correction(endpoint.index, "").batches == 0


async def test_actual_waits_correct_later_estimates(served):
    """Without a measured profile the usual one estimates some seconds, but the actual wait is far shorter."""
    await warm(served, 20)
    backend, dispatcher = served.backends[0], served.gateway.dispatcher
    (endpoint,) = served.gateway.topology.endpoints
    for _ in range(6):
        backend.script.hold = asyncio.Event()
        tasks = await fill(served, 6)
        backend.script.hold.set()
        for task in tasks:
            (await task).release()
    correction = dispatcher.waits.control.correction(endpoint.index, "interactive")
    assert correction.batches > ENOUGH_BATCHES
    assert correction.factor < 0.8
    history = dispatcher.waits.control.history.lengths(("m", "interactive"))
    assert history.output_mean == pytest.approx(3.0)


async def test_where_memory_limits_the_batch_a_request_counts_by_what_its_prompt_holds(served):
    await warm(served)
    topology, times = served.gateway.topology, served.gateway.dispatcher.waits.control
    (endpoint,) = topology.endpoints
    (replica,) = topology.members(endpoint)
    assert times.weight(endpoint.index, 10_000) == 1.0  # two sequences are all that it runs
    topology.fleet.kv_capacity_tokens[replica.slot] = 1
    known = times.history.lengths((endpoint.model, ""))
    times._paces.clear()  # what was read lately counts no longer
    assert times.weight(endpoint.index, 10_000) == known.weight(10_000.0) > 1.0
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    tasks = await fill(served, 3)
    (waiting,) = served.gateway.dispatcher.queue.in_order(endpoint, 1)
    weight = known.weight(float(waiting.asked.prompt_tokens))
    mean, variance, error = times.history.expected(
        (endpoint.model, waiting.asked.slo_class), float(waiting.predicted_tokens)
    )
    mean = min(mean, float(waiting.asked.max_tokens))
    assert times._expected[waiting.slot].tolist() == pytest.approx(
        [weight * mean, weight**2 * variance, weight * error]
    )
    backend.script.hold.set()
    for task in tasks:
        (await task).release()
