"""Estimated profiles beside measured ones: vLLM's own series, and the fits that the demo is seeded with."""

from statistics import median

import pytest

from controlplane.fleet.demo import MODELS, PROFILES
from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_estimate import GPUS, estimate, facts_of

LLAMA_70B = (70.6e9, 327_680, 70.6e9)  # weights in 8 bits, KV bytes of a token, parameters
QWEN_32B = (65.6e9, 262_144, 32.8e9)
# Measured TPOT of vLLM (aiconfigurator, April 2026): model, GPU, TP, sequences, tokens of context, seconds.
DECODE = (
    (QWEN_32B, "h100-80gb", 2, 8, 8_704, 0.01804),
    (QWEN_32B, "h100-80gb", 4, 128, 196_608, 0.02563),
    (QWEN_32B, "h100-80gb", 8, 16, 17_408, 0.01071),
    (LLAMA_70B, "h100-80gb", 2, 64, 98_304, 0.02877),
    (LLAMA_70B, "h100-80gb", 4, 32, 49_152, 0.01649),
    (LLAMA_70B, "h200-141gb", 1, 8, 40_960, 0.0241),
    (LLAMA_70B, "h200-141gb", 8, 64, 98_304, 0.01273),
    (LLAMA_70B, "b200-180gb", 4, 16, 24_576, 0.00898),
)
# Measured TTFT of the same: model, GPU, TP, tokens of the step, seconds.
PREFILL = (
    (QWEN_32B, "h100-80gb", 2, 10_127, 0.6523),
    (QWEN_32B, "h100-80gb", 4, 1_526, 0.1261),
    (LLAMA_70B, "h100-80gb", 2, 5_540, 0.4151),
    (LLAMA_70B, "h100-80gb", 8, 1_239, 0.0704),
    (LLAMA_70B, "h200-141gb", 2, 25_969, 1.8208),
    (LLAMA_70B, "b200-180gb", 1, 3_246, 0.2427),
)


def test_decode_steps_are_those_that_vllm_was_measured_with():
    errors = []
    for (weights, kv_bytes, parameters), gpu, tensor_parallel, batch, context, seconds in DECODE:
        profile = estimate(weights, kv_bytes, GPUS[gpu], tensor_parallel, parameters)
        errors.append(abs(profile.step_time_s(0, batch, context) / seconds - 1))
    assert median(errors) < 0.15
    assert max(errors) < 0.35


def test_prefills_are_those_that_vllm_was_measured_with():
    errors = []
    for (weights, kv_bytes, parameters), gpu, tensor_parallel, tokens, seconds in PREFILL:
        profile = estimate(weights, kv_bytes, GPUS[gpu], tensor_parallel, parameters)
        errors.append(abs(profile.step_time_s(tokens, 0, 0) / seconds - 1))
    assert median(errors) < 0.2
    assert max(errors) < 0.5


@pytest.mark.parametrize("measured", PROFILES, ids=lambda row: f"{row.model}-{row.gpu_type}-{row.tensor_parallel}")
def test_older_measurements_are_within_a_factor_of_four(measured):
    """Splitwise's and SageServe's engines of 2023 and 2024 pay more in each step, the more GPUs the more."""
    values = {name: value for name, value in measured.values().items() if name in Profile.__dataclass_fields__}
    known, sizes = Profile(**values), MODELS[measured.model]
    profile = estimate(
        sizes["weights_bytes"], sizes["kv_bytes_per_token"], GPUS[measured.gpu_type], measured.tensor_parallel
    )
    steps = [(tokens, 0, 0) for tokens in (512, 2_048, 8_192)] + [(0, batch, 512 * batch) for batch in (1, 16, 32)]
    for step in steps:
        assert 1 / 4 < profile.step_time_s(*step) / known.step_time_s(*step) < 4, step


def test_more_gpus_are_faster_and_fewer_bits_too():
    one, two = (estimate(16e9, 131_072, GPUS["h100-80gb"], gpus) for gpus in (1, 2))
    assert two.step_time_s(0, 16, 16_384) < one.step_time_s(0, 16, 16_384)
    assert two.step_time_s(4_096, 0, 0) < one.step_time_s(4_096, 0, 0)
    eight_bits = estimate(8e9, 131_072, GPUS["h100-80gb"], 1, parameters=8e9)
    assert eight_bits.decode_a_s < one.decode_a_s
    assert eight_bits.prefill_b_s_per_token == pytest.approx(one.prefill_b_s_per_token / 2)


def test_a_gpu_goes_by_the_first_word_of_its_name_if_that_is_one():
    assert facts_of("h100-sxm") is GPUS["h100-80gb"]
    assert facts_of("a100-pcie") is None  # of 40 or of 80 GB
    assert facts_of("cpu") is None


@pytest.mark.parametrize(("weights", "kv_bytes", "gpus"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_size_that_cannot_be_is_an_error(weights, kv_bytes, gpus):
    with pytest.raises(ValueError, match=r"above 0|cannot serve"):
        estimate(weights, kv_bytes, GPUS["l4-24gb"], gpus)
