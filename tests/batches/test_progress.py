"""When a batch will end, from its samples: against runs whose end is known."""

import random
from itertools import pairwise

import pytest

from controlplane.batches.progress import FIRST_LINES, MOST_SAMPLES, pace, with_sample


def run_of(steps, every_s=5.0):
    """Samples of a run that does *steps* lines in each interval, and the lines done at its end."""
    samples, done = [(0.0, 0)], 0
    for at, lines in enumerate(steps, 1):
        done += lines
        samples = with_sample(samples, at * every_s, done) or samples
    return samples, len(steps) * every_s, done


@pytest.mark.parametrize(
    ("samples", "now_s", "done", "total"),
    [
        ([], 10.0, 500, 1_000),  # of a batch that began before samples were kept
        ([(0.0, 0)], 10.0, 9, 1_000),  # less than 1%
        ([(0.0, 0)], 10.0, FIRST_LINES - 1, 50_000),
        ([(0.0, 0), (900.0, 500)], 2_000.0, 500, 1_000),  # nothing done in the later half
    ],
)
def test_an_end_is_not_expected_of_too_little(samples, now_s, done, total):
    assert pace(samples, now_s, done, total) is None


def test_a_steady_run_ends_at_its_pace():
    samples, now_s, done = run_of([50] * 40)
    measured = pace(samples, now_s, done, 4_000)
    assert measured.lines_per_s == pytest.approx(10)
    assert measured.left_s == pytest.approx(200)
    assert 0 < measured.margin_s < 30


def test_the_later_half_of_a_run_says_how_fast_it_is():
    samples, now_s, done = run_of([10] * 60 + [50] * 60)
    assert pace(samples, now_s, done, 10_000).lines_per_s == pytest.approx(10, rel=0.1)


def test_an_uneven_run_has_a_wider_interval():
    even, uneven = (run_of(steps) for steps in ([50] * 60, ([10] * 5 + [90] * 5) * 6))
    margins = [pace(samples, now_s, done, 9_000).margin_s for samples, now_s, done in (even, uneven)]
    assert margins[1] > 2 * margins[0]


def test_four_ends_in_five_lie_within_the_interval():
    chance, hits, runs = random.Random(7), 0, 300
    for _ in range(runs):
        done_at, at_s = [], 0.0
        for _ in range(1_200):
            at_s += chance.expovariate(10.0)
            done_at.append(at_s)
        samples = [(5.0 * step, sum(moment <= 5.0 * step for moment in done_at)) for step in range(9)]
        measured = pace(samples, 40.0, samples[-1][1], len(done_at))
        hits += abs(40.0 + measured.left_s - done_at[-1]) <= measured.margin_s
    assert 0.7 < hits / runs < 0.9


def test_samples_stay_few_and_cover_the_run():
    samples, now_s, done = run_of([1] * 5_000)
    assert len(samples) <= MOST_SAMPLES
    assert samples[0] == (0.0, 0)
    assert samples[-1][0] > 0.9 * now_s
    gaps = [after[0] - before[0] for before, after in pairwise(samples)]
    assert max(gaps) < now_s / 8
    assert with_sample(samples, samples[-1][0] + 4.9, done) is None
