import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.promises import (
    ADMIT,
    DEGRADE,
    IF_UNREACHABLE,
    REFUSE,
    Calibration,
    ClassTerms,
    decide,
    fallbacks,
)
from scheduling.queueing.waits.waiting_time import Wait


def terms(name, if_unreachable=ADMIT, to=""):
    return ClassTerms(name, if_unreachable=if_unreachable, degrades_to=to)


@pytest.mark.parametrize(
    ("wait", "due_s", "late"),
    [
        (None, 1.0, 0.0),  # without an estimate
        (Wait(50.0), math.inf, 0.0),  # nothing is promised
        (Wait(2.0), 2.5, 0.0),  # the prefill takes the rest
        (Wait(2.0), 2.0, 0.5),
        (Wait(2.0, 1.0), 2.5, pytest.approx(2.326, rel=1e-3)),  # the 99th percentile decides
        (Wait(), -1.0, 1.5),  # due already
    ],
)
def test_how_late_a_promise_is(wait, due_s, late):
    assert Calibration().late_s(wait, due_s, 0.5) == late


@pytest.mark.parametrize(
    ("chain", "late", "ends_in", "refused"),
    [
        ([terms("a")], [9.0], "a", False),
        ([terms("a", REFUSE)], [9.0], "a", True),
        ([terms("a", REFUSE)], [0.0], "a", False),
        ([terms("a", DEGRADE, "b")], [9.0], "a", False),  # its tenant may not use b
        ([terms("a", DEGRADE, "b"), terms("b", REFUSE)], [9.0, 0.0], "b", False),
        ([terms("a", DEGRADE, "b"), terms("b", REFUSE)], [9.0, 1.0], "b", True),
        ([terms("a", DEGRADE, "b"), terms("b", DEGRADE, "c"), terms("c")], [9.0, 1.0, 1.0], "c", False),
        ([terms("a", DEGRADE, "b"), terms("b")], [0.0, 0.0], "a", False),
    ],
)
def test_the_class_decides(chain, late, ends_in, refused):
    asked = []

    def expected(of):
        asked.append(of.slo_class)
        return Wait(5.0), late[len(asked) - 1]

    verdict = decide(chain[0], tuple(chain[1:]), expected)
    assert (verdict.terms.slo_class, verdict.refused) == (ends_in, refused)
    assert asked == [each.slo_class for each in chain[: len(asked)]]
    assert verdict.late_s == late[len(asked) - 1]


def test_waits_are_distributed_as_those_that_followed_once_there_are_enough():
    calibration, wait = Calibration(), Wait(9.5)
    tried = [calibration.late_s(wait, 4.0, 0.0) == 0.0 for _ in range(2 * Calibration.TRIED)]
    assert tried == ([False] * (Calibration.TRIED - 1) + [True]) * 2
    for _ in range(Calibration.ENOUGH - 1):
        calibration.learn(wait, 0.5)
    assert calibration.quantile_s(wait) == 9.5
    calibration.learn(wait, 2.5)
    assert calibration.quantile_s(wait) == pytest.approx(2.5)
    assert calibration.quantile_s(wait, 0.9) == pytest.approx(0.5)
    assert calibration.quantile_s(Wait(0.0), 0.9) == 0.0
    assert calibration.quantile_s(Wait(9.5, 100.0)) < 0.5, "an uncertain one by more"
    assert calibration.late_s(wait, 4.0, 0.0) == 0.0
    assert calibration.late_s(wait, 1.5, 0.0) == pytest.approx(1.0)
    for _ in range(Calibration.KEPT):
        calibration.learn(wait, 19.5)
    assert calibration.quantile_s(wait, 0.5) == pytest.approx(19.5), "estimates may be too low, too"


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.0), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_share_of_waits_below_a_quantile_is_its_own_whatever_the_estimates(seed, bias, share):
    random, calibration, below = np.random.default_rng(seed), Calibration(), []
    for mean_s in random.uniform(5.0, 50.0, 1500).tolist():
        waited_s = bias * mean_s * float(random.lognormal(0.0, 0.5))
        below.append(waited_s <= calibration.quantile_s(Wait(mean_s), share))
        calibration.learn(Wait(mean_s), waited_s)
    assert np.mean(below[500:]) == pytest.approx(share, abs=0.07)


NAMES = st.sampled_from("abcdef")


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(list(IF_UNREACHABLE)), NAMES)), NAMES)
def test_a_request_never_comes_back_to_a_class(made, first):
    known = {name: terms(name, what, to) for name, (what, to) in made.items()}
    chain = fallbacks(known.get(first, terms(first, DEGRADE, "a")), known)
    names = [first, *(each.slo_class for each in chain)]
    assert len(names) == len(set(names))
    assert set(names[1:]) <= set(known)  # entitlement
    assert all(each.if_unreachable == DEGRADE for each in chain[:-1])
