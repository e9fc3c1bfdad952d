"""Every strategy: bounds, cooldown, words; then each by its own rules."""

from itertools import pairwise
from math import inf, isfinite, nan, pi, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.scaling import STRATEGIES, Advice, Floored, make_strategy
from scheduling.scaling.endpoint import GRACE_S, sources
from tests.scheduling.scaling.views import advice, advices, view, views

"""Those that take up a plan whatever was changed a moment ago: once a plan, so that is no flapping."""


def only(name, one, given_advice=None, now_s=100.0, **parameters):
    """Return the move of strategy *name* at one endpoint: the number of instances, and the reason."""
    moves = make_strategy(name, parameters).decide(now_s, [one], [given_advice])
    return (moves[0].delta, moves[0].reason) if moves else (0, "")


# Whatever the strategy


@given(
    st.sampled_from(list(STRATEGIES)),
    st.booleans(),
    st.lists(st.tuples(views, advices), max_size=5),
    st.floats(0, 9000),
)
def test_never_beyond_the_bounds_and_always_with_a_sentence(name, floored, seen, now_s):
    strategy = Floored(make_strategy(name)) if floored else make_strategy(name)
    moves = strategy.decide(now_s, [one for one, _ in seen], [each for _, each in seen])
    assert len({each.endpoint for each in moves}) == len(moves)
    for each in moves:
        one = seen[each.endpoint][0]
        assert each.delta != 0
        if each.delta > 0:
            assert one.instances + each.delta <= one.max_instances
        else:
            assert one.instances + each.delta >= one.min_instances
            assert each.drains <= max(0, one.ready - one.min_instances)
            assert -each.delta <= one.coming + each.drains
        assert each.reason.endswith(".")
        assert any(letter.isdigit() for letter in each.reason)
        assert len(each.reason) <= 255
        assert "nan" not in each.reason


@given(st.sampled_from(list(STRATEGIES)), views, advices, st.floats(0, 9000))
def test_a_new_strategy_decides_alike(name, one, advised, now_s):
    first, second = (make_strategy(name).decide(now_s, [one], [advised]) for _ in range(2))
    assert first == second


@given(st.sampled_from(["siloed", "reactive", "lt_u", "lt_ua"]), views, advices, st.floats(0, 9000))
def test_no_change_within_the_cooldown(name, one, advised, now_s):
    within = one.since_change_s < 15 and one.min_instances <= one.instances <= one.max_instances
    if within:
        assert only(name, one, advised, now_s) == (0, "")


@given(
    st.sampled_from(list(STRATEGIES)),
    st.lists(st.tuples(st.floats(0, 1.5), st.integers(0, 9)), min_size=2, max_size=40),
)
def test_no_plan_is_followed_up_and_down_at_a_standstill(name, course):
    """With constant advice and load, no strategy alternates between out and in."""
    use, target = course[0]
    strategy, instances, since, signs = make_strategy(name), 6, inf, []
    for tick in range(60):
        now_s = tick * 15.0
        one = view(ready=instances, use=use * 6 / instances, kv_use=use, since_change_s=since, tokens_per_s=use * 1000)
        moves = strategy.decide(now_s, [one], [advice(target, forecast=use * 1000)])
        since += 15
        if moves:
            instances, since = instances + moves[0].delta, 15.0
            signs.append(moves[0].delta > 0)
    changes = sum(a != b for a, b in pairwise(signs))
    assert changes <= 1, (signs, instances)


@given(
    st.sampled_from([name for name in STRATEGIES if name not in ("siloed", "reactive", "preserve")]),
    views,
    st.floats(0, 9000),
)
def test_without_a_valid_plan_it_is_the_reactive_heuristic(name, one, now_s):
    one = one._replace(short_instances=0)  # what no order keeps in time is asked for by ours, plan or not
    own = make_strategy(name)
    reactive = make_strategy("reactive", {"out_above": own.out_above, "in_below": own.in_below})
    stale = Advice(9, 1.0, 0.0, now_s - 1)
    expected = [(each.endpoint, each.delta) for each in reactive.decide(now_s, [one], [None])]
    for given_advice in (None, stale):
        moves = own.decide(now_s, [one], [given_advice])
        assert [(each.endpoint, each.delta) for each in moves] == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_endpoint_goes_back_within_its_bounds(name):
    assert only(name, view(ready=1, min_instances=3), advice(1))[0] == 2
    assert only(name, view(ready=12, max_instances=7, use=0.9), advice(20))[0] == -5


