"""Parser of vLLM's `/metrics` page.

The gateway reads up to a thousand pages of about 60 kB every second, so one regular expression finds the series it needs, in
a fifth of the time of a loop over lines. Names are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`). Unknown series and
broken lines are skipped: a page of a newer vLLM must not stop the fleet. Nor must numbers that cannot be: they count as not
said.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """One reading of a server, summed over its engines (data-parallel ranks)."""

    model_name: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0  # mean over engines
    prompt_tokens_total: float = 0.0
    generation_tokens_total: float = 0.0
    iterations_total: float = 0.0
    preemptions_total: float = 0.0
    prefix_queries_total: float = 0.0  # tokens
    prefix_hits_total: float = 0.0  # tokens
    restored_tokens_total: float = 0.0  # of prompts, from CPU memory
    restore_s_total: float = 0.0  # that this took
    sleeping: bool = False
    kv_cache_size_tokens: int = 0  # 0 when the server does not say
    num_gpu_blocks: int = 0
    block_size: int = 0
    served_total: float = 0.0  # requests whose time inside is known
    inside_s_total: float = 0.0  # that they queued and ran in the engine


MOST = 2.0**53
"""Largest plausible value: beyond it counters lose count, and sums become infinite."""
MOST_INTEGER = 2**31 - 1
NO_CACHE = "None"

_SCALARS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # before V1
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:iteration_tokens_total_count": "iterations",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_hits_total": "restored_tokens",
    "vllm:kv_offload_load_time_total": "restore_s",
    "vllm:request_queue_time_seconds_sum": "queue_s",
    "vllm:request_inference_time_seconds_sum": "inference_s",
    "vllm:request_inference_time_seconds_count": "served",
}
_OTHERS = ("vllm:engine_sleep_state", "vllm:cache_config_info")
_LINE = re.compile(rf"\n({'|'.join((*_SCALARS, *_OTHERS))})(?:\{{(.*)\}})?[ \t]+(\S+)")
"""A line of one of them: name, labels, and the value, after which a time stamp may follow."""


def parse(text: str | bytes) -> VllmMetrics:
    """Read an exposition in Prometheus' text format. Never raises on its content."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    sums = dict.fromkeys(_SCALARS.values(), 0.0)
    engines: set[str] = set()
    cache: list[str] = []
    model_name = ""
    asleep = False

    for name, labels, given in _LINE.findall("\n" + text):
        value = _value(given)
        if value is None:
            continue
        if (scalar := _SCALARS.get(name)) is not None:
            sums[scalar] += value
            if scalar == "running":
                engines.add(_label(labels, "engine"))
                model_name = model_name or _label(labels, "model_name")
        elif name == "vllm:engine_sleep_state":
            asleep = asleep or (value == 0.0 and _label(labels, "sleep_state") == "awake")
        else:
            cache.append(labels)

    return VllmMetrics(
        model_name=model_name,
        running=min(int(sums["running"]), MOST_INTEGER),
        waiting=min(int(sums["waiting"]), MOST_INTEGER),
        kv_usage_ratio=min(1.0, sums["kv_usage"] / max(len(engines), 1)),
        prompt_tokens_total=sums["prompt_tokens"],
        generation_tokens_total=sums["generation_tokens"],
        iterations_total=sums["iterations"],
        preemptions_total=sums["preemptions"],
        prefix_queries_total=sums["prefix_queries"],
        prefix_hits_total=sums["prefix_hits"],
        restored_tokens_total=sums["restored_tokens"],
        restore_s_total=sums["restore_s"],
        sleeping=asleep,
        kv_cache_size_tokens=_cache_tokens(cache),
        num_gpu_blocks=sum(_integer(_label(line, "num_gpu_blocks")) for line in cache),
        block_size=max((_integer(_label(line, "block_size")) for line in cache), default=0),
        served_total=sums["served"],
        inside_s_total=sums["queue_s"] + sums["inference_s"],
    )


def _value(given: str) -> float | None:
    try:
        value = float(given)
    except ValueError:
        return None
    return value if 0.0 <= value <= MOST else None


def _label(labels: str, name: str) -> str:
    """Return the value of label *name* of *labels*, or "". Escaped quotes are not handled; vLLM's own labels have none."""
    mark = f'{name}="'
    start = labels.find(mark)
    while start > 0 and labels[start - 1] != ",":  # `block_size` also ends `user_specified_block_size`
        start = labels.find(mark, start + 1)
    if start < 0:
        return ""
    start += len(mark)
    end = labels.find('"', start)
    return labels[start:end] if end >= 0 else ""


def _integer(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
    return value if value <= MOST_INTEGER else 0


def _cache_tokens(lines: Sequence[str]) -> int:
    """Return the KV capacity in tokens; older servers report only blocks and block size.

    Encoders have no KV cache, whatever their blocks say: its size is "None".
    """
    tokens = 0
    for line in lines:
        size = _label(line, "kv_cache_size_tokens")
        if size != NO_CACHE:
            blocks = _integer(_label(line, "num_gpu_blocks")) * _integer(_label(line, "block_size"))
            tokens += _integer(size) or blocks
    return tokens if tokens <= MOST_INTEGER else 0
