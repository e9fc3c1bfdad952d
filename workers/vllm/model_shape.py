"""Sizes of a model: weights, KV cache and context, read from its `config.json` as vLLM would load it.

The configuration is read by transformers' own AutoConfig, from a folder or a repository of the hub (offline: from its
cache). No code of the repository is run and no weights are loaded. Weights are counted from the headers of safetensors
files where there are some, else from the architecture, built on PyTorch's "meta" device.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecasting import models_extra
from scheduling.model_task import Task

BYTES_16_BIT = 2
# Bytes of an element in safetensors files; those of half a byte are stored packed, as U8 or I32.
ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
RECURRENT = {"mamba", "mamba2", "linear_attention", "recurrent", "ssm", "conv", "moe", "mlp"}
"""Layers without a KV cache: their state of a sequence does not grow with it."""
SLIDING = {"sliding_attention", "chunked_attention", "local_attention"}
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
ROPES_WITHIN_CONTEXT = {"default", "su", "longrope", "llama3", "mrope", "proportional"}
"""Scalings that `max_position_embeddings` already includes (vLLM's `_get_and_verify_max_len`)."""


TRANSCRIBING = frozenset(
    {
        "WhisperForConditionalGeneration",
        "CohereAsrForConditionalGeneration",
        "FireRedASR2ForConditionalGeneration",
        "FunASRForConditionalGeneration",
        "MossTranscribeDiarizeForConditionalGeneration",
    }
)
"""Architectures that transcribe and nothing else (`supports_transcription_only` in `vllm/model_executor/models`)."""


class ShapeError(Exception):
    """The sizes are unknown; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes over all GPUs of an instance. KV bytes a token are as vLLM reports them: a full context over its length."""

    architecture: str
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    task: Task = Task.GENERATE


def read(source: str, *, context_tokens: int | None = None, kv_bytes: int | None = None) -> ModelShape:
    """Return the shape of the model in folder or repository *source*.

    *context_tokens*: the served context, if shorter than the model's. *kv_bytes*: bytes of an element of the KV cache
    (vLLM's --kv-cache-dtype), if not the compute type's. Raises ShapeError.
    """
    if reason := models_extra.missing_for(f"Reading the sizes of {source} from its config.json"):
        raise ShapeError(f"{reason[:-1]}, or give them.")
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ShapeError(f"The config.json of {source} cannot be read: {first[0]}") from error
    text = config.get_text_config()
    context = context_tokens or _context(text)
    encoder_tokens = _of_sentence_transformers(source, "sentence_bert_config.json").get("max_seq_length")
    if encoder_tokens and not context_tokens:
        context = min(context or encoder_tokens, int(encoder_tokens))
    if not context:
        raise ShapeError(f"The config.json of {source} does not say how long its context is: give context_tokens.")
    return ModelShape(
        architecture=(config.architectures or [type(config).__name__])[0],
        weights_bytes=_weights(source, config),
        kv_bytes_per_token=_kv_bytes_per_token(text, context, kv_bytes or _compute_bytes(config)),
        context_tokens=context,
        task=_task(source, config),
    )


def _task(source: str, config: Any) -> Task:
    """Return the task that vLLM chooses by itself (`ModelConfig._get_default_runner_type`), by architecture and files."""
    architecture = (config.architectures or [""])[0]
    if architecture in TRANSCRIBING:
        return Task.TRANSCRIPTION
    if architecture.endswith("ForSequenceClassification"):
        return Task.SCORE if config.num_labels == 1 else Task.CLASSIFY
    if architecture.endswith("ForTokenClassification"):
        return Task.TOKEN_CLASSIFY
    if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        return Task.EMBED
    return Task.EMBED if _of_sentence_transformers(source, "modules.json") else Task.GENERATE


def _of_sentence_transformers(source: str, name: str) -> Any:
    """Return the JSON of *name*, a file of sentence-transformers, in the folder or the hub's cache; empty without it."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    file = folder / name if folder.is_dir() else try_to_load_from_cache(source, name)
    try:
        return json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str | Path) else {}
    except (OSError, ValueError):
        return {}


def _context(config: Any) -> int:
    """Return the tokens that positions reach, scaled as vLLM scales them; 0 if the configuration does not say."""
    known = [getattr(config, name, None) for name in CONTEXT_NAMES]
    context = min((int(value) for value in known if value), default=0)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type in ROPES_WITHIN_CONTEXT or "factor" not in rope:
        return context
    if rope_type == "yarn":
        context = int(rope.get("original_max_position_embeddings") or context)
    return int(context * float(rope["factor"]))


def _compute_bytes(config: Any) -> int:
    """Return bytes of an element under vLLM's `--dtype auto`: the model's own type, but 32-bit models in 16 bits."""
    dtype = str(getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or "")
    return 1 if "float8" in dtype else BYTES_16_BIT


def _kv_bytes_per_token(config: Any, context: int, element_bytes: int) -> int:
    """Return bytes of a sequence of *context* tokens over its length: sliding layers keep no more than their window."""
    tokens = sum(_kept_tokens(config, kind, context) for kind in _layers(config))
    return max(1, math.ceil(tokens * _layer_elements(config) * element_bytes / context))


def _layer_elements(config: Any) -> int:
    """Return the elements that one layer keeps of a token."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:  # multi-head latent attention: one compressed vector and the shared rotary key
        return int(rank) + int(getattr(config, "qk_rope_head_dim", 0) or 0)
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * _kv_heads(config, heads) * head


def _kv_heads(config: Any, heads: int) -> int:
    if getattr(config, "new_decoder_architecture", False):  # Falcon 40B and 180B
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):  # Falcon 7B, StarCoder
        return 1
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _layers(config: Any) -> Iterator[str]:
    """Return the kind of each layer that has a KV cache."""
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not kinds:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"] * count
    shared = int(getattr(config, "num_kv_shared_layers", 0) or 0)  # the last ones use an earlier layer's cache
    return (kind for kind in list(kinds)[: count - shared] if kind not in RECURRENT)