# The reactive heuristic


@pytest.mark.parametrize(("use", "delta"), [(0.0, -1), (0.299, -1), (0.3, 0), (0.7, 0), (0.701, 1), (5.0, 1), (inf, 1)])
@pytest.mark.parametrize("name", ["siloed", "reactive"])
def test_seventy_and_thirty(name, use, delta):
    assert only(name, view(use=use), patience_s=0)[0] == delta


class TestPatience:
    """Of the heuristic, where it decides alone."""

    QUIET = view(use=0.1)

    def decide(self, strategy, now_s, **changes):
        return [each.delta for each in strategy.decide(now_s, [self.QUIET._replace(**changes)], [None])]

    def test_use_is_low_for_a_minute_before_one_goes(self):
        strategy = make_strategy("reactive")
        assert self.decide(strategy, 0.0) == []
        assert self.decide(strategy, 59.0) == []
        (move,) = strategy.decide(60.0, [self.QUIET], [None])
        assert move.reason == "Use is 10%, below 30% for 60 s: 4 → 3 instances, lent out as spot once drained."

    @pytest.mark.parametrize("changes", [{"use": 0.3}, {"waiting": 1}])
    def test_the_minute_starts_again_when_it_is_not(self, changes):
        strategy = make_strategy("reactive")
        assert self.decide(strategy, 0.0) == []
        assert self.decide(strategy, 30.0, **changes) == []
        assert self.decide(strategy, 60.0) == []
        assert self.decide(strategy, 120.0) == [-1]

    @pytest.mark.parametrize("changes", [{"coming": 1}, {"draining": 1}, {"since_change_s": 59.0}])
    def test_nothing_goes_while_something_changes(self, changes):
        strategy = make_strategy("reactive")
        assert self.decide(strategy, 0.0) == []
        assert self.decide(strategy, 60.0, **changes) == []

    def test_the_others_must_have_room_for_what_runs_there(self):
        strategy = make_strategy("reactive", {"in_below": 0.6})
        assert self.decide(strategy, 0.0, ready=2, use=0.4, min_instances=1) == []
        assert self.decide(strategy, 60.0, ready=2, use=0.4, min_instances=1) == []
        assert self.decide(strategy, 75.0, ready=2, use=0.35, min_instances=1) == [-1]

    @pytest.mark.parametrize(("use", "ready", "delta"), [(0.75, 4, []), (0.9, 4, [1]), (inf, 0, [])])
    def test_starting_instances_may_suffice(self, use, ready, delta):
        assert self.decide(make_strategy("reactive"), 0.0, use=use, ready=ready, coming=1, min_instances=0) == delta


def test_it_says_what_it_saw_and_where_from():
    assert only("reactive", view(use=0.82, waiting=3, spot=1)) == (
        1,
        "Use is 82% with 3 waiting, above 70%: 4 → 5 instances, from own spot.",
    )
    assert only("reactive", view(use=0.1), patience_s=0)[1] == (
        "Use is 10%, below 30%: 4 → 3 instances, lent out as spot once drained."
    )
    assert only("lt_u", view(use=0.75, spot=0), advice(6))[1] == (
        "Use is 75%, above 70%, and the plan targets 6 at a forecast of 1,000 tok/s:"
        " 4 → 5 instances, from other models' spot."
    )


# Long-term strategies


def test_lt_i_goes_to_the_plan_at_once_and_once():
    strategy = make_strategy("lt_i")
    assert [each.delta for each in strategy.decide(10.0, [view()], [advice(9)])] == [5]
    assert strategy.decide(25.0, [view(ready=3, use=0.1)], [advice(9)]) == []
    assert [each.delta for each in strategy.decide(40.0, [view()], [advice(2, made=30.0)])] == [-2]


@given(views, st.integers(0, 20))
def test_lt_u_moves_towards_the_plan_only_and_by_use_only(one, target):
    delta, _ = only("lt_u", one, advice(target))
    reactive, _ = only("reactive", one, patience_s=0)
    if one.min_instances <= one.instances <= one.max_instances:
        assert delta in (0, reactive)
        assert delta == (reactive if reactive * (target - one.instances) > 0 else 0)


