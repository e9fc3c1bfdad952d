"""The RWT estimator meets the figures of docs/papers/waiting-time.md on every simulated profile (QLM figure 18)."""

import pytest

from scheduling.queueing.waits.correction import Correction
from tests.bench.waiting_time import PROFILES, estimate, summary

SEEDS = range(2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROFILES)
def test_waits_are_estimated_from_four_groups_on(name):
    correction = Correction()
    estimate(name, 8, len(SEEDS), correction)
    judged = summary([estimate(name, groups, seed, correction) for groups in (4, 8) for seed in SEEDS])
    print(name, judged)
    assert judged["r2"] >= 0.98
    assert judged["below_p99"] >= 0.99
