"""The floor: it acts whatever the advice, it never takes away, it does not count twice what is on the way."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.scaling import STRATEGIES, Floor, Floored, floor_moves, make_strategy
from scheduling.scaling.floor import floor_move
from tests.scheduling.scaling.views import advice, advices, view, views


@given(st.sampled_from(list(STRATEGIES)), views, advices, st.floats(0, 9000))
def test_whatever_strategy_and_advice_it_gets_no_less(name, one, advised, now_s):
    wanted = floor_move(0, one)
    bare = make_strategy(name).decide(now_s, [one], [advised])
    moves = Floored(make_strategy(name)).decide(now_s, [one], [advised])
    if wanted:
        assert moves[0].delta >= wanted.delta > 0
    else:
        assert moves == bare


@given(views)
def test_it_only_adds_and_never_within_the_cooldown(one):
    moved = floor_move(0, one)
    if moved:
        assert 0 < moved.delta <= one.max_instances - one.instances
        assert one.since_change_s >= 15 or one.instances < one.min_instances or (not one.ready and one.waiting)
        assert moved.reason.startswith("Safety autoscaler: ")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_to_shrink_does_not_hold_it_back(name):
    full = view(use=1.4, waiting=20)
    (move,) = Floored(make_strategy(name)).decide(0.0, [full], [advice(2)])
    assert move.delta >= 1


@pytest.mark.parametrize(
    ("changes", "delta"),
    [
        ({"use": 1.0}, 0),
        ({"use": 1.01}, 1),
        ({"use": 1.2, "coming": 1}, 0),  # 0.96 once it is there
        ({"use": 1.3, "coming": 1}, 1),
        ({"use": inf, "ready": 0, "coming": 2, "waiting": 5}, 0),
        ({"use": inf, "ready": 0, "min_instances": 0, "waiting": 5}, 1),
        # C30: what waits fills five; two come already; ten, which are more than the maximum
        ({"use": inf, "ready": 0, "min_instances": 0, "waiting": 2_500, "requests_at_once": 500}, 5),
        ({"use": inf, "ready": 0, "min_instances": 0, "waiting": 2_500, "requests_at_once": 500, "coming": 2}, 3),
        ({"use": inf, "ready": 0, "min_instances": 0, "waiting": 9_000, "requests_at_once": 50}, 12),
        ({"use": inf, "ready": 0, "min_instances": 0}, 1),  # there was demand within the last minute
        ({"use": inf, "ready": 0, "min_instances": 0, "since_change_s": 14.0}, 0),
        ({"use": inf, "ready": 0, "min_instances": 0, "tokens_per_s": 0.0}, 0),
        ({"use": 0.1, "ready": 1}, 1),  # fewer than it must have
        ({"use": 2.0, "since_change_s": 14.0}, 0),
        ({"use": 2.0, "ready": 12}, 0),  # no more is allowed
    ],
)
def test_when_it_acts(changes, delta):
    moved = floor_move(0, view(**changes))
    assert (moved.delta if moved else 0) == delta


def test_what_another_region_serves_needs_none_here():
    nothing = view(use=inf, ready=0, min_instances=0, waiting=5)
    assert [each.endpoint for each in floor_moves([nothing, view(region="west")], Floor())] == []
    assert [each.endpoint for each in floor_moves([nothing, view(model="bloom")], Floor())] == [0]


def test_it_says_why():
    assert floor_move(0, view(use=1.3, waiting=9, coming=1)).reason == (
        "Safety autoscaler: use is 130% with 9 waiting, 104% with the 1 on the way, above 100%: 5 → 6 instances,"
        " from own spot."
    )


def test_its_parameters_are_checked():
    with pytest.raises(ValueError, match="above"):
        Floor(above=0)
    with pytest.raises(ValueError, match="period_s"):
        Floor(period_s=0)
    with pytest.raises(ValueError, match="cooldown_s"):
        Floor(cooldown_s=-1)