@pytest.mark.parametrize(
    ("seen", "left_s", "ready", "delta"),
    [
        (5000.0, 1200.0, 4, 1),
        (4999.0, 1200.0, 4, 0),
        (5000.0, 1200.1, 4, 0),
        (5000.0, 0.0, 5, 1),
        (5000.0, 600.0, 3, 0),  # the plan is not reached yet: use decides
        (500.0, 1200.0, 4, -1),
        (501.0, 1200.0, 4, 0),
        (500.0, 1200.1, 4, 0),
        (500.0, 600.0, 3, -1),
        (500.0, 600.0, 5, 0),
        (0.0, 600.0, 4, -1),
    ],
)
def test_lt_ua_acts_on_the_gap_at_five_times_and_at_half_in_the_last_twenty_minutes(seen, left_s, ready, delta):
    one = view(ready=ready, tokens_per_s=seen, use=0.4)
    change, why = only("lt_ua", one, advice(4), now_s=3600.0 - left_s)
    assert change == delta
    assert ("1,000 forecast" in why) == bool(delta)


def test_lt_ua_with_a_forecast_of_nothing():
    assert only("lt_ua", view(tokens_per_s=1.0), advice(4, forecast=0.0), now_s=3000.0)[0] == 1
    assert only("lt_ua", view(tokens_per_s=0.0), advice(4, forecast=0.0), now_s=3000.0)[0] == -1


@given(views, st.integers(0, 20), st.floats(0, 2399))
def test_lt_ua_is_lt_u_before_the_last_twenty_minutes(one, target, now_s):
    assert only("lt_ua", one, advice(target), now_s) == only("lt_u", one, advice(target), now_s)


@pytest.mark.parametrize(("until_s", "next_plan_s"), [(600.0, 60.0), (60.0, None)])
def test_lt_ua_of_a_short_decision_window_acts_on_the_gap_in_its_last_third(until_s, next_plan_s):
    """Otherwise plans made every minute would always be in their last 20 minutes."""
    short = advice(4, until=until_s, next_plan_s=next_plan_s)
    one = view(ready=4, tokens_per_s=100.0, use=0.4)
    assert only("lt_ua", one, short, now_s=39.0)[0] == 0
    assert only("lt_ua", one, short, now_s=41.0)[0] == -1


@given(views, st.integers(0, 20), st.floats(0, 1200))
def test_use_does_not_undo_what_lt_ua_does_about_the_gap(one, target, left_s):
    """Unless demand changes: with the same load on the instances after the move, the next tick moves none."""
    plan, now_s = advice(target), 3600.0 - left_s
    delta, _ = only("lt_ua", one, plan, now_s)
    if not delta or only("lt_u", one, plan, now_s)[0]:
        return
    use = one.use * one.ready / (one.ready + delta) if isfinite(one.use) and one.ready + delta > 0 else one.use
    after = one._replace(ready=one.ready + delta, use=use)
    assert delta * only("lt_u", after, plan, now_s)[0] >= 0


@pytest.mark.parametrize("name", ["lt_u", "lt_ua"])
def test_at_the_demos_pace_instances_follow_the_day_and_do_not_flap(name):
    """A day of eight minutes, plans every minute for the next ten, whose peak is always the same: two instances."""
    strategy, each, instances, changed_s, moves = make_strategy(name), 1000.0, 2, -inf, []
    for now_s in range(0, 4 * 480, 15):
        demand = each * (1.1 + 0.6 * sin(2 * pi * now_s / 480))
        made_s = now_s // 60 * 60.0
        plan = Advice(2, 1.7 * each, made_s, made_s + 600.0, next_plan_s=made_s + 60.0)
        one = view(
            ready=instances, min_instances=1, tokens_per_s=demand, use=demand / (0.8 * each * instances),
            since_change_s=now_s - changed_s,
        )  # fmt: skip
        for made in strategy.decide(float(now_s), [one], [plan]):
            instances, changed_s = instances + made.delta, now_s
            moves.append((now_s, made.delta))
    assert len(moves) <= 2 * 4  # one in and one out a day at most
    assert all(later - earlier >= 60 for (earlier, _), (later, _) in pairwise(moves))


# PreServe and what it is compared with


