"""Sizes of published models by the names that they are served by, as their authors publish them.

They are typed in, since no machine of the tests reaches a model hub; a form that is filled with them can be changed.
Context is what the model was trained for; weights are in the precision in which they are published.
"""

from dataclasses import dataclass
from typing import Final

from scheduling.model_task import Task


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Sizes of one model; *weights_gb* only where its layers differ in precision."""

    source: str
    parameters_billion: float
    layers: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    bits: int = 16
    weights_gb: float | None = None
    active_parameters_billion: float | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    task: Task = Task.GENERATE

    @property
    def weights_bytes(self) -> int:
        return round(1e9 * (self.weights_gb or self.parameters_billion * self.bits / 8))

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer in 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


PUBLISHED: Final = {
    "llama-3.2-1b": PublishedModel("meta-llama/Llama-3.2-1B-Instruct", 1.24, 16, 8, 64, 131_072),
    "llama-3.2-3b": PublishedModel("meta-llama/Llama-3.2-3B-Instruct", 3.21, 28, 8, 128, 131_072),
    "llama-3.1-8b": PublishedModel("meta-llama/Llama-3.1-8B-Instruct", 8.03, 32, 8, 128, 131_072),
    "llama-3.3-70b": PublishedModel("meta-llama/Llama-3.3-70B-Instruct", 70.55, 80, 8, 128, 131_072),
    "llama-3.1-405b-fp8": PublishedModel(
        "meta-llama/Llama-3.1-405B-Instruct-FP8", 405.85, 126, 8, 128, 131_072, bits=8
    ),
    "mistral-7b": PublishedModel("mistralai/Mistral-7B-Instruct-v0.3", 7.25, 32, 8, 128, 32_768),
    "mistral-small-24b": PublishedModel("mistralai/Mistral-Small-24B-Instruct-2501", 23.57, 40, 8, 128, 32_768),
    "mixtral-8x7b": PublishedModel(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, 32, 8, 128, 32_768,
        active_parameters_billion=12.9, experts=8, experts_per_token=2,
    ),
    "mixtral-8x22b": PublishedModel(
        "mistralai/Mixtral-8x22B-Instruct-v0.1", 140.6, 56, 8, 128, 65_536,
        active_parameters_billion=39.1, experts=8, experts_per_token=2,
    ),
    "phi-4": PublishedModel("microsoft/phi-4", 14.66, 40, 10, 128, 16_384),
    "qwen3-0.6b": PublishedModel("Qwen/Qwen3-0.6B", 0.6, 28, 8, 128, 40_960),
    "qwen3-4b": PublishedModel("Qwen/Qwen3-4B", 4.02, 36, 8, 128, 40_960),
    "qwen3-8b": PublishedModel("Qwen/Qwen3-8B", 8.19, 36, 8, 128, 40_960),
    "qwen3-14b": PublishedModel("Qwen/Qwen3-14B", 14.77, 40, 8, 128, 40_960),
    "qwen3-32b": PublishedModel("Qwen/Qwen3-32B", 32.76, 64, 8, 128, 40_960),
    "qwen3-30b-a3b": PublishedModel(
        "Qwen/Qwen3-30B-A3B", 30.53, 48, 4, 128, 40_960,
        active_parameters_billion=3.35, experts=128, experts_per_token=8,
    ),
    "qwen3-235b-a22b": PublishedModel(
        "Qwen/Qwen3-235B-A22B", 235.1, 94, 4, 128, 40_960,
        active_parameters_billion=22.2, experts=128, experts_per_token=8,
    ),
    "gpt-oss-20b": PublishedModel(
        "openai/gpt-oss-20b", 20.9, 24, 8, 64, 131_072, weights_gb=13.8,
        active_parameters_billion=3.6, experts=32, experts_per_token=4,
    ),
    "gpt-oss-120b": PublishedModel(
        "openai/gpt-oss-120b", 116.8, 36, 8, 64, 131_072, weights_gb=65.3,
        active_parameters_billion=5.1, experts=128, experts_per_token=4,
    ),
    "qwen3-embedding-0.6b": PublishedModel("Qwen/Qwen3-Embedding-0.6B", 0.6, 28, 8, 128, 32_768, task=Task.EMBED),
    "qwen3-embedding-8b": PublishedModel("Qwen/Qwen3-Embedding-8B", 7.57, 36, 8, 128, 40_960, task=Task.EMBED),
}  # fmt: skip
