"""When a batch will end, from its samples: against runs whose end is known."""

from itertools import pairwise

import pytest

from controlplane.batches.progress import FIRST_LINES, MAX_SAMPLES, pace, with_sample


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


def test_the_later_half_of_a_run_says_how_fast_it_is():
    samples, now_s, done = run_of([10] * 60 + [50] * 60)
    assert pace(samples, now_s, done, 10_000).lines_per_s == pytest.approx(10, rel=0.1)


def test_samples_stay_few_and_cover_the_run():
    samples, now_s, done = run_of([1] * 5_000)
    assert len(samples) <= MAX_SAMPLES
    assert samples[0] == (0.0, 0)
    assert samples[-1][0] > 0.9 * now_s
    gaps = [after[0] - before[0] for before, after in pairwise(samples)]
    assert max(gaps) < now_s / 8
    assert with_sample(samples, samples[-1][0] + 4.9, done) is None