def _kept_tokens(config: Any, kind: str, context: int) -> int:
    if kind not in SLIDING:
        return context
    window = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    window = window or getattr(config, "sliding_window", None)
    return min(context, int(window)) if window else context


def _weights(source: str, config: Any) -> int:
    folder = Path(source)
    files = _weight_files(folder) if folder.is_dir() else _cached_weight_files(source)
    quantised = getattr(config, "quantization_config", None) is not None
    if files:
        return sum(_stored_bytes(file, as_stored=quantised) for file in files)
    return _built_bytes(source, config)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that vLLM would load: those of the index, where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
        return files if all(file.is_file() for file in files) else []
    return [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("consolidated")]


def _cached_weight_files(repository: str) -> list[Path]:
    """Return the weight files of a repository in the hub's cache; none if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("model.safetensors.index.json", "model.safetensors"):
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return _weight_files(Path(cached).parent)
    return []


def _stored_bytes(file: Path, *, as_stored: bool) -> int:
    """Return bytes of the tensors in *file*. 32-bit floats of a model that is not quantised are loaded in 16 bits."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
    except (OSError, struct.error, ValueError, MemoryError, OverflowError) as error:
        raise ShapeError(f"{file} is no safetensors file: {error}") from error
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, end = tensor["data_offsets"]
        stored = end - first
        floats = tensor["dtype"] in {"F32", "F64"} and not as_stored
        total += stored * BYTES_16_BIT // ELEMENT_BYTES[tensor["dtype"]] if floats else stored
    return total


def _built_bytes(source: str, config: Any) -> int:
    """Return bytes of weights by architecture: parameters in 16 bits, matrices in the bits of the quantisation."""
    import torch
    import transformers

    bits = _quantised_bits(getattr(config, "quantization_config", None))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (ValueError, ImportError, TypeError, AttributeError, KeyError) as error:
        raise ShapeError(f"The weights of {source} cannot be counted: give weights_bytes.") from error
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    total_bits = 0
    for parameter in model.parameters():  # shared ones once
        packed = bits is not None and parameter.ndim > 1 and id(parameter) not in embeddings
        total_bits += parameter.numel() * (bits if packed and bits else 8 * BYTES_16_BIT)
    return math.ceil(total_bits / 8)


def _quantised_bits(settings: Any) -> int | None:
    """Return bits of a quantised weight, without scales and zero points (some percent); None if not quantised."""
    if settings is None:
        return None
    values: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    groups = values.get("config_groups") or {}
    for group in groups.values():  # compressed-tensors, ModelOpt
        if bits := ((group or {}).get("weights") or {}).get("num_bits"):
            return int(bits)
    if bits := values.get("bits") or values.get("w_bit"):  # GPTQ, AWQ
        return int(bits)
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        return 4
    method = f"{values.get('quant_method', '')} {values.get('quant_algo', '')}".lower()
    return 4 if "4" in method else 8 if "8" in method else None
