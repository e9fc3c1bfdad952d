"""Settings of an engine. Kernels import them and not the reference engine, whose changes compile nothing again."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from scheduling.compiled import uncompiled
from scheduling.fleet.adapter_memory import FROM_MEMORY_S, FROM_STORAGE_S, MOST_ADAPTERS
from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.kv_cost import USUAL_RESTORE_S, regain_s
from scheduling.fleet.profile import Profile

QueuePolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings and speed of a vLLM server. Raises ValueError naming an invalid setting."""

    max_num_seqs: int
    """Requests that run at once."""
    max_num_batched_tokens: int
    """Tokens of one iteration, prefill and decode together."""
    block_size_tokens: int
    kv_blocks: int
    """Usable blocks: one less than vLLM's `num_gpu_blocks`, of which one is never used."""
    policy: QueuePolicy
    max_model_len: int
    """Tokens that a request may have, prompt and output together."""
    profile: Profile
    prefix_caching: bool = False
    front_end: FrontEnd = NO_LIMIT
    """No limit where none is known."""
    max_loras: int = 0
    """LoRA adapters on its GPUs at once; 0: it serves none."""
    max_cpu_loras: int = 0
    """Adapters in its CPU memory, those on the GPUs included; at least as many as these."""
    adapter_storage_s: float = FROM_STORAGE_S
    """Time to bring an adapter onto the GPU that is not loaded,"""
    adapter_memory_s: float = FROM_MEMORY_S
    """and one that is in CPU memory."""
    offload_blocks: int = 0
    """KV blocks that fit into its CPU memory (vLLM's --kv-offloading-size); needs `prefix_caching`."""
    restore_s: float = USUAL_RESTORE_S
    """Time to bring blocks back from there, whatever their number, and for each token (`fleet.kv_cost`)."""
    restore_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size_tokens", "kv_blocks", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs}), or running requests would starve"
            )
        for name in ("max_loras", "max_cpu_loras"):
            if not 0 <= getattr(self, name) <= MOST_ADAPTERS:
                raise ValueError(f"{name} must be from 0 to {MOST_ADAPTERS}, not {getattr(self, name)}")
        if self.offload_blocks < 0 or (self.offload_blocks and not self.prefix_caching):
            raise ValueError(f"offload_blocks ({self.offload_blocks}) must be at least 0, and 0 without prefix_caching")
        for name in ("adapter_storage_s", "adapter_memory_s", "restore_s", "restore_s_per_token"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0 up, not {getattr(self, name)}")
        if self.policy not in get_args(QueuePolicy):
            raise ValueError(f"policy must be one of {', '.join(get_args(QueuePolicy))}, not {self.policy!r}")

    @property
    def kv_capacity_tokens(self) -> int:
        return self.kv_blocks * self.block_size_tokens

    def regain(self, tokens: int, offloaded: int) -> tuple[float, float]:
        """Return `kv_cost.regain_s` by its profile and its link."""
        of = self.profile
        prefill = of.prefill_t0_s, of.prefill_a_s, of.prefill_b_s_per_token, of.prefill_c_s_per_token2
        link = self.restore_s, self.restore_s_per_token
        return uncompiled(regain_s)(*prefill, *link, float(tokens), float(offloaded))

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold *tokens*."""
        return -(-tokens // self.block_size_tokens)
