"""Unit tests of the gateway's parts."""

import asyncio
import itertools
import math
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch.monitoring.windows import Count, Latency, Windows
from controlplane.dispatch.port import Asked
from controlplane.gateway.admission import pace
from controlplane.gateway.admission.pace import LoopLoad, Pace
from controlplane.gateway.ledger.entry import Row
from controlplane.gateway.ledger.writer import minute_sums
from controlplane.gateway.progress import MOVES, IllegalMove, Progress, RequestState
from controlplane.gateway.upstream.bodies import upstream_priority
from scheduling.queueing.ordering import ORDERINGS, queue_key
from tests.gateway.rows import ledger_row


class TestStates:
    def test_every_move(self):
        asked = Asked(0, "r", "m", "east", 1, 0, None, 0.0, 0.0, 1, 1, None, 1, True)
        for before, after in itertools.product(RequestState, RequestState):
            progress = Progress(asked=asked, grant=None, terms=None, call=None, state=before)
            if after in MOVES.get(before, ()):
                progress.move(after)
                assert progress.state is after
            else:
                refused = f"{before.name.lower()} cannot become {after.name.lower()}"
                with pytest.raises(IllegalMove, match=refused):
                    progress.move(after)
                assert progress.state is before


def test_upstream_priority_stays_in_its_band():
    for ordering in (ORDERINGS["fcfs"], ORDERINGS["priority"]):
        assert upstream_priority(ordering, -1, 0, 1e9) == -1000
        assert upstream_priority(ordering, 2, 10**9, 1e9) == 2499
        assert upstream_priority(ordering, 2, -5, 1e9) == 2000


@given(
    st.sampled_from(["ssjf", "deadline", "slack"]),
    st.lists(st.tuples(st.integers(-40, 40), st.integers(1_000_000, 2_000_000), st.integers(0, 10**5)), min_size=2),
)
def test_upstream_priority_is_the_key_where_keys_are_more_than_classes(ordering, requests):
    code = ORDERINGS[ordering]
    keys = [
        queue_key(code, came / 8, came / 8 + length / 8, priority, length / 16, 2.0)
        for priority, came, length in requests
    ]
    sent = [upstream_priority(code, row[0], 0, key) for row, key in zip(requests, keys, strict=True)]
    order = sorted(range(len(keys)), key=lambda at: (keys[at], at))
    assert order == sorted(range(len(sent)), key=lambda at: (sent[at], at))
    assert all(-(2**63) <= each < 2**63 for each in sent)
    stepped_back = [upstream_priority(code, row[0], 499, key) for row, key in zip(requests, keys, strict=True)]
    assert stepped_back == [each + 499_000 for each in sent]


