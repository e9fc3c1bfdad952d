"""The specification of a server to start, a process or an emulated instance."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from workers.vllm.tasks import Task

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
"""Names of instances: each becomes a file name and a part of a URL."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A server to start. Fields are named after vLLM's flags; sizes are in tokens, times in seconds."""

    name: str
    model: str  # the name in requests: vLLM's --served-model-name
    source: str = ""  # folder or repository that vLLM loads
    task: Task = Task.GENERATE  # of the model: it generates or pools
    host: str = "127.0.0.1"
    port: int = 0  # 0: the process launcher takes a free one
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    tensor_parallel: int = 1
    gpus: int = 0  # of the machine; 0: unknown, and the process launcher leaves the choice to vLLM
    shares_gpus_with: tuple[str, ...] = ()  # servers of these names have the same GPUs; one at most is awake
    sleep_mode: bool = False  # whether it can give its GPUs' memory back while it sleeps
    gpu_memory_utilization: float = 0.9
    cpu_kv_bytes: int | None = None  # the KV cache on CPUs; None: on GPUs
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    max_num_queued_reqs: int | None = None
    extra_args: tuple[str, ...] = ()  # further vLLM flags, for a process
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables, for a process
    api_key: str = ""  # that it asks for; "": none
    # For an emulated instance:
    profile: Profile | None = None
    front_end: FrontEnd | None = None
    block_size_tokens: int = 16
    kv_blocks: int = 4096
    prefix_caching: bool = False
    startup_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    reload_s: float = 0.0
