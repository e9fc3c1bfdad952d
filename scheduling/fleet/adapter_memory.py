"""Memory of a vLLM server for LoRA adapters, as `routing.adapters` and the servers themselves keep it."""

from typing import Final

MOST_ADAPTERS: Final = 256
"""LoRA adapters that an instance can hold at once."""
FROM_MEMORY_S: Final = 0.06
FROM_STORAGE_S: Final = 0.12
"""Seconds to bring an adapter onto the GPU: rank 8 on an H200 (docs/plan/gpu.md); from storage with its first call."""