def test_proactive_follows_the_window_and_nothing_else():
    assert only("proactive", view(use=0.95), advice(4))[0] == 0
    assert only("proactive", view(use=0.95), advice(3))[0] == -1
    assert only("proactive", view(), advice(6))[0] == 2


def test_hybrid_adds_the_marks_between_windows():
    strategy = make_strategy("hybrid")
    assert [each.delta for each in strategy.decide(0.0, [view(use=0.9)], [advice(6)])] == [2]
    assert [each.delta for each in strategy.decide(15.0, [view(ready=6, use=0.9)], [advice(6)])] == [1]


@pytest.mark.parametrize(
    ("overloaded", "coming", "target", "delta"),
    [(1, 0, 4, 1), (3, 0, 4, 3), (3, 2, 6, 1), (2, 2, 6, 0), (0, 0, 4, 0), (1, 0, 3, 1), (1, 0, 7, 3)],
)
def test_preserve_one_overloaded_one_up(overloaded, coming, target, delta):
    one = view(coming=coming, overloaded_instances=overloaded)
    assert only("preserve", one, advice(target))[0] == delta


LOW = {"ready": 10, "peak_kv_sum": 1.5, "peak_kv_most": 0.29}


def eased(strategy, begin_s, advised, **changes):
    """Return the moves of *strategy* over 60 s of ticks from *begin_s* on, the last ones with *changes* to a low view."""
    deltas = []
    for now_s in (begin_s + 5.0 * tick for tick in range(13)):
        at_end = changes if now_s == begin_s + 60 else {}
        deltas += [each.delta for each in strategy.decide(now_s, [view(**(LOW | at_end))], [advised])]
    return deltas


def test_preserve_eases_once_a_window_when_all_maps_have_been_low():
    strategy = make_strategy("preserve")
    assert strategy.decide(0.0, [view(ready=2)], [advice(2)]) == []
    assert eased(strategy, 5.0, advice(2)) == [-5]
    assert eased(strategy, 70.0, advice(2)) == []
    assert strategy.decide(600.0, [view(**LOW | {"ready": 4})], [advice(4, made=600.0)]) == []
    assert eased(strategy, 605.0, advice(4, made=600.0)) == [-5]


@pytest.mark.parametrize("changes", [{"peak_kv_most": 0.3}, {"waiting": 1}, {"coming": 1}])
def test_preserve_starts_to_count_again_when_a_map_is_high_or_something_waits_or_comes(changes):
    strategy = make_strategy("preserve")
    assert strategy.decide(0.0, [view(ready=2)], [advice(2)]) == []
    assert eased(strategy, 5.0, advice(2), **changes) == []
    assert eased(strategy, 70.0, advice(2)) == [-5]


def test_preserve_keeps_what_the_highest_peaks_of_the_time_ask_for():
    strategy = make_strategy("preserve")
    assert strategy.decide(0.0, [view(ready=2)], [advice(2)]) == []
    assert strategy.decide(5.0, [view(**LOW | {"peak_kv_sum": 2.35})], [advice(2)]) == []
    assert eased(strategy, 10.0, advice(2)) == [-2]


def test_preserve_does_not_ease_below_the_plan():
    # Where computing runs short, memory is all but empty until just before: five of six would go.
    for target, delta in ((6, []), (4, [-2]), (2, [-4])):
        strategy = make_strategy("preserve", {"ease_after_s": 0})
        assert strategy.decide(0.0, [view(ready=target)], [advice(target)]) == []
        low = view(ready=6, peak_kv_sum=0.2, peak_kv_most=0.08)
        assert [each.delta for each in strategy.decide(5.0, [low], [advice(target)])] == delta


def test_preserve_eases_without_maps_and_without_a_plan():
    assert eased(make_strategy("preserve"), 0.0, None) == [-5]
    strategy = make_strategy("preserve", {"ease_after_s": 0})
    assert [each.delta for each in strategy.decide(0.0, [view(ready=10, kv_use=0.15, peak_kv_sum=nan)], [None])] == [-5]


def test_preserve_needs_no_plan_for_its_second_tier():
    assert only("preserve", view(overloaded_instances=2), None)[0] == 2
    assert only("preserve", view(overloaded_instances=0, use=0.95), None)[0] == 0


