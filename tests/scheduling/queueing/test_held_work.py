import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.carried import first_token_s
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.queueing.held_work import (
    COOLDOWN_S,
    DUE,
    LOOK_S,
    OFF,
    PACE,
    PROMOTED_AFTER_S,
    TROUGH,
    USED,
    Held,
    HeldWork,
    Signal,
)
from scheduling.queueing.release_rule import AT_ONCE, USE, ReleaseRule

DAY_S = 24 * 3600.0


def held(number, *, model="m", arrived_s=0.0, due_s=DAY_S, service_s=10.0, tokens=100, **more):
    return Held(
        number=number, model=model, arrived_s=arrived_s, due_s=due_s, service_s=service_s, tokens=tokens, **more
    )


def manager(*requests, by=None):
    work = HeldWork()
    for model in "mn" if by else "":
        work.follow(model, ReleaseRule(by=by))
    for request in requests:
        work.hold(request)
    return work


def signal(use, region="east", *, model="m", **more):
    return Signal(
        model=model,
        region=region,
        capacity_tokens=10_000,
        sequences=100,
        interactive_tokens=round(10_000 * use),
        **more,
    )


def numbers(releases):
    return [one.number for one in releases]


@pytest.mark.parametrize(("use", "count"), [(0.7, 0), (0.6, 0), (0.55, 1), (0.5, 1), (0.49, 2)])
def test_a_region_pulls_as_sageserve_says(use, count):
    releases = manager(*map(held, range(5)), by=USE).pull([signal(use)], 0.0)
    assert [(one.number, one.priority, one.why) for one in releases] == [(n, 1, USED) for n in range(count)]


def test_a_trough_is_filled_at_once_up_to_its_room_by_tokens_and_by_sequences():
    work = manager(*(held(n, tokens=1000) for n in range(10)))
    assert [one.why for one in work.pull([signal(0.2)], 0.0)] == [TROUGH] * 4
    assert work.pull([signal(0.2, other_tokens=4000, other_requests=4)], LOOK_S) == []
    few = Signal(model="m", region="east", capacity_tokens=10**6, sequences=10, interactive_requests=3)
    assert len(work.pull([few], LOOK_S)) == 3


H100 = Profile(0.0176, 0.012, 2.07e-5, 6.2e-10, 0.00638, 1.78e-5, 3.14e-8)


def small_model(interactive, slowdown, **more):
    """A small model with much room, whose API process is the limit; its manager of a hundred lines; what runs at most."""
    work = manager(*(held(n, tokens=500) for n in range(200)))
    work.follow("m", ReleaseRule(slowdown=slowdown))
    seen = Signal(
        model="m", region="east", capacity_tokens=10**6, sequences=256, interactive_requests=interactive,
        interactive_tokens=500 * interactive, instances=1, prompt_tokens=281, output_tokens=211, profile=H100,
        front_end=FrontEnd(63.0, 18_500.0), **more,
    )  # fmt: skip
    return work, seen


@pytest.mark.parametrize("instances", [1, 4])
@pytest.mark.parametrize("slowdown", [1.0, 1.2, 1.5, 3.0])
def test_a_trough_is_filled_no_further_than_the_first_token_allows(slowdown, instances):
    work, seen = small_model(11 * instances, slowdown)
    seen = msgspec.structs.replace(
        seen, instances=instances, sequences=256 * instances, capacity_tokens=instances * 10**6
    )
    running = 11 + len(work.pull([seen], 0.0)) / instances
    allowed_s = slowdown * first_token_s(H100, seen.front_end, 11, 281, 211)
    if slowdown == 1.0:
        assert running * instances == 11 * instances + 1, "the first one always"
        return
    assert first_token_s(H100, seen.front_end, math.floor(running), 281, 211) <= allowed_s
    assert instances > 1 or first_token_s(H100, seen.front_end, running + 1, 281, 211) > allowed_s


def test_deadlines_go_before_the_slowdown_and_the_page_says_what_holds_the_rest():
    work, seen = small_model(11, 1.2, other_requests=60, other_tokens=30_000)
    assert work.pull([seen], 0.0) == []
    assert work.reason([seen], "m", 0.0) == "Held: with more, first tokens would take over 1.2 times as long"
    work.hold(held(999, due_s=50.0))
    assert [(one.number, one.why) for one in work.pull([seen], 0.0)] == [(999, DUE)]
    unknown = msgspec.structs.replace(seen, profile=None)
    assert len(work.pull([unknown], 0.0)) == 153 - 71


