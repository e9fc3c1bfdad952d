"""Gittins ranks against brute force and known cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.applications.gittins import buckets, gittins_ranks
from tests.oracles import applications as plain


def rank_of(service_s, attained_s=0.0, weight=1.0):
    """Of buckets, or of as many values that are equally likely."""
    service_s = np.asarray(service_s, float)
    held = np.stack([service_s] * 3) if service_s.ndim == 1 else service_s
    rank, refresh = np.empty(1), np.empty(1)
    gittins_ranks(held[None], np.array([attained_s]), np.array([weight]), rank, refresh)
    return float(rank[0]), float(refresh[0])


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12), st.floats(0.0, 1.5).filter(lambda share: share != 1.0))
def test_a_rank_is_the_least_price_over_all_budgets(values, share):
    service_s, attained_s = sorted(values), share * max(values)
    rank, refresh = rank_of(service_s, attained_s)
    assert rank == pytest.approx(plain.gittins_rank(service_s, attained_s))
    assert refresh == min((value for value in service_s if value > attained_s), default=np.inf)


def test_known_service_ranks_as_what_is_left():
    assert rank_of([30.0] * 10, 12.0)[0] == pytest.approx(18.0)


def test_of_two_points_the_near_one_decides_until_it_is_passed():
    """1 s or 100 s, equally likely: a second of service ends half of the runs, so the rank is 2 and not the mean of 50.5."""
    assert rank_of([1.0, 100.0])[0] == pytest.approx(2.0)
    assert rank_of([1.0, 100.0], 1.0)[0] == pytest.approx(99.0)


def test_an_exponential_distribution_ranks_as_its_mean_whatever_was_attained():
    samples = np.random.default_rng(1).exponential(10.0, 200_000)
    held = buckets(samples)
    ranks = [rank_of(held, attained)[0] for attained in (0.0, *held[2, [2, 5, 8]])]
    assert ranks == pytest.approx([10.0] * 4, rel=0.02)
    assert rank_of(held, 0.5 * (held[0, 8] + held[2, 8]))[0] == pytest.approx(10.0, rel=0.2)


def test_a_run_that_needs_nothing_more_goes_first():
    assert rank_of([2.0, 4.0], 4.0)[0] == 0.0


def test_a_weight_divides_the_rank_and_a_run_beyond_all_records_ranks_as_its_tail():
    assert rank_of([4.0], weight=2.0)[0] == pytest.approx(2.0)
    assert rank_of([4.0], 9.0) == (9.0, np.inf)


def test_buckets_keep_the_mean_and_need_a_sample():
    samples = np.random.default_rng(2).lognormal(1.0, 1.0, 1_000)
    low, mean, high = buckets(samples)
    assert mean.mean() == pytest.approx(samples.mean())
    assert np.all(np.diff(np.stack([low, mean, high]).T.ravel()) >= 0)
    assert buckets(np.array([3.0])).tolist() == [[3.0] * 10] * 3
    assert buckets(np.arange(13.0))[1].mean() == pytest.approx(6.0)
    with pytest.raises(ValueError, match="no samples"):
        buckets(np.array([]))


LONGEST = 200
MEASURED = {
    "exponential": lambda random, count: random.exponential(12.0, count),
    "bimodal": lambda random, count: np.where(random.random(count) < 0.7, 2.0, 40.0),
    "heavy-tailed": lambda random, count: 3.0 * (1.0 + random.pareto(1.3, count)),
}
"""Whole service in seconds, 12 to 14 on average."""


def served(keys, arrivals_s, sizes):
    """Return the mean completion time on one preemptive server that serves the run of the least key each second.

    *keys* are by attained service in whole seconds.
    """
    attained, completed_s, now_s, arrived, here = [0] * len(sizes), [], 0, 0, []
    while len(completed_s) < len(sizes):
        while arrived < len(sizes) and arrivals_s[arrived] <= now_s:
            here.append(arrived)
            arrived += 1
        if not here:
            now_s = arrivals_s[arrived]
            continue
        run = min(here, key=lambda one: (keys[attained[one]], one))
        now_s, attained[run] = now_s + 1, attained[run] + 1
        if attained[run] >= sizes[run]:
            here.remove(run)
            completed_s.append(now_s - arrivals_s[run])
    return float(np.mean(completed_s))


@pytest.mark.parametrize("name", MEASURED)
def test_on_one_preemptive_server_the_rank_is_not_worse_than_the_mean_left(name):
    """Load 0.85, thirty seeds. `pytest -s` prints by how much it is better (docs/tenants/applications.md)."""
    draw, completions = MEASURED[name], []
    for seed in range(30):
        random = np.random.default_rng(seed)
        sizes = np.clip(np.ceil(draw(random, 150)), 1, LONGEST).astype(int)
        arrivals_s = np.floor(np.cumsum(random.exponential(sizes.mean() / 0.85, sizes.size))).astype(int).tolist()
        held = buckets(np.clip(np.ceil(draw(random, 2_000)), 1, LONGEST))
        gittins = [rank_of(held, float(had))[0] for had in range(LONGEST + 1)]
        mean_left = [max(0.0, held[1].mean() - had) for had in range(LONGEST + 1)]
        completions.append([served(keys, arrivals_s, sizes.tolist()) for keys in (gittins, mean_left)])
    hermes, srpt = np.array(completions).T
    saved = hermes - srpt
    interval = 1.96 * saved.std(ddof=1) / np.sqrt(saved.size)
    print(f"{name}: {hermes.mean():.1f} s against {srpt.mean():.1f} s, {saved.mean():+.1f} +- {interval:.1f} s")
    assert saved.mean() <= interval
    if name != "exponential":
        assert saved.mean() < -interval, "or it would not be worth its computation"
