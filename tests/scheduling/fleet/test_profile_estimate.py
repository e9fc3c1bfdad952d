"""Estimated profiles against measured ones: vLLM's own series, and the fits that the demo is seeded with."""

import tomllib
from dataclasses import asdict, replace

import pytest

from controlplane.fleet.demo import FILE
from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_estimate import GPUS, Sizes, estimate, facts_of

DEMO = tomllib.loads(FILE.read_text())
LLAMA_70B = Sizes(70.6e9, 327_680, 70.6e9, layers=80)  # in 8 bits
QWEN_32B = Sizes(65.6e9, 262_144, 32.8e9, layers=64)
LLAMA_8B = Sizes(16.06e9, 131_072, 8.03e9, layers=32)
MINIMAX = Sizes(230e9, 253_952, 230e9, 10e9, 62, experts=256, experts_per_token=8)  # in 8 bits
# Measured times between tokens of vLLM 0.12 to 0.19 (aiconfigurator, April 2026): model, GPU, GPUs of an instance, clients,
# tokens of a prompt and of an output, seconds.
SERVED = (
    (LLAMA_70B, "h100-80gb", 2, 16, 1_024, 1_024, 0.01974),
    (LLAMA_70B, "h100-80gb", 8, 32, 1_024, 8_192, 0.01286),
    (LLAMA_70B, "h200-141gb", 1, 8, 1_024, 1_024, 0.02256),
    (LLAMA_70B, "b200-180gb", 4, 16, 8_192, 1_024, 0.01207),
    (QWEN_32B, "h100-80gb", 2, 8, 1_024, 1_024, 0.0159),
    (QWEN_32B, "h100-80gb", 4, 64, 1_024, 1_024, 0.01731),
    (MINIMAX, "b200-180gb", 4, 16, 1_024, 1_024, 0.01),
    (MINIMAX, "h200-141gb", 8, 64, 1_024, 1_024, 0.01782),
)
GPT_OSS = Sizes(116.8e9 * 0.5625, 73_728, 116.8e9, 5.1e9, 36, experts=128, experts_per_token=4)  # in 4 bits
# Measured times to the first token of the same engines: tokens of a prompt and its share of other clients' prompts.
MIXTURES_FIRST_TOKENS = (
    (MINIMAX, "b200-180gb", 4, 1_239, 0.061),
    (MINIMAX, "b200-180gb", 4, 10_127, 0.249),
    (MINIMAX, "h200-141gb", 8, 3_246, 0.148),
    (GPT_OSS, "h100-80gb", 4, 2_099, 0.062),
    (GPT_OSS, "h200-141gb", 1, 9_912, 0.408),
    (GPT_OSS, "b200-180gb", 8, 1_526, 0.031),
)
# Our own measurements: vLLM 0.26, Llama 3.1 8B on one H100. Sequences, tokens of context, seconds; prompt, seconds.
STEPS = ((1, 176, 0.006415), (8, 8_576, 0.006858), (32, 5_632, 0.006953))
FIRST_TOKENS = ((16, 0.0176), (512, 0.0225), (2_048, 0.055), (8_192, 0.222), (12_288, 0.356))


