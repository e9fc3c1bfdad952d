"""A vLLM server with random weights of Llama 3.1 8B's shape: `python -m tests.bench._gpu_server FOLDER PORT`.

Run it by the Python that has vLLM. Timing needs no trained weights. The tokenizer has one word a token (`w0`, `w1`, ...),
so a prompt of n words has n tokens. With `--adapters N` it writes N random LoRA adapters of rank 8 to FOLDER/adapters and
serves with LoRA.
"""

import argparse
import json
import os
import sys
from pathlib import Path

MODEL = "llama-3.1-8b"
VOCABULARY, HIDDEN, KV, INNER, LAYERS = 128_256, 4_096, 1_024, 14_336, 32
CONTEXT_TOKENS = 16_384
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Inputs and outputs of the layers that an adapter changes."""
RANK = 8
GPU_ADAPTERS, CPU_ADAPTERS = 4, 8


def write_shape(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": VOCABULARY, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "torch_dtype": "bfloat16", "bos_token_id": 128_000, "eos_token_id": 128_001,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131_072, "bos_token": "w128000",
        "eos_token": "w128001", "unk_token": "w0", "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def write_adapters(folder: Path, count: int) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, inputs, dtype=torch.bfloat16) * 0.01
            tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, RANK, dtype=torch.bfloat16) * 0.01
    targets = [name.partition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": targets, "bias": "none",
              "base_model_name_or_path": MODEL, "task_type": "CAUSAL_LM", "lora_dropout": 0.0}  # fmt: skip
    for number in range(count):
        adapter = folder / f"a{number}"
        adapter.mkdir(parents=True, exist_ok=True)
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--more", default="", help="further arguments of vLLM")
    options = parser.parse_args()
    write_shape(options.folder / "model")
    lora = []
    if options.adapters:
        write_adapters(options.folder / "adapters", options.adapters)
        lora = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", str(GPU_ADAPTERS),
                "--max-cpu-loras", str(CPU_ADAPTERS)]  # fmt: skip
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(options.folder / "model"),
               "--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "bfloat16",
               "--max-model-len", str(CONTEXT_TOKENS), "--port", options.port, "--host", "127.0.0.1",
               "--scheduling-policy", "priority", "--gpu-memory-utilization", "0.9", "--max-num-seqs", "256",
               *lora, *options.more.split()]  # fmt: skip
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
