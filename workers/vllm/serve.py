"""Command line and environment of a vLLM server, and its parser's verdict on flags."""

import hashlib
import ipaddress
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from workers.vllm.spec import LaunchSpec

MODULE = "vllm.entrypoints.openai.api_server"
PARSER = Path(__file__).with_name("parse_arguments.py")
PARSE_LIMIT_S = 120.0  # the parser imports PyTorch: seconds on a quiet machine, a minute on a busy one
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
QUIET = "--disable-access-log-for-endpoints"
NOT_LOGGED = "/health,/metrics"  # asked every second
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
KV_BYTES = "--kv-cache-memory-bytes"
RUNNER = "--runner"
SLEEP_MODE = "--enable-sleep-mode"
LORA = "--enable-lora"
KV_OFFLOADING = "--kv-offloading-size"
KV_EVENTS = "--kv-events-config"
KV_EVENTS_ON = json.dumps(
    {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",  # a free port of its host, which it reports by /kv_event_sources
        "replay_endpoint": "tcp://*:0",
        "buffer_steps": 100_000,  # what a gateway that starts later can still learn of its cache
    },
    separators=(",", ":"),
)
DETAILS = "--enable-prompt-tokens-details"
HOST_IP = "VLLM_HOST_IP"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""


def command(vllm_python: str) -> list[str]:
    """Return `vllm serve` of that Python's environment; its module where the script does not work.

    The script asks for the metadata of a package named `vllm`, which the CPU build (`vllm-cpu`) does not have.
    """
    scripts = Path(vllm_python).parent
    script = scripts / "vllm"
    known = any(scripts.parent.glob("lib/python*/site-packages/vllm-[0-9]*.dist-info"))
    return [str(script), "serve"] if known and os.access(script, os.X_OK) else [vllm_python, "-m", MODULE]


def arguments(vllm_python: str, spec: LaunchSpec, port: int) -> list[str]:
    """Return the whole command line."""
    return [*begin(vllm_python, spec.source), *flags(spec, port)]


def begin(vllm_python: str, source: str) -> list[str]:
    """Return the command line up to its flags."""
    start = command(vllm_python)
    return [*start, *([source] if start[1] == "serve" else ["--model", source])]


def environment(spec: LaunchSpec, gpus: Sequence[str]) -> dict[str, str]:
    """Return our environment, with the variables of *spec*, and *gpus* as those that it sees."""
    seen = {VISIBLE_GPUS: ",".join(gpus)} if gpus else {}  # or each would take the first ones
    together = {**os.environ, **seen, **variables(spec)}
    together.pop("DJANGO_SETTINGS_MODULE", None)
    return together


def variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that every server needs and those of the deployment.

    The token is in here and not on the command line, which all users of the machine see.
    """
    return {
        "PYTHONSAFEPATH": "1",  # our own folders must not hide vLLM's packages
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # sleep and wake-up; keep the port inside your own network
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if spec.max_loras else {}),
        **({"VLLM_API_KEY": spec.api_key} if spec.api_key else {}),
        **({HOST_IP: spec.host} if spec.enable_kv_cache_events and _is_address(spec.host) else {}),
        **spec.environment,
    }


def problem_with(vllm_python: str, spec: LaunchSpec, cache: Path | None = None) -> str | None:
    """Return the complaint of vLLM's own parser about *spec*'s further flags, naming the argument; "" if it takes them.

    None if the parser cannot be run: no such environment, or no answer. Verdicts are cached in the folder *cache* until
    the environment's packages change.
    """
    if not spec.extra_args:
        return ""
    lines = {"own": ["--model", spec.source or spec.model, *_own_flags(spec, 8000)], "extra": list(spec.extra_args)}
    question = json.dumps(lines)
    kept = cache / hashlib.sha256(f"{_identity(vllm_python)} {question}".encode()).hexdigest() if cache else None
    if kept is not None and kept.is_file():
        return kept.read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [vllm_python, str(PARSER), question],
            env={**environment(spec, ()), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=PARSE_LIMIT_S,
            check=False,
        )
        problem = str(json.loads(done.stdout)["error"])
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError, KeyError, TypeError):
        return None
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(problem, encoding="utf-8")
    return problem


def flags(spec: LaunchSpec, port: int) -> list[str]:
    """Return the flags of *spec*, its further ones last."""
    quiet = [] if any(word.startswith(QUIET) for word in spec.extra_args) else [QUIET, NOT_LOGGED]
    return [*_own_flags(spec, port), *quiet, *spec.extra_args]


def _own_flags(spec: LaunchSpec, port: int) -> list[str]:
    flags = ["--served-model-name", spec.model, "--host", spec.host, "--port", str(port)]
    flags += ["--max-num-seqs", str(spec.max_num_seqs), "--max-model-len", str(spec.max_model_len)]
    flags += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens)]
    flags += _memory(spec)
    flags += ["--scheduling-policy", spec.scheduling_policy]
    if spec.task.pools and RUNNER not in spec.extra_args:
        flags += [RUNNER, "pooling"]
    if spec.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(spec.tensor_parallel)]
    if spec.sleep_mode and SLEEP_MODE not in spec.extra_args:
        flags.append(SLEEP_MODE)
    if spec.max_loras and LORA not in spec.extra_args:
        in_memory = max(spec.max_loras, spec.max_cpu_loras)
        rank = next((each for each in LORA_RANKS if each >= spec.max_lora_rank), LORA_RANKS[-1])
        flags += [LORA, "--max-loras", str(spec.max_loras), "--max-cpu-loras", str(in_memory)]
        flags += ["--max-lora-rank", str(rank)]
    if spec.kv_offload_gib and not any(word.startswith(KV_OFFLOADING) for word in spec.extra_args):
        flags += [KV_OFFLOADING, f"{spec.kv_offload_gib:g}"]
    if spec.enable_kv_cache_events and not any(word.startswith(KV_EVENTS) for word in spec.extra_args):
        flags += [KV_EVENTS, KV_EVENTS_ON]
    if spec.enable_prompt_tokens_details and DETAILS not in spec.extra_args:
        flags.append(DETAILS)
    if spec.max_num_queued_reqs is not None:
        flags += ["--max-num-queued-reqs", str(spec.max_num_queued_reqs)]
    return flags


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _memory(spec: LaunchSpec) -> list[str]:
    """Return the memory flags: a share of each GPU, or on CPUs the size of the KV cache."""
    if spec.cpu_kv_bytes is None:
        return ["--gpu-memory-utilization", f"{spec.gpu_memory_utilization:g}"]
    given = KV_SPACE in {**os.environ, **spec.environment} or any(word.startswith(KV_BYTES) for word in spec.extra_args)
    return [] if given else [KV_BYTES, str(spec.cpu_kv_bytes)]


def _identity(vllm_python: str) -> str:
    """Return the environment's state: installing a package changes the time of its folder."""
    folders = sorted(Path(vllm_python).parent.parent.glob("lib/python*/site-packages"))
    return f"{vllm_python} {[folder.stat().st_mtime_ns for folder in folders]}"