def test_nothing_is_added_where_requests_wait_or_use_is_above_the_mark():
    work = manager(held(1))
    assert work.pull([signal(0.1, waiting=1)], 0.0) == []
    assert work.pull([signal(0.6)], 0.0) == []


def test_a_request_larger_than_the_room_runs_alone():
    work = manager(held(1, tokens=9000), held(2))
    assert numbers(work.pull([signal(0.1)], 0.0)) == [1]
    assert work.pull([signal(0.1, other_tokens=9000, other_requests=1)], 0.0) == []


def test_the_endpoint_that_is_used_least_takes_the_backlog_of_all():
    work = manager(*(held(n, tokens=1000) for n in range(10)))
    releases = work.pull([signal(0.5), signal(0.1, "west")], 0.0)
    assert [one.region for one in releases] == ["west"] * 5 + ["east"]


def test_used_up_slack_opens_a_busy_region_with_priority():
    work = manager(held(1, due_s=100.0), held(2))
    assert work.pull([signal(0.95)], 39.0) == []
    (release,) = work.pull([signal(0.95), signal(0.9, "west"), Signal(model="m", region="north")], 40.0)
    assert (release.number, release.priority, release.why, release.region) == (1, 0, DUE, "west")


def test_scaling_closes_the_gate_for_a_while_but_not_for_work_without_slack():
    work = manager(held(1, due_s=70.0), held(2))
    work.scaled("m", "east", 0.0)
    assert work.pull([signal(0.1)], 1.0) == []
    assert work.reason([signal(0.1)], "m", 1.0) == "Held 15 s: cooldown after scaling"
    assert numbers(work.pull([signal(0.1)], COOLDOWN_S - 1)) == [1]
    assert numbers(work.pull([signal(0.1)], COOLDOWN_S)) == [2]


def test_opportunistic_work_is_last_and_alone_where_instances_are_lent():
    work = manager(held(1, opportunistic=True, due_s=50.0), held(2), held(3, opportunistic=True, due_s=50.0))
    assert work.pull([signal(0.9)], 100.0) == [], "no deadline releases it"
    assert numbers(work.pull([signal(0.9, "spot", spot=True)], 100.0)) == []
    assert numbers(work.pull([signal(0.0, "spot", spot=True, other_requests=1, other_tokens=5900)], 0.0)) == [1]
    assert numbers(work.pull([signal(0.1)], 0.0)) == [2, 3]


def test_deadlines_set_the_pace_once_they_need_much_of_the_room():
    """Four hundred requests of 100 s each in 1000 s need forty at once of the fifty that fit."""
    due_s = 1060.0
    work = manager(*(held(n, due_s=due_s, service_s=100.0, tokens=100) for n in range(400)))
    busy = signal(0.7, other_requests=20, other_tokens=2000)
    releases = work.pull([busy, signal(0.8, "west")], 20.0)
    assert {(one.why, one.priority) for one in releases} == {(PACE, 1)}
    # 40,000 s of work in 940 s (deadlines count in steps of a minute) are 43 at once, of which twenty run.
    assert [one.region for one in releases] == ["west"] * 20 + ["east"] * 3
    few = manager(*(held(n, due_s=due_s, service_s=100.0, tokens=100) for n in range(40)))
    assert few.pull([busy], 20.0) == [], "a later trough is in time"


def test_announced_work_counts_for_the_pace():
    work = manager(*(held(n, due_s=1060.0, service_s=100.0) for n in range(40)))
    work.expect("m", [(1060.0, 360)])
    assert len(work.pull([signal(0.7)], 20.0)) == 30
    assert work.expected("m") == 360


def test_requests_are_given_up_at_their_end_and_withdrawn_ones_are_forgotten():
    work = manager(held(1, expires_s=10.0), held(2, expires_s=20.0), by=USE)
    assert work.drop(2)
    assert not work.drop(2)
    assert work.expired(10.0) == []
    assert work.expired(20.5) == [1]
    assert len(work) == 0