# Where instances come from, and parameters


@given(views, st.integers(0, 30))
def test_what_drains_first_then_own_spot_then_that_of_others(one, count):
    taken = sources(one, count)
    assert sum(taken) == count
    assert taken.draining == min(count, one.draining)
    assert taken.own_spot == min(count - taken.draining, one.spot)
    assert taken.other_spot == 0 or taken.own_spot == one.spot
    assert taken.new == 0 or taken.other_spot == one.spot_other


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_made_by_name_and_takes_numbers(name):
    made = make_strategy(name, {"cooldown_s": 30})
    assert (made.name, made.cooldown_s) == (name, 30.0)
    assert made.uses_advice == (name not in ("siloed", "reactive"))


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("lt_x", {}, "no strategy 'lt_x'"),
        ("lt_u", {"gap_out": 3}, "no parameter 'gap_out'; it has tick_s, out_above"),
        ("lt_u", {"memory": 3}, "no parameter 'memory'"),
        ("lt_u", {"out_above": "high"}, "must be a number"),
        ("lt_u", {"out_above": True}, "must be a number"),
        ("lt_u", {"out_above": 0.2}, "in_below"),
        ("lt_u", {"tick_s": 0}, "tick_s"),
        ("lt_u", {"cooldown_s": -1}, "cooldown_s"),
        ("lt_ua", {"gap_out": 0.1}, "gap_in"),
        ("lt_ua", {"gap_last_s": -1}, "gap_last_s"),
        ("preserve", {"ease_below": 1.5}, "ease_below"),
        ("preserve", {"ease_after_s": 600}, "ease_after_s"),
        ("pilothouse", {"aim": 0.95}, "aim"),
        ("pilothouse", {"hold_s": 0}, "hold_s"),
        ("pilothouse", {"confirm_above": 1}, "confirm_above"),
    ],
)
def test_wrong_parameters_are_named(name, parameters, words):
    with pytest.raises(ValueError, match=words):
        make_strategy(name, parameters)


# Our own


def pilothouse(views, advices, at_s=(100.0,)):
    """Return the moves of our strategy at the last of *at_s*, by endpoint."""
    strategy = make_strategy("pilothouse")
    for now_s in at_s:
        moves = strategy.decide(now_s, views, advices)
    return {each.endpoint: each.delta for each in moves}


def test_ours_takes_up_the_plan_when_use_bears_it_out():
    assert pilothouse([view(use=0.6)], [advice(6)]) == {0: 2}
    assert pilothouse([view(use=0.4)], [advice(6)]) == {}
    busy_elsewhere = [view(use=0.4), view(region="west", use=0.8)]
    assert pilothouse(busy_elsewhere, [advice(6), advice(4)]) == {0: 2}


def test_ours_adds_in_proportion_when_all_regions_are_full():
    assert pilothouse([view(use=2.0)], [advice(4)]) == {0: 7}
    relieved = [view(use=2.0), view(region="west", ready=10, use=0.2)]
    assert pilothouse(relieved, [advice(4), advice(10)]) == {}
    other_model = [view(use=2.0), view(model="bloom", ready=10, use=0.2)]
    assert pilothouse(other_model, [advice(4), advice(10)]) == {0: 7}


def test_ours_smooths_over_a_minute():
    strategy = make_strategy("pilothouse")
    assert strategy.decide(0.0, [view(use=0.5)], [advice(4)]) == []
    assert strategy.decide(15.0, [view(use=2.0)], [advice(4)]) == []  # 0.83 so far
    assert [each.delta for each in strategy.decide(30.0, [view(use=2.0)], [advice(4)])] == [2]


def test_ours_lets_go_what_neither_plan_nor_load_wants():
    assert pilothouse([view(ready=8, use=0.2)], [advice(3)]) == {0: -5}
    assert pilothouse([view(ready=8, use=0.2)], [advice(6, soon_instances=3)]) == {0: -2}
    assert pilothouse([view(ready=2, use=0.6)], [advice(6, soon_instances=3)]) == {0: 1}
    assert pilothouse([view(ready=8, use=0.6)], [advice(3)]) == {0: -1}  # 4.8 of 7 at most three quarters
    assert pilothouse([view(ready=8, use=0.2, since_change_s=119.0)], [advice(3)]) == {}
    assert pilothouse([view(ready=8, use=0.2, since_change_s=120.0)], [advice(3)]) == {0: -5}
    assert pilothouse([view(ready=7, coming=1, use=0.2)], [advice(3)]) == {}
    full_elsewhere = [view(ready=8, use=0.2), view(region="west", ready=4, use=0.95)]
    assert pilothouse(full_elsewhere, [advice(3), advice(4)]) == {0: -4}


