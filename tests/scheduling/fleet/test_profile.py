import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile

# Llama-2-70B on eight A100: published fit, seconds and tokens.
LLAMA = Profile(0.0654, 0.0412, 9.597e-5, 1.09e-8, 0.0444, 2.37e-4, 2.49e-7)


def test_prefill_alone_has_a_floor_and_then_grows():
    assert LLAMA.step_time_s(1, 0, 0) == 0.0654
    assert LLAMA.step_time_s(100, 0, 0) == 0.0654
    assert LLAMA.step_time_s(4096, 0, 0) == pytest.approx(0.0412 + 9.597e-5 * 4096 + 1.09e-8 * 4096**2)


def test_decode_alone_grows_with_batch_and_context():
    assert LLAMA.step_time_s(0, 32, 20_000) == pytest.approx(0.0444 + 2.37e-4 * 32 + 2.49e-7 * 20_000)


def test_a_mixed_step_pays_the_fixed_part_once():
    mixed_s = LLAMA.step_time_s(4096, 32, 20_000)
    assert mixed_s == pytest.approx(LLAMA.step_time_s(4096, 0, 0) + 2.37e-4 * 32 + 2.49e-7 * 20_000)
    assert mixed_s < LLAMA.step_time_s(4096, 0, 0) + LLAMA.step_time_s(0, 32, 20_000)


def test_an_empty_step_takes_no_time():
    assert LLAMA.step_time_s(0, 0, 0) == 0.0


@given(
    prefill_tokens=st.integers(0, 32_768), decode_sequences=st.integers(0, 1024), context_tokens=st.integers(0, 10**7)
)
def test_more_work_never_takes_less_time(prefill_tokens, decode_sequences, context_tokens):
    step_s = LLAMA.step_time_s(prefill_tokens, decode_sequences, context_tokens)
    if prefill_tokens + decode_sequences:
        assert LLAMA.step_time_s(prefill_tokens + 1, decode_sequences, context_tokens) >= step_s
        assert LLAMA.step_time_s(prefill_tokens, decode_sequences, context_tokens + 1) >= step_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_t0_s", -1.0),
        ("prefill_a_s", math.nan),
        ("prefill_b_s_per_token", math.inf),
        ("prefill_c_s_per_token2", -1e-9),
        ("decode_a_s", -0.1),
        ("decode_b_s_per_sequence", math.nan),
        ("decode_c_s_per_token", -1.0),
    ],
)
def test_a_wrong_coefficient_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        replace(LLAMA, **{name: value})


def test_a_profile_without_time_is_refused():
    with pytest.raises(ValueError, match="prefill"):
        Profile(0, 0, 0, 0, 1, 0, 0)
    with pytest.raises(ValueError, match="decode"):
        Profile(1, 0, 0, 0, 0, 0, 0)


def test_a_negative_intercept_under_a_floor_is_allowed():
    assert replace(LLAMA, prefill_a_s=-0.01).step_time_s(1, 0, 0) == 0.0654
