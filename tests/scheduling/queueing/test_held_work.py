import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.held_work import (
    COOLDOWN_S,
    FAITHFUL,
    ONE_BELOW,
    PROMOTED_AFTER_S,
    SLACK,
    TROUGH,
    Held,
    HeldWork,
    Signal,
)

DAY_S = 24 * 3600.0


def held(number, *, model="m", arrived_s=0.0, due_s=DAY_S, service_s=10.0, region=""):
    return Held(number, model, arrived_s, due_s, service_s, region)


def manager(*requests, faithful=False):
    work = HeldWork(faithful=faithful)
    for request in requests:
        work.hold(request)
    return work


@pytest.mark.parametrize(("use", "count"), [(0.7, 0), (0.6, 0), (0.55, 1), (0.5, 1), (0.49, 2)])
def test_a_region_pulls_as_sageserve_says(use, count):
    work = manager(*map(held, range(5)), faithful=True)
    releases = work.pull(Signal("m", "east", use, room=100), 0.0)
    assert [(one.number, one.priority, one.rule) for one in releases] == [(n, 1, FAITHFUL) for n in range(count)]


def test_a_trough_is_filled_at_once_up_to_its_room():
    work = manager(*map(held, range(10)))
    rules = [one.rule for one in work.pull(Signal("m", "east", 0.2, room=6), 0.0)]
    assert rules == [FAITHFUL] * 2 + [TROUGH] * 4
    assert work.pull(Signal("m", "east", ONE_BELOW, room=6), 0.0) == []


def test_what_must_start_first_leaves_first_whatever_the_order_of_arrival():
    work = manager(held(1, due_s=9000), held(2, due_s=5000), held(3, due_s=7000, service_s=3000))
    numbers = [one.number for one in work.pull(Signal("m", "east", 0.1, room=3), 0.0)]
    assert numbers == [3, 2, 1]


def test_used_up_slack_opens_a_busy_region_with_priority():
    work = manager(held(1, due_s=100.0, service_s=10.0), held(2))
    assert work.pull(Signal("m", "east", 0.95), 39.0) == []
    (release,) = work.pull(Signal("m", "east", 0.95), 40.0)
    assert (release.number, release.priority, release.rule) == (1, 0, SLACK)


def test_old_work_is_released_as_interactive():
    work = manager(held(1), held(2, arrived_s=1.0), faithful=True)
    releases = work.pull(Signal("m", "east", 0.1), PROMOTED_AFTER_S)
    assert [one.priority for one in releases] == [0, 1]


def test_scaling_closes_the_gate_for_a_while_but_not_for_work_without_slack():
    work = manager(held(1, due_s=70.0), held(2))
    work.scaled("m", "east", 0.0)
    assert work.pull(Signal("m", "east", 0.1, room=9), 1.0) == []
    assert len(work.pull(Signal("m", "east", 0.1, room=9), COOLDOWN_S - 1)) == 1
    assert len(work.pull(Signal("m", "east", 0.1, room=9), COOLDOWN_S)) == 1


def test_a_region_bound_request_waits_for_its_region():
    work = manager(held(1, region="west"), held(2))
    assert [one.number for one in work.pull(Signal("m", "east", 0.1), 0.0)] == [2]
    assert [one.number for one in work.pull(Signal("m", "west", 0.1), 0.0)] == [1]


@given(st.data())
def test_each_request_leaves_once_and_in_the_order_of_a_plain_list(data):
    """Against a list that is sorted at each pull."""
    faithful = data.draw(st.booleans())
    work, plain, now_s, seen = HeldWork(faithful=faithful), {}, 0.0, []
    for number in range(data.draw(st.integers(0, 30))):
        now_s += data.draw(st.floats(0, 2000))
        request = Held(
            number,
            data.draw(st.sampled_from("mn")),
            now_s,
            data.draw(st.sampled_from([math.inf, now_s + 100, now_s + 5000])),
            data.draw(st.floats(0, 1000)),
            data.draw(st.sampled_from(["", "east", "west"])),
        )
        work.hold(request)
        plain[number] = request
        if data.draw(st.booleans()):
            dropped = data.draw(st.integers(0, number))
            assert work.drop(dropped) == (plain.pop(dropped, None) is not None)
        signal = Signal(
            data.draw(st.sampled_from("mn")),
            data.draw(st.sampled_from(["east", "west"])),
            data.draw(st.floats(0, 1.2)),
            data.draw(st.integers(0, 4)),
        )
        releases = work.pull(signal, now_s)
        fitting = sorted(
            (one for one in plain.values() if one.model == signal.model and one.region in ("", signal.region)),
            key=lambda one: (one.arrived_s if faithful else one.start_by_s, one.number),
        )
        assert [one.number for one in releases] == [one.number for one in fitting[: len(releases)]]
        for release in releases:
            request = plain.pop(release.number)
            assert release.priority == int(release.rule != SLACK and now_s - request.arrived_s < PROMOTED_AFTER_S)
            assert release.rule != SLACK or request.start_by_s <= now_s
        seen += [one.number for one in releases]
        assert len(work) == len(plain)
    assert len(seen) == len(set(seen))
