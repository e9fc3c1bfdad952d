"""Sizes of models by their config.json: published shapes of the common architectures, against published figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.vllm import tiny_model
from workers.vllm.model_shape import ShapeError, read

pytestmark = pytest.mark.nightly  # transformers alone takes seconds to import

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_2_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
FALCON_7B = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "bias": False,
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
GPT_2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """`folder(configuration)`: a folder with that config.json and nothing else."""

    def make(configuration: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(configuration))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("configuration", "parameters", "kv_bytes_per_token", "context_tokens"),
    [
        (LLAMA_3_1_8B, 8_030_261_248, 131_072, 131_072),  # its rope scaling is within the positions
        (LLAMA_2_70B, 68_976_648_192, 327_680, 4_096),
        (MISTRAL_7B_V01, 7_241_732_096, 131_072 // 8, 32_768),  # a window of an eighth of the context
        (DEEPSEEK_V2_LITE, 15_706_484_224, 27 * (512 + 64) * 2, 163_840),
        (GEMMA_3_1B, 999_885_952, None, 32_768),
        (FALCON_7B, 6_921_720_704, 2 * 32 * 64 * 2, 2_048),  # one head of keys and values
        (GPT_2, 124_439_808, 2 * 12 * 768 * 2, 1_024),
        (QWEN_2_5_7B, 7_615_616_512, 2 * 28 * 4 * 128 * 2, 32_768),  # a window that is not used
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_published_shapes(
    folder: Any, configuration: dict[str, Any], parameters: int, kv_bytes_per_token: int | None, context_tokens: int
) -> None:
    shape = read(folder(configuration))
    assert shape.architecture == configuration["architectures"][0]
    assert shape.weights_bytes == 2 * parameters
    assert shape.context_tokens == context_tokens
    if kv_bytes_per_token is not None:
        assert shape.kv_bytes_per_token == kv_bytes_per_token


def test_layers_with_a_window_count_as_much_as_they_keep(folder: Any) -> None:
    layer = 2 * 1 * 256 * 2
    full = sum(number % 6 == 5 for number in range(26))
    source = folder(GEMMA_3_1B)
    at_32k = (full + (26 - full) * 512 / 32_768) * layer
    assert read(source).kv_bytes_per_token == pytest.approx(at_32k, abs=1)
    assert read(source, context_tokens=512).kv_bytes_per_token == 26 * layer


def test_quantised_weights_are_smaller_and_their_cache_is_not(folder: Any) -> None:
    plain = read(folder(LLAMA_3_1_8B))
    four_bits = read(folder({**LLAMA_3_1_8B, "quantization_config": GPTQ}))
    embeddings = 2 * 2 * 128_256 * 4096  # in and out stay in 16 bits
    matrices = plain.weights_bytes - embeddings
    assert four_bits.weights_bytes == pytest.approx(embeddings + matrices / 4, rel=1e-3)
    assert four_bits.kv_bytes_per_token == plain.kv_bytes_per_token
    fp8 = read(folder({**LLAMA_3_1_8B, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}))
    assert fp8.weights_bytes == pytest.approx(embeddings + matrices / 2, rel=1e-3)


def test_a_cache_in_eight_bits(folder: Any) -> None:
    assert read(folder(LLAMA_3_1_8B), kv_bytes=1).kv_bytes_per_token == 65_536


def test_positions_stretched_by_yarn(folder: Any) -> None:
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert read(folder({**QWEN_2_5_7B, "rope_scaling": stretched})).context_tokens == 131_072


@pytest.mark.nightly
def test_files_are_counted_where_there_are_some(tmp_path: Path) -> None:
    """The tiny model is stored in 32 bits and loaded in 16. vLLM's log of it says: 2,097,152 tokens in 1 GiB."""
    tiny_model.write(tmp_path)
    shape = read(str(tmp_path))
    assert shape.kv_bytes_per_token == 2**30 // 2_097_152
    assert shape.context_tokens == tiny_model.CONTEXT_TOKENS
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert stored / 2 - 4096 < shape.weights_bytes < stored / 2
    (tmp_path / "model.safetensors").unlink()
    assert read(str(tmp_path)).weights_bytes == shape.weights_bytes


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (None, "The config.json of .* cannot be read"),
        ({"model_type": "no-such-type"}, "cannot be read"),
        ({**GPT_2, "n_positions": "many"}, "cannot be read: .*n_positions"),
        ({"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 2}, "give context_tokens"),
    ],
)
def test_what_is_not_known_is_said(folder: Any, tmp_path: Path, configuration: Any, said: str) -> None:
    source = str(tmp_path) if configuration is None else folder(configuration)
    with pytest.raises(ShapeError, match=said):
        read(source)


def test_a_broken_file_is_named(folder: Any, tmp_path: Path) -> None:
    source = folder(LLAMA_3_1_8B)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ShapeError, match=r"model.safetensors is no safetensors file"):
        read(source)


@pytest.mark.parametrize(
    ("architecture", "labels", "files", "task"),
    [
        ("LlamaForCausalLM", 2, {}, "generate"),
        ("GPT2LMHeadModel", 2, {}, "generate"),
        ("LlamaForCausalLM", 2, {"modules.json": "[{}]"}, "embed"),  # Qwen3-Embedding and others are such
        ("BertModel", 2, {}, "embed"),
        ("BertForSequenceClassification", 1, {}, "score"),
        ("BertForSequenceClassification", 3, {}, "classify"),
        ("BertForTokenClassification", 9, {}, "token_classify"),
    ],
)
def test_the_task_is_the_one_that_vllm_chooses(
    folder: Any, architecture: str, labels: int, files: dict[str, str], task: str
) -> None:
    labelled = {"architectures": [architecture], "num_labels": labels}
    source = folder(LLAMA_3_1_8B | labelled)
    for name, text in files.items():
        (Path(source) / name).write_text(text)
    assert read(source).task == task


def test_an_encoder_reads_no_more_than_its_settings_say(folder: Any) -> None:
    source = folder(LLAMA_3_1_8B | {"architectures": ["BertModel"]})
    (Path(source) / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read(source).context_tokens == 256
    assert read(source, context_tokens=128).context_tokens == 128
