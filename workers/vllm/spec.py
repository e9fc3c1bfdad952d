"""The specification of a server to start, a process or an emulated instance."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from scheduling.fleet.adapter_memory import MOST_ADAPTERS
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.kv_cost import MAX_OFFLOAD_GIB
from scheduling.fleet.profile import Profile
from scheduling.model_task import Task

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
"""Names of instances: each becomes a file name and a part of a URL."""
Size = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.0, le=3600.0)]


class ServerSpec(BaseModel):
    """Settings of a vLLM server, real or emulated, named after its flags; sizes in tokens, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1, max_length=200)]  # the name in requests: vLLM's --served-model-name
    task: Task = Task.GENERATE  # of the model: it generates or pools
    max_num_seqs: Size = 256
    max_num_batched_tokens: Size = 8192
    max_model_len: Size = 8192
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    max_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0  # LoRA adapters on the GPUs; 0: no limit is known
    max_cpu_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0  # in CPU memory; 0: as many as on the GPUs
    kv_offload_gib: Annotated[float, Field(ge=0.0, le=MAX_OFFLOAD_GIB)] = 0.0  # CPU memory for KV; 0: none
    max_num_queued_reqs: Annotated[int | None, Field(ge=0)] = None
    # For an emulated instance:
    profile: Profile | None = None
    front_end: FrontEnd | None = None
    block_size_tokens: Size = 16
    kv_blocks: Size = 4096
    # On in vLLM. Here it costs up to half a kilobyte of memory a KV block, which a large fleet feels.
    enable_prefix_caching: bool = False
    enable_kv_cache_events: bool = False  # publish what the prefix cache stores and removes
    enable_prompt_tokens_details: bool = False  # say in an answer's usage how much of its prompt was cached
    startup_s: Seconds = 0.0
    sleep_s: Seconds = 0.0
    """Time until its weights are in CPU memory (level 1)."""
    wake_s: Seconds = 0.0
    """Time until its weights are back from CPU memory."""
    reload_s: Seconds = 0.0
    """Time until its weights are read from storage (after level 2)."""
    adapter_storage_s: Seconds = 0.0
    """Time to bring an adapter onto the GPU that is not loaded."""
    adapter_memory_s: Seconds = 0.0
    """The same from CPU memory."""
    offload_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks that its CPU memory holds."""
    restore_s: Seconds = 0.0
    """Time to bring blocks back from there, whatever their number,"""
    restore_s_per_token: Seconds = 0.0
    """and for each token."""

    @field_serializer("front_end")
    def _known_limits(self, front_end: FrontEnd | None) -> dict[str, float] | None:
        """Leave unknown limits out: JSON has no infinity."""
        if front_end is None:
            return None
        return {name: limit for name, limit in asdict(front_end).items() if math.isfinite(limit)}


class LaunchSpec(ServerSpec):
    """A server to start."""

    name: str
    source: str = ""  # folder or repository that vLLM loads
    node: str = ""  # its name, by which the Ray launcher knows the machines
    host: str = "127.0.0.1"
    port: int = 0  # 0: the process launcher takes a free one
    tensor_parallel: int = 1
    gpus: int = 0  # of the machine; 0: unknown, and the process launcher leaves the choice to vLLM
    cordoned_gpus: tuple[str, ...] = ()  # of the machine, by name: it gets none of them
    suspect_gpus: tuple[str, ...] = ()  # it gets them last
    shares_gpus_with: tuple[str, ...] = ()  # servers of these names have the same GPUs; one at most is awake
    max_lora_rank: int = 0  # of the adapters that it may load; 0: none
    sleep_mode: bool = False  # whether it can give its GPUs' memory back while it sleeps
    gpu_memory_utilization: float = 0.9
    cpu_kv_bytes: int | None = None  # the KV cache on CPUs; None: on GPUs
    extra_args: tuple[str, ...] = ()  # further vLLM flags, for a process
    environment: Mapping[str, str] = {}  # further variables, for a process
    api_key: str = ""  # that it asks for; "": none
