"""How long a busy instance keeps GPUs that it shares, against draws."""

import math

import numpy as np
import pytest

from scheduling.scaling.swapping import busy_spell_s, leaving


@pytest.mark.parametrize(("given_s", "limit_s", "busy_s"), [(0.0, 10.0, 5.0), (3.0, 40.0, 5.0), (2.0, 4.0, 30.0)])
def test_it_stays_while_busy_and_at_most_to_the_limit(given_s, limit_s, busy_s):
    spells_s = np.random.default_rng(1).exponential(busy_s, 400_000)
    gone_s = np.minimum(given_s + spells_s, limit_s)
    left = leaving(given_s, limit_s, busy_s)
    assert left.mean_s == pytest.approx(gone_s.mean(), rel=0.01)
    assert left.variance_s2 == pytest.approx(gone_s.var(), rel=0.02)
    assert left.runs == pytest.approx((gone_s == limit_s).mean(), abs=0.005)


@pytest.mark.parametrize(
    ("given_s", "limit_s", "busy_s", "expected"),
    [
        (0.0, 10.0, 0.0, (0.0, 0.0, 0.0)),
        (4.0, 2.0, 5.0, (4.0, 0.0, 1.0)),
        (4.0, 9.0, math.inf, (9.0, 0.0, 1.0)),
        (1.0, math.inf, 5.0, (6.0, 25.0, 0.0)),
    ],
)
def test_at_the_edges(given_s, limit_s, busy_s, expected):
    assert leaving(given_s, limit_s, busy_s) == expected


def test_a_busy_spell_is_that_of_a_queue_with_servers_for_all():
    """M/G/infinity from the arrival that ends an idle period, whatever the distribution of service."""
    random, spells_s = np.random.default_rng(2), []
    per_s, lasts_s = 0.6, 2.0
    for _ in range(4000):
        now_s = ends_s = 0.0
        while now_s <= ends_s:
            ends_s = max(ends_s, now_s + lasts_s)
            now_s += random.exponential(1.0 / per_s)
        spells_s.append(ends_s)
    assert busy_spell_s(per_s, lasts_s) == pytest.approx(float(np.mean(spells_s)), rel=0.05)
    assert busy_spell_s(0.0, 2.0) == 2.0
    assert math.isinf(busy_spell_s(100.0, 2.0))


def test_a_spell_from_many_that_run_is_longer():
    """Compare with simulated spells with exponential service."""
    random, spells_s = np.random.default_rng(4), []
    per_s, lasts_s, running = 0.9, 2.0, 6
    for _ in range(4000):
        ends_s, now_s = list(random.exponential(lasts_s, running)), 0.0
        while now_s <= max(ends_s):
            now_s += random.exponential(1.0 / per_s)
            if now_s <= max(ends_s):
                ends_s.append(now_s + random.exponential(lasts_s))
        spells_s.append(max(ends_s))
    spell_s = busy_spell_s(per_s, lasts_s, running)
    assert spell_s == pytest.approx(float(np.mean(spells_s)), rel=0.04)
    assert spell_s > 1.3 * busy_spell_s(per_s, lasts_s)
