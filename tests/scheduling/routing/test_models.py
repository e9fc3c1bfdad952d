"""Which model serves a request: shares by weight that stay with a conversation, and the rules of fallbacks."""

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.routing.models import ModelRule, fallback_rule, target_of

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 100), min_size=1)


def test_targets_have_their_shares():
    counts = Counter(target_of({"a": 95, "b": 5}, str(at)) for at in range(4_000))
    assert 0.04 < counts["b"] / 4_000 < 0.06


@given(WEIGHTS, st.text(max_size=20), st.sampled_from("abcd"), st.floats(0.1, 100))
def test_a_changed_weight_moves_requests_only_to_or_from_its_target(weights, sticky, changed, weight):
    before, after = target_of(weights, sticky), target_of(weights | {changed: weight}, sticky)
    assert before in weights
    if weight >= weights.get(changed, 0.0):
        assert after in (before, changed)
    else:
        assert after == before or before == changed


def test_a_weight_of_zero_gets_nothing():
    assert {target_of({"a": 0.0, "b": 1.0}, str(at)) for at in range(50)} == {"b"}
    with pytest.raises(ValueError, match="above 0"):
        target_of({"a": 0.0}, "x")


@pytest.mark.parametrize(
    ("serves", "wait_s", "most_wait_s", "there_s", "rule"),
    [
        (True, 0.0, None, 0.0, None),
        (True, 99.0, None, 0.0, None),  # without a bound it waits, however long
        (True, 5.0, 5.0, 0.0, None),
        (True, 5.1, 5.0, 0.0, ModelRule.WAIT),
        (True, 5.1, 5.0, 6.0, None),  # it would wait longer there
        (False, 0.0, None, 9.0, ModelRule.UNAVAILABLE),
        (False, 0.0, 5.0, inf, None),  # nothing serves it there either
    ],
)
def test_a_fallback_serves_by_a_rule(serves, wait_s, most_wait_s, there_s, rule):
    assert fallback_rule(serves=serves, wait_s=wait_s, most_wait_s=most_wait_s, there_s=there_s) is rule