class TestWindows:
    def test_rates_and_totals_slide(self):
        windows = Windows()
        group = windows.group("fleet")
        for second in range(20):
            windows.advance(1000 + second)
            windows.count((group,), Count.REQUESTS, 3)
        windows.advance(1020)
        assert windows.rate(group, Count.REQUESTS, 10) == 3.0
        assert windows.total(group, Count.REQUESTS, 300) == 60
        windows.advance(1400)
        assert windows.total(group, Count.REQUESTS, 300) == 0

    def test_percentiles_are_within_a_bucket(self):
        windows, seeded = Windows(), random.Random(7)
        group = windows.group("m")
        windows.advance(5.0)
        values = [math.exp(seeded.gauss(5, 1)) for _ in range(4000)]
        for value in values:
            windows.latency((group,), Latency.TTFT, value)
        for percent, quantile in zip((50, 95, 99), windows.percentiles(group, Latency.TTFT, (50, 95, 99)), strict=True):
            assert quantile == pytest.approx(np.percentile(values, percent), rel=0.05)
        windows.advance(70.0)
        assert windows.percentiles(group, Latency.TTFT, (50,)) == [None]

    @given(
        st.lists(st.tuples(st.sampled_from([0, 1, 2, 59, 60, 70]), st.integers(0, 2), st.integers(1, 999)), max_size=40)
    )
    def test_percentiles_are_of_the_last_minute_alone(self, recorded):
        windows, now_s, values = Windows(), 1000, []
        sets = [tuple(map(windows.group, names)) for names in (("fleet", "a"), ("fleet", "b"), ("fleet",))]
        for later_s, chosen, value in recorded:
            now_s += later_s
            windows.advance(now_s)
            windows.latency(sets[chosen], Latency.ITL, value)
            values.append((now_s, sets[chosen], value))
            fresh = Windows()
            fresh.advance(now_s)
            for at_s, groups, value_ms in values:
                if at_s > now_s - 60:
                    fresh.latency(groups, Latency.ITL, value_ms)
            for group in range(3):
                asked = group, Latency.ITL, (1, 50, 99)
                assert windows.percentiles(*asked) == fresh.percentiles(*asked)

    def test_an_instance_takes_memory_while_it_answers(self):
        windows = Windows()
        fleet, *instances = (windows.group(f"{number}") for number in range(1001))
        windows.advance(1.0)
        for instance in instances[:10]:
            windows.count((fleet,), Count.FAILED)
            windows.latency((fleet, instance), Latency.TTFT, 9.0)
        windows.advance(2.0)
        assert len(pickle.dumps(windows)) < 11 * 4096 + 7000 + 20 * 1000
        assert windows.total(fleet, Count.FAILED, 10) == 10
        assert windows.total(instances[-1], Count.FAILED, 10) == 0
        windows.advance(62.0)
        assert len(pickle.dumps(windows)) < 7000 + 20 * 1000


def entry(**changes) -> Row:
    values = {
        "arrived_at": 120.5,
        "model": "m",
        "region": "east",
        "own_region": "",
        "slo_class": "i",
        "outcome": "done",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "slo_met": True,
    }
    return ledger_row(**(values | changes))


def test_minute_sums():
    sums = minute_sums(
        [
            *(entry(), entry(arrived_at=180.0, slo_met=None)),
            *(entry(outcome=outcome, slo_met=False, output_tokens=0) for outcome in ("failed", "rejected")),
        ]
    )
    assert sums[120.0, "m", "east", "", "i"] == {
        "requests": 3,
        "failed": 1,
        "refused": 1,
        "slo_met": 1,
        "slo_judged": 3,
        "prompt_tokens": 30,
        "output_tokens": 5,
    }
    assert sums[180.0, "m", "east", "", "i"]["slo_judged"] == 0


async def test_pace_lets_a_few_begin_in_each_iteration_and_all_in_order():
    pace, begun, begun_by_iteration = Pace(most=3), [], []

    async def request(index: int) -> None:
        entry = pace.enter()
        if entry is not None:
            await entry
        begun.append(index)

    tasks = [asyncio.create_task(request(index)) for index in range(20)]
    tasks[7].cancel()  # before it has begun at all
    while len(begun) < 19:
        before = len(begun)
        await asyncio.sleep(0)
        begun_by_iteration.append(len(begun) - before)
    assert begun == [index for index in range(20) if index != 7]
    assert max(begun_by_iteration) <= 3
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pace.enter() is None


def test_the_load_of_the_loop_follows_the_time_that_it_computes(monkeypatch):
    """A tenth of a second of hard work is forgotten, two seconds of it are not; nor does it stay busy."""
    clock = SimpleNamespace(now_s=100.0, computed_s=7.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: clock.computed_s)
    monkeypatch.setattr(pace, "time", fake)
    load = LoopLoad()
    load.tick()
    assert load.share == 0.0

    def pass_s(seconds: float, share: float) -> None:
        for _ in range(round(seconds / 0.1)):
            clock.now_s, clock.computed_s = clock.now_s + 0.1, clock.computed_s + 0.1 * share
            load.tick()

    for seconds, share, busy in (
        (5.0, 0.5, False),
        (0.1, 1.0, False),
        (5.0, 0.5, False),
        (2.0, 1.0, True),
        (2.0, 0.1, False),
    ):
        pass_s(seconds, share)
        assert (load.share > 0.6) is busy
    pass_s(20.0, 0.25)
    assert load.share == pytest.approx(0.25, abs=1e-6)
