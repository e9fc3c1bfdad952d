"""Fits find the coefficients that points were made from, and report their error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_fitting import (
    DecodePoints,
    Measurements,
    PrefillPoints,
    Setting,
    TooFewPoints,
    fit,
    predict_decode_s,
    predict_prefill_s,
)

TRUE = Profile(0.05, 0.016, 8.4e-5, 3.8e-9, 0.029, 2.5e-4, 4e-8)


def measurements(
    profile: Profile, *, noise: float = 0.0, outliers: int = 0, lengths=(128, 256, 512, 1024, 2048, 4096, 8192)
) -> Measurements:
    """Return three repeats of each prompt length and of a grid of batches and contexts."""
    random = np.random.default_rng(1)
    tokens = np.repeat(np.array(lengths, float), 3)
    batch, context = (grid.ravel() for grid in np.meshgrid([1.0, 4, 16, 64], [600.0, 2000, 8000]))
    batch, context = np.repeat(batch, 3), np.repeat(batch * context, 3)
    none = np.zeros(batch.size)
    decode = DecodePoints(batch, context, none, none, none, np.repeat(np.arange(batch.size // 3), 3) + 100)
    first_s = predict_prefill_s(profile, tokens) * np.exp(noise * random.standard_normal(tokens.size))
    first_s[:outliers] *= 5
    between_s = predict_decode_s(profile, decode) * np.exp(noise * random.standard_normal(batch.size))
    return Measurements(
        Setting("m", "g", 1),
        PrefillPoints(tokens, first_s, np.repeat(np.arange(len(lengths)), 3)),
        DecodePoints(batch, context, between_s, none, none, decode.configuration),
    )


def same(profile: Profile, other: Profile, within: float) -> None:
    tokens = np.array([128.0, 700, 3000, 8000])
    assert predict_prefill_s(profile, tokens) == pytest.approx(predict_prefill_s(other, tokens), rel=within)
    for batch, context in ((1, 1000), (32, 40_000), (64, 300_000)):
        assert profile.step_time_s(0, batch, context) == pytest.approx(other.step_time_s(0, batch, context), rel=within)


def test_exact_points_give_the_coefficients_back() -> None:
    result = fit(measurements(TRUE))
    same(result.profile, TRUE, 1e-3)
    assert result.profile.prefill_t0_s == pytest.approx(TRUE.prefill_t0_s)
    assert result.profile.decode_c_s_per_token == pytest.approx(TRUE.decode_c_s_per_token, rel=0.01)
    assert result.prefill_error is not None
    assert result.prefill_error.fitted_pct < 0.1
    assert result.configurations == 7 + 12
    assert result.points == 21 + 36


@given(
    t0=st.floats(0, 0.1),
    a=st.floats(0.001, 0.05),
    b=st.floats(1e-5, 4e-4),
    c=st.floats(0, 2e-8),
    decode_a=st.floats(0.004, 0.06),
    decode_b=st.floats(0, 5e-4),
    decode_c=st.floats(0, 4e-7),
)
def test_any_profile_is_found_from_its_own_points(t0, a, b, c, decode_a, decode_b, decode_c) -> None:
    profile = Profile(t0, a, b, c, decode_a, decode_b, decode_c)
    fitted = fit(measurements(profile))
    assert fitted.prefill_error is not None
    assert fitted.decode_error is not None
    # The floor may end between two measured lengths, where no point says so.
    assert fitted.prefill_error.fitted_pct < 3
    assert fitted.decode_error.fitted_pct < 0.5


def test_noise_and_outliers_do_not_carry_it_away() -> None:
    same(fit(measurements(TRUE, noise=0.03, outliers=1)).profile, TRUE, 0.1)


def test_held_out_error_is_that_of_configurations_not_of_repeats() -> None:
    """One configuration is off the curve in all of its repeats: leaving out rows would not notice."""
    points = measurements(TRUE)
    points.prefill.seconds[points.prefill.tokens == 8192] *= 1.5
    error = fit(points).prefill_error
    assert error is not None
    assert error.held_out_pct is not None
    assert error.held_out_pct > 4
    assert error.held_out_median_pct is not None
    assert error.held_out_median_pct < error.held_out_pct


def test_same_seed_same_errors() -> None:
    points = measurements(TRUE, noise=0.1)
    assert fit(points, seed=3) == fit(points, seed=3)
    assert fit(points, seed=3).prefill_error != fit(points, seed=4).prefill_error


def test_coefficients_are_never_below_zero() -> None:
    points = measurements(TRUE)
    points.decode.seconds[:] = np.linspace(0.05, 0.02, points.decode.seconds.size)  # faster with more work
    profile = fit(points).profile
    assert profile.decode_a_s > 0
    assert min(profile.decode_b_s_per_sequence, profile.decode_c_s_per_token) >= 0


def test_prefills_in_the_same_steps_are_taken_off() -> None:
    plain = measurements(TRUE).decode
    share, prompts = np.full(plain.batch.size, 0.25), np.full(plain.batch.size, 2048.0)
    disturbed = DecodePoints(plain.batch, plain.context_tokens, plain.seconds, share, prompts, plain.configuration)
    points = Measurements(
        Setting("m", "g", 1),
        measurements(TRUE).prefill,
        DecodePoints(
            plain.batch,
            plain.context_tokens,
            predict_decode_s(TRUE, disturbed),
            share,
            prompts,
            plain.configuration,
        ),
    )
    same(fit(points).profile, TRUE, 0.01)
    assert predict_decode_s(TRUE, disturbed)[0] > plain.seconds[0]


def test_one_prompt_length_is_too_few() -> None:
    with pytest.raises(TooFewPoints, match="1 prompt length"):
        fit(measurements(TRUE, lengths=(512,)))


def test_few_configurations_have_no_held_out_error() -> None:
    points = measurements(TRUE, lengths=(512, 1024))
    first = DecodePoints(*(column[:3] for column in (
        points.decode.batch, points.decode.context_tokens, points.decode.seconds, points.decode.prefill_share,
        points.decode.prefill_tokens, points.decode.configuration)))  # fmt: skip
    error = fit(Measurements(points.setting, points.prefill, first)).prefill_error
    assert error is not None
    assert error.held_out_pct is None