def test_another_rule_holds_for_what_is_held_already():
    work = manager(held(1, due_s=9000), held(2, arrived_s=1.0, due_s=5000))
    work.follow("m", ReleaseRule(by=USE))
    assert numbers(work.first("m", 9)) == [1, 2]
    assert numbers(work.pull([signal(0.55)], 2.0)) == [1]
    work.follow("m", ReleaseRule(by=AT_ONCE))
    assert [one.why for one in work.pull([signal(0.99)], 2.0)] == [OFF]


def test_the_reason_names_use_and_mark():
    work = manager(held(1))
    assert work.reason([signal(0.72), signal(0.8, "west")], "m", 0.0) == "Held: use 72%, releases below 60%"
    assert work.reason([], "m", 0.0) == "Held: no instance of its model takes work"


def test_the_wait_is_by_the_pace_of_releases_and_at_most_the_slack():
    work = manager(*(held(n, due_s=1000.0, tokens=1000) for n in range(9)), by=USE)
    for at_s in (10.0, 20.0, 30.0):
        work.pull([signal(0.55)], at_s)
    assert work.wait_s(held(8), 2, 30.0) == (2 * 20.0 / 3, None)
    work.follow("m", ReleaseRule())
    assert work.wait_s(held(8, due_s=95.0), 9, 30.0) == (5.0, 5.0)


@given(st.data())
def test_each_request_leaves_once_and_in_the_order_of_a_plain_list(data):
    """Compare with a list that is sorted at each pull."""
    by = data.draw(st.sampled_from([USE, "slack"]))
    work, plain, now_s, seen = manager(by=by), {}, 0.0, []
    for number in range(data.draw(st.integers(0, 30))):
        now_s += data.draw(st.floats(0, 2000))
        request = held(
            number,
            model=data.draw(st.sampled_from("mn")),
            arrived_s=now_s,
            due_s=data.draw(st.sampled_from([math.inf, now_s + 100, now_s + 5000])),
            service_s=data.draw(st.floats(0, 1000)),
            tokens=data.draw(st.integers(1, 3000)),
            regions=data.draw(st.sampled_from([(), ("east",), ("west", "north"), ("east", "west")])),
            opportunistic=data.draw(st.booleans()),
        )
        work.hold(request)
        plain[number] = request
        if data.draw(st.booleans()):
            dropped = data.draw(st.integers(0, number))
            assert work.drop(dropped) == (plain.pop(dropped, None) is not None)
        one = signal(
            data.draw(st.floats(0, 1.2)),
            data.draw(st.sampled_from(["east", "west"])),
            model=data.draw(st.sampled_from("mn")),
        )
        releases = work.pull([one], now_s)
        fitting = sorted(
            (
                each
                for each in plain.values()
                if each.model == one.model and one.region in (each.regions or [one.region])
            ),
            key=lambda each: (
                each.opportunistic,
                each.arrived_s if by == USE or each.opportunistic else each.start_by_s,
                each.number,
            ),
        )
        assert numbers(releases) == numbers(fitting[: len(releases)])
        for release in releases:
            request = plain.pop(release.number)
            assert release.priority == int(release.why != DUE and now_s - request.arrived_s < PROMOTED_AFTER_S)
            assert release.why != DUE or request.start_by_s <= now_s
        if by != USE:
            assert not any(each.start_by_s <= now_s for each in fitting[len(releases) :] if not each.opportunistic)
        seen += numbers(releases)
        assert len(work) == len(plain) == sum(work.waiting.values())
    assert len(seen) == len(set(seen))
    for model in "mn":
        assert not plain or work._backlogs[model].requests == sum(
            one.model == model and not one.opportunistic and one.due_s < math.inf for one in plain.values()
        )


def test_what_is_due_counts_held_and_announced_work_by_deadline():
    work = HeldWork()
    for number, (due_s, opportunistic) in enumerate([(100.0, False), (110.0, False), (7200.0, False), (100.0, True)]):
        work.hold(
            Held(
                number=number, model="m", arrived_s=0.0, due_s=due_s, service_s=5.0, tokens=300,
                opportunistic=opportunistic,
            )
        )  # fmt: skip
    work.expect("m", [(3600.0, 10)])
    assert sorted(work.due("m")) == [(60.0, 600.0), (3600.0, 3000.0), (7200.0, 300.0)]
    work.drop(0)
    assert sorted(work.due("m"))[0] == (60.0, 300.0)