@pytest.mark.parametrize(("sizes", "gpu", "tensor_parallel", "clients", "prompt", "output", "seconds"), SERVED)
def test_tokens_come_as_vllm_was_measured(sizes, gpu, tensor_parallel, clients, prompt, output, seconds):
    """As many steps as there are other clients include the prefill of one of their prompts."""
    profile = estimate(sizes, GPUS[gpu], tensor_parallel)
    share = (clients - 1) / output
    plain = profile.step_time_s(0, clients, clients * (prompt + output // 2))
    mixed = profile.step_time_s(prompt, clients, clients * (prompt + output // 2))
    assert (1 - share) * plain + share * mixed == pytest.approx(seconds, rel=0.3 if sizes.experts else 0.15)


@pytest.mark.parametrize(("sizes", "gpu", "tensor_parallel", "tokens", "seconds"), MIXTURES_FIRST_TOKENS)
def test_first_tokens_of_mixtures_come_as_vllm_was_measured(sizes, gpu, tensor_parallel, tokens, seconds):
    profile = estimate(sizes, GPUS[gpu], tensor_parallel)
    assert profile.step_time_s(tokens, 0, 0) == pytest.approx(seconds, rel=0.4)


def test_steps_and_first_tokens_are_those_that_we_measured():
    profile = estimate(LLAMA_8B, GPUS["h100-80gb"], 1)
    for batch, context, seconds in STEPS:
        assert profile.step_time_s(0, batch, context) == pytest.approx(seconds, rel=0.1)
    for tokens, seconds in FIRST_TOKENS:
        assert profile.step_time_s(tokens, 0, 0) == pytest.approx(seconds, rel=0.1)


def test_the_demos_embedding_model_has_the_estimated_profile():
    (row,) = (row for row in DEMO["profiles"] if row.get("estimated"))
    (sizes,) = (model for model in DEMO["models"] if model["name"] == row["model"])
    # Qwen3 Embedding 0.6B: 28 layers, 595,776,512 parameters.
    of_model = Sizes(sizes["weights_bytes"], sizes["kv_bytes_per_token"], 595_776_512, layers=28)
    made = estimate(of_model, GPUS[row["gpu_type"]], row["tensor_parallel"])
    assert {name: row[name] for name in made.__dataclass_fields__} == pytest.approx(asdict(made), rel=1e-5)


@pytest.mark.parametrize(
    "measured",
    [row for row in DEMO["profiles"] if not row.get("estimated")],
    ids=lambda row: f"{row['model']}-{row['gpu_type']}-{row['tensor_parallel']}",
)
def test_older_measurements_are_within_a_factor_of_six(measured):
    """Splitwise's and SageServe's engines of 2023 and 2024 have more overhead per step, which grows with the GPUs."""
    known = Profile(**{name: value for name, value in measured.items() if name in Profile.__dataclass_fields__})
    (sizes,) = (row for row in DEMO["models"] if row["name"] == measured["model"])
    of_model = Sizes(sizes["weights_bytes"], sizes["kv_bytes_per_token"])
    profile = estimate(of_model, GPUS[measured["gpu_type"]], measured["tensor_parallel"])
    steps = [(tokens, 0, 0) for tokens in (512, 2_048, 8_192)] + [(0, batch, 512 * batch) for batch in (1, 16, 32)]
    for step in steps:
        assert 1 / 6 < profile.step_time_s(*step) / known.step_time_s(*step) < 2, step


def test_more_gpus_are_faster_and_fewer_bits_too():
    one, two = (estimate(LLAMA_8B, GPUS["h100-80gb"], gpus) for gpus in (1, 2))
    assert two.step_time_s(0, 16, 16_384) < one.step_time_s(0, 16, 16_384)
    assert two.step_time_s(4_096, 0, 0) < one.step_time_s(4_096, 0, 0)
    eight_bits = estimate(Sizes(8.03e9, 131_072, 8.03e9, layers=32), GPUS["h100-80gb"], 1)
    assert eight_bits.decode_a_s < one.decode_a_s
    assert eight_bits.prefill_b_s_per_token < one.prefill_b_s_per_token


def test_a_mixture_reads_the_experts_that_its_batch_hits():
    """Of 256 experts with eight per token, a batch of 4 hits an eighth and one of 64 all but an eighth."""
    assert [MINIMAX.read_bytes(batch) / 230e9 for batch in (1, 4, 64)] == pytest.approx([0.043, 0.13, 0.87], rel=0.05)
    few, many = (estimate(MINIMAX, GPUS["h200-141gb"], 8, most) for most in (4, 128))
    assert few.step_time_s(0, 4, 4_096) < many.step_time_s(0, 4, 4_096) < many.step_time_s(0, 128, 4_096)
    alone, dense = (
        estimate(sizes, GPUS["h200-141gb"], 1) for sizes in (MINIMAX, replace(MINIMAX, active_parameters=0.0))
    )
    assert dense.prefill_b_s_per_token == pytest.approx(23 * alone.prefill_b_s_per_token)


def test_a_line_goes_through_a_single_batch():
    only = estimate(LLAMA_8B, GPUS["h100-80gb"], 1, 1)
    assert only.decode_b_s_per_sequence == 0.0
    assert only.decode_a_s == pytest.approx(0.0064, rel=0.05)


def test_unknown_layers_are_those_of_published_models():
    for known in (LLAMA_8B, LLAMA_70B, QWEN_32B, MINIMAX):
        without = Sizes(known.weights_bytes, known.kv_bytes_per_token, known.parameters, known.active_parameters)
        assert without.depth == pytest.approx(known.layers, rel=0.2)


def test_a_gpu_goes_by_the_first_word_of_its_name_if_that_is_one():
    assert facts_of("h100-sxm") is GPUS["h100-80gb"]
    assert facts_of("a100-pcie") is None  # of 40 or of 80 GB
    assert facts_of("cpu") is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"weights_bytes": 0}, "weights_bytes must be at least 1"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token must be at least 1"),
        ({"weights_bytes": float("nan")}, "weights_bytes must be at least 1"),
        ({"active_parameters": 2e10}, "of 8e\\+09 parameters 2e\\+10 cannot be active"),
        ({"experts": 8, "experts_per_token": 9}, "of 8 experts a token cannot take 9"),
    ],
)
def test_a_size_that_cannot_be_is_an_error(sizes, words):
    with pytest.raises(ValueError, match=words):
        Sizes(**{"weights_bytes": 16e9, "kv_bytes_per_token": 131_072} | sizes)


def test_no_gpus_serve_nothing():
    with pytest.raises(ValueError, match="0 GPUs cannot serve"):
        estimate(LLAMA_8B, GPUS["l4-24gb"], 0)
