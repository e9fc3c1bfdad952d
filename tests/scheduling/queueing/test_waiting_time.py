"""The RWT estimator: its kernels against their twins, and what must hold for every queue."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.queueing.waits.correction import Correction
from scheduling.queueing.waits.waiting_time import (
    EXACT,
    UNKNOWN,
    History,
    Lengths,
    Throughput,
    Wait,
    ahead,
    waiting_time,
)
from tests.oracles import waiting_time as reference

KEY = ("m", "chat")

PROFILE = Profile(0.02, 0.01, 5e-5, 0.0, 0.02, 1e-4, 1e-7)
tokens = st.floats(1.0, 5000.0)
deviations = st.floats(0.0, 3.0)


@st.composite
def lengths(draw) -> Lengths:
    mean = draw(tokens)
    return Lengths(draw(tokens), mean, (draw(deviations) * mean) ** 2, draw(st.floats(2.0, 1e5)))


def wait(requests: int, known: Lengths, batch: float, rate: float, relative_variance: float = 0.0) -> Wait:
    mean = requests * known.output_mean
    variance, error = requests * known.output_variance, requests * known.error
    in_flight = known.in_flight(round(batch), 0)
    return Wait(
        *waiting_time(
            float(requests), mean, variance, error, in_flight, float(round(batch)), known.output_mean, known.output_variance,
            batch, rate, relative_variance,
        )
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from((0.0, 1.0, 2.5)), tokens, tokens, tokens), min_size=1, max_size=30), st.data()
)
def test_requests_ahead_are_counted_as_by_the_plain_twin(requests, data):
    order = data.draw(st.permutations(range(len(requests))))
    keys = np.array([key for key, *_ in requests])
    sequence = np.arange(len(requests), dtype=np.int64)
    expected = np.array([values for _, *values in requests])
    waiting = [(float(key), number) for number, key in enumerate(keys)]
    for slot in range(-1, len(requests)):
        counted = ahead(np.array(order, np.int32), len(requests), keys, sequence, expected, slot)
        plain = reference.ahead(waiting, [tuple(row) for row in expected.tolist()], slot)
        assert counted == pytest.approx(plain)


def test_a_long_heap_is_sampled():
    random = np.random.default_rng(0)
    size = 20 * EXACT
    keys = random.random(size)
    expected = np.tile(np.array([100.0, 50.0, 2.0]), (size, 1))
    slot = int(np.argsort(keys)[size // 2])
    requests, mean, _, _ = ahead(np.arange(size, dtype=np.int32), size, keys, np.arange(size), expected, slot)
    assert requests == pytest.approx(size / 2, rel=0.1)
    assert mean == pytest.approx(100.0 * requests)


@given(st.integers(0, 5000), lengths(), st.floats(1.0, 500.0), st.floats(1.0, 1e5))
@example(0, Lengths(1.0, 1.0, 1.0, 2.0), 1.0, 1.0)  # exponential: a shape of 0
def test_the_mean_is_that_of_the_plain_twin(requests, known, batch, rate):
    in_flight = known.in_flight(round(batch), 0)
    plain = reference.wait_s(
        requests, requests * known.output_mean, in_flight, round(batch), known.output_mean, known.output_variance,
        batch, rate,
    )  # fmt: skip
    assert wait(requests, known, batch, rate).mean_s == pytest.approx(plain, rel=1e-9, abs=1e-9)


@given(st.integers(0, 3000), lengths(), st.floats(1.0, 500.0), st.floats(1.0, 1e5))
def test_no_request_waits_longer_than_one_behind_it(requests, known, batch, rate):
    first, second = (wait(count, known, batch, rate) for count in (requests, requests + 1))
    assert second.mean_s >= first.mean_s - 1e-9
    if requests >= round(batch):  # fewer wait for some of those that run, and what that varies by is another thing
        assert second.variance_s2 >= first.variance_s2
    assert second.quantile_s() >= second.mean_s


@given(lengths(), st.floats(2.0, 500.0), st.floats(1.0, 1e5))
def test_a_short_queue_waits_no_longer_than_equation_2_says_and_a_long_one_less(known, batch, rate):
    whole = round(batch) * known.output_mean / rate  # the batch that runs
    assert wait(0, known, batch, rate).mean_s <= whole * (1 + 1e-9)
    many = round(1000 * batch)
    in_flight_then = max(batch - 1, 0) * known.residual / rate
    by_equation_2 = (many + round(batch)) * known.output_mean / rate
    assert wait(many, known, batch, rate).mean_s == pytest.approx(by_equation_2 - in_flight_then, rel=1e-6)


@pytest.mark.parametrize("ahead_of_it", [0, 4, 12, 20])
def test_a_queue_shorter_than_the_batch_in_slots_that_are_never_idle(ahead_of_it):
    """Compare with slots that take one output after another: means, and the share below the 99th percentile."""
    random, batch, rate = np.random.default_rng(5), 32, 1000.0
    outputs = np.clip(random.lognormal(np.log(180.0), 0.8, (800, batch, 60)), 4, 2048)
    known = Lengths(100.0, float(outputs.mean()), float(outputs.var()), 1e4)
    ends = outputs.cumsum(axis=2)
    seen = 20.0 * known.output_mean  # of each slot's tokens, when the request comes
    running = (ends > seen).argmax(axis=2)
    begun = np.where(running > 0, np.take_along_axis(ends, np.maximum(running - 1, 0)[..., None], 2)[..., 0], 0.0)
    produced = (seen - begun).sum(axis=1)
    after = np.sort((ends - seen).reshape(800, -1), axis=1)
    actual_s = np.array([row[row > 0][ahead_of_it] for row in after]) * batch / rate
    mean, variance, error = (ahead_of_it * each for each in (known.output_mean, known.output_variance, known.error))
    said = [
        Wait(
            *waiting_time(
                float(ahead_of_it), mean, variance, error, known.in_flight(batch, round(each)), float(batch),
                known.output_mean, known.output_variance, float(batch), rate, 0.0,
            )
        )
        for each in produced
    ]  # fmt: skip
    means = np.array([one.mean_s for one in said])
    assert 1.0 <= means.mean() / actual_s.mean() < 1.6
    assert (actual_s <= [one.quantile_s() for one in said]).mean() > 0.95


def test_the_estimated_mean_outweighs_the_spread_once_more_wait_than_were_seen():
    few, many = (Lengths(100.0, 200.0, 200.0**2, samples) for samples in (50.0, 1e9))
    by_few, by_many = [wait(4000, each, 100.0, 1000.0).variance_s2 for each in (few, many)]
    assert by_many == pytest.approx(4000 * 200.0**2 / 1000.0**2, rel=1e-3)
    assert by_few > 80 * by_many


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=6))
def test_quantiles_of_parts_do_not_add_up_but_their_moments_do(parts):
    waits = [Wait(*each) for each in parts]
    together = Wait()
    for each in waits:
        together = together.then(each)
    assert together.mean_s == pytest.approx(sum(each.mean_s for each in waits))
    assert together.quantile_s() <= sum(each.quantile_s() for each in waits) + 1e-6


@given(lengths(), st.integers(0, 1_000_000), st.integers(1, 512))
def test_throughput_is_that_of_a_batch_that_fits(known, kv_tokens, most):
    throughput = Throughput.of(PROFILE, kv_tokens, most, known)
    assert 1.0 <= throughput.batch <= most
    if kv_tokens:
        assert throughput.batch <= max(1.0, kv_tokens / (known.prompt_mean + known.output_mean))
    assert throughput.batch / throughput.tokens_per_s >= PROFILE.step_time_s(0, 1, 1)
    slower = throughput.corrected(1.5, 0.1)
    assert slower.tokens_per_s == pytest.approx(throughput.tokens_per_s / 1.5)
    both = throughput.beside(throughput)
    assert (both.batch, both.tokens_per_s) == pytest.approx((2 * throughput.batch, 2 * throughput.tokens_per_s))


@given(lengths())
def test_tokens_left_to_a_batch_seen_at_any_moment_are_the_residual(known):
    produced = round(1000 * known.residual)  # of 1,000 sequences, on average as much as is left
    if known.output_mean + known.growth * known.residual > 0:
        assert known.in_flight(1000, produced) == pytest.approx(1000 * known.residual, rel=1e-2, abs=1.0)


def test_overrun_of_exponential_and_of_equal_outputs():
    assert Lengths(1.0, 100.0, 100.0**2, 1e6).overrun == pytest.approx(100.0 / math.e)
    assert Lengths(1.0, 100.0, 0.0, 1e6).overrun < 1.0


def test_history_learns_means_and_widens_what_few_requests_say():
    history = History()
    assert history.lengths(KEY) == UNKNOWN
    random = np.random.default_rng(0)
    for output in random.lognormal(5.0, 0.5, 3000):
        history.learn(KEY, 100, int(output), 0.0)
    known = history.lengths(KEY)
    assert known.prompt_mean == pytest.approx(100.0)
    assert known.output_mean == pytest.approx(math.exp(5.125), rel=0.1)
    assert known.error < 0.05 * known.output_mean
    history.learn("other", 10, 500, 0.0)
    assert history.lengths("other").output_variance > 400.0**2


def test_predictions_are_used_where_they_err_less_than_the_mean():
    good, bad = History(), History()
    random = np.random.default_rng(1)
    for output in random.lognormal(5.0, 0.8, 2000):
        good.learn(KEY, 10, int(output), output / 2)  # half of what comes, always
        bad.learn(KEY, 10, int(output), float(random.lognormal(5.0, 0.8)))
    mean, variance, _ = good.expected(KEY, 400.0)
    assert mean == pytest.approx(800.0, rel=0.02)
    assert variance < 100.0
    assert bad.expected(KEY, 400.0)[0] == pytest.approx(bad.lengths(KEY).output_mean)
    assert History().expected(KEY, 70.0) == (70.0, 4900.0, 70.0)


@given(st.floats(0.2, 8.0), st.integers(0, 2**32 - 1))
def test_the_correction_finds_the_factor_and_what_it_leaves(factor, seed):
    correction = Correction()
    random = np.random.default_rng(seed)
    assert correction.factor == 1.0
    for estimated in random.uniform(1.0, 100.0, 400):
        correction.learn(float(estimated), float(factor * estimated * random.normal(1.0, 0.05)), batch=1.0)
    assert correction.factor == pytest.approx(factor, rel=0.15)
    assert correction.relative_variance < Correction.PRIOR_VARIANCE


def test_where_no_profile_was_measured_only_waits_say_anything():
    correction = Correction(guess=0.0)
    assert not correction.known
    correction.learn(10.0, 35.0, batch=16.0)
    assert correction.known
    assert correction.factor == pytest.approx(3.5)


def test_a_class_that_others_overtake_has_a_constant():
    """Half of a burst precedes the other half, wherever it is in the burst."""
    overtaken, through_origin = Correction(overtaken=True), Correction()
    for step in range(400):
        estimated_s = 8.0 * (step % 100) / 100
        for correction in (overtaken, through_origin):
            correction.learn(estimated_s, 4.0 + 0.5 * estimated_s, 8.0)
    assert overtaken.overtaken_s == pytest.approx(4.0, rel=0.01)
    assert overtaken.factor == pytest.approx(0.5, rel=0.01)
    assert through_origin.overtaken_s == 0.0
    assert overtaken.relative_variance < through_origin.relative_variance / 2


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 100.0)), min_size=1, max_size=60), st.floats(0.5, 3.0))
def test_a_constant_is_never_negative_and_not_there_where_none_is_needed(pairs, factor):
    straight, any_waits = Correction(overtaken=True), Correction(overtaken=True)
    for estimated_s, actual_s in pairs:
        straight.learn(estimated_s, factor * estimated_s, 1.0)
        any_waits.learn(estimated_s, actual_s, 1.0)
    assert straight.overtaken_s == pytest.approx(0.0, abs=1e-6)
    assert any_waits.overtaken_s >= 0.0
    assert any_waits.factor > 0.0
    assert any_waits.relative_variance >= 0.0


@given(lengths(), st.lists(tokens, min_size=1, max_size=20))
def test_requests_count_by_the_memory_of_their_prompts_and_all_of_them_as_often_as_there_are(known, prompts):
    known = replace(known, prompt_mean=sum(prompts) / len(prompts))
    weights = [known.weight(each) for each in prompts]
    assert sum(weights) == pytest.approx(len(prompts))
    assert sorted(weights) == [known.weight(each) for each in sorted(prompts)]
    assert known.weight(known.prompt_mean) == 1.0
    longer = known.prompt_mean + known.held(known.prompt_mean)
    assert known.weight(longer) == pytest.approx(2.0)
