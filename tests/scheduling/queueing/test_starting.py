"""What instances on their way change of a wait, alongside tokens that are counted down step by step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.waits.starting import Coming, left_of_start_s, sooner, until_produced
from scheduling.queueing.waits.waiting_time import Wait

instances = st.lists(
    st.builds(Coming, st.floats(0.5, 60.0), st.floats(1.0, 20.0), st.floats(0.0, 100.0), st.floats(0.0, 1.0)),
    min_size=1,
    max_size=4,
)


def counted_down(tokens, rate, coming, step_s=0.002):
    """Return when no tokens are left; each instance takes a batch at once when it is ready."""
    time_s, left, here = 0.0, tokens, []
    while True:
        for one in coming:
            if one.in_s <= time_s and one not in here:
                here.append(one)
                left -= one.batch_tokens
        rate_now = rate + sum(one.tokens_per_s for one in here)
        if left <= 0.0 and rate_now > 0.0:
            return time_s
        time_s, left = time_s + step_s, left - rate_now * step_s


@given(st.floats(0.0, 500.0), st.sampled_from([0.0, 5.0, 20.0]), instances)
def test_a_wait_is_over_when_the_tokens_are_produced(tokens, rate, coming):
    coming = list(dict.fromkeys(coming))
    over = until_produced(Wait(tokens), rate, coming)
    assert over.mean_s == pytest.approx(counted_down(tokens, rate, coming), abs=0.02)


@given(st.floats(0.0, 200.0), st.floats(0.0, 400.0), instances)
def test_no_request_waits_longer_because_instances_start(mean_s, variance_s2, coming):
    wait = Wait(mean_s, variance_s2)
    assert sooner(wait, 10.0, coming).mean_s <= mean_s + 1e-9
    assert sooner(wait, 10.0, []) == wait
    if mean_s < min(one.in_s for one in coming):
        assert sooner(wait, 10.0, coming).mean_s == pytest.approx(mean_s), "it is over before"


def test_a_start_that_is_overdue_is_not_over():
    assert left_of_start_s(120.0, 20.0) == 100.0
    assert left_of_start_s(120.0, 300.0) == 30.0
    assert not math.isclose(left_of_start_s(120.0, 120.0), 0.0)