def test_ours_adds_for_what_comes_soon_and_keeps_what_comes_later():
    assert pilothouse([view(ready=4, use=0.6)], [advice(8, soon_instances=4)]) == {}
    assert pilothouse([view(ready=4, use=0.6)], [advice(8)]) == {0: 4}


class TestGrace:
    """A new instance is not scaled in at once."""

    @pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "siloed"])
    def test_none_is_taken_away_and_the_wish_is_made_again(self, name):
        strategy = make_strategy(name, {"patience_s": 0})
        quiet, plan = view(use=0.05, kv_use=0.05, tokens_per_s=1.0, peak_kv_sum=0.1, peak_kv_most=0.05), advice(2)
        for since_ready_s in (12.0, GRACE_S - 1):
            assert not [
                each
                for each in strategy.decide(100.0, [quiet._replace(since_ready_s=since_ready_s)], [plan])
                if each.delta < 0
            ]
        later = strategy.decide(100.0, [quiet._replace(since_ready_s=GRACE_S)], [plan])
        assert later == make_strategy(name, {"patience_s": 0}).decide(100.0, [quiet], [plan])

    def test_it_does_not_keep_more_than_there_may_be(self):
        (move,) = make_strategy("reactive").decide(0.0, [view(ready=4, max_instances=3, since_ready_s=1.0)], [None])
        assert move.delta == -1

    def test_nor_does_it_hold_up_what_is_to_be_added(self):
        (move,) = make_strategy("reactive").decide(0.0, [view(use=0.9, since_ready_s=1.0)], [None])
        assert move.delta == 1


def short(missing, ticks=2, **changes):
    """Return our strategy's move at the last of that many ticks at which the global
    scheduler misses that many instances.
    """
    strategy = make_strategy("pilothouse")
    for tick in range(ticks):
        one = view(waiting=40, use=0.8, short_instances=missing, **changes)
        moves = strategy.decide(100.0 + 15 * tick, [one], [advice(4)])
    return [(each.delta, each.reason) for each in moves]


def test_ours_adds_as_many_as_no_order_can_do_without():
    ((delta, reason),) = short(3)
    assert delta == 3
    assert reason.startswith("No order of the queue is in time without 3 more instances: 4 → 7 instances")
    ((delta, reason),) = short(3, coming=2)
    assert delta == 1
    assert "without 3 more instances, 2 on the way" in reason
    assert short(3, coming=3) == []
    assert short(20)[0][0] == 8, "no more than there may be"
    assert short(3, ticks=1) == [], "what is over by the next tick is not waited for"


@pytest.mark.parametrize("name", [each for each in STRATEGIES if each != "pilothouse"])
def test_the_papers_strategies_leave_that_to_the_floor(name):
    one = view(waiting=40, use=0.8, short_instances=3)
    quiet = view(waiting=40, use=0.8)
    for each in (None, advice(4)):
        assert make_strategy(name).decide(100.0, [one], [each]) == make_strategy(name).decide(100.0, [quiet], [each])


@pytest.mark.parametrize("name", ["reactive", "lt_u", "lt_ua"])
@pytest.mark.parametrize(
    ("use", "kv_use", "by_memory", "delta"),
    [(0.5, 0.8, True, 1), (0.5, 0.8, False, 0), (0.9, 0.5, True, 0), (0.9, 0.5, False, 1), (inf, 0.0, True, 1)],
)
def test_use_is_memory_where_the_policy_says_so(name, use, kv_use, by_memory, delta):
    seen = view(use=use, kv_use=kv_use, by_memory=by_memory, **({"ready": 0, "coming": 1} if use == inf else {}))
    moves = make_strategy(name).decide(100.0, [seen], [advice(9)])
    assert [move.delta for move in moves] == [delta] * (delta != 0)
    assert all(move.reason.startswith("Memory use is 80%") for move in moves if by_memory and use < inf)
