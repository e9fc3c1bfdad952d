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


def served(order, sizes):
    """Mean completion time on one preemptive server that always serves the run of the least *order*(known, attained)."""
    attained, done, now = np.zeros(len(sizes)), {}, 0.0
    while len(done) < len(sizes):
        waiting = [run for run in range(len(sizes)) if run not in done]
        run = min(waiting, key=lambda one: (order(attained[one]), one))
        now, attained[run] = now + 1.0, attained[run] + 1.0
        if attained[run] >= sizes[run]:
            done[run] = now
    return np.mean(list(done.values()))


def test_on_one_server_the_rank_is_not_worse_than_the_mean_left():
    """Runs of 2 or 40 units: the mean left sinks with service, and so stays with the long run that it began."""
    random, support = np.random.default_rng(3), [2.0] * 7 + [40.0] * 3
    differences = []
    for _ in range(30):
        sizes = random.choice(support, 12)
        differences.append(
            served(lambda had: rank_of(support, had)[0], sizes) - served(lambda had: np.mean(support) - had, sizes)
        )
    assert np.mean(differences) < 0.0
