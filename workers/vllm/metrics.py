"""Parser of vLLM's `/metrics` page.

The gateway reads sixty pages of about 60 kB every second, so this is one pass over the lines that looks at nothing but
the series it needs. Names are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`). Unknown series and broken lines are
skipped: a page of a newer vLLM must not stop the fleet. Nor must numbers that cannot be: they count as not said.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram since the server's start.

    `bounds` are upper bounds, the last one infinite; `counts` are cumulative, one for each bound.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum: float = 0.0
    count: float = 0.0


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
    success_total: dict[str, float] = field(default_factory=dict)  # by finished_reason
    sleeping: bool = False
    kv_cache_size_tokens: int = 0  # 0 when the server does not say
    num_gpu_blocks: int = 0
    block_size: int = 0
    ttft_s: Histogram = Histogram()
    served_total: float = 0.0  # requests whose time inside is known
    inside_s_total: float = 0.0  # that they queued and ran in the engine
    itl_s: Histogram = Histogram()
    e2e_s: Histogram = Histogram()


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
    "vllm:request_queue_time_seconds_sum": "queue_s",
    "vllm:request_inference_time_seconds_sum": "inference_s",
    "vllm:request_inference_time_seconds_count": "served",
}
_HISTOGRAMS = {
    f"vllm:{name}_{part}": (short, part)
    for name, short in (
        ("time_to_first_token_seconds", "ttft"),
        ("inter_token_latency_seconds", "itl"),
        ("e2e_request_latency_seconds", "e2e"),
    )
    for part in ("bucket", "sum", "count")
}
_OTHERS = {"vllm:request_success_total", "vllm:engine_sleep_state", "vllm:cache_config_info"}


def parse(text: str | bytes) -> VllmMetrics:
    """Read an exposition in Prometheus' text format. Never raises on its content."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    sums = dict.fromkeys(_SCALARS.values(), 0.0)
    engines: set[str] = set()
    success: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {"ttft": {}, "itl": {}, "e2e": {}}
    totals: dict[tuple[str, str], float] = {}
    cache: list[str] = []
    model_name = ""
    asleep = False

    for line in text.split("\n"):
        if not line.startswith("vllm:"):
            continue
        brace = line.find("{")
        name = line[:brace] if brace > 0 else line.partition(" ")[0]
        scalar = _SCALARS.get(name)
        histogram = _HISTOGRAMS.get(name) if scalar is None else None
        if scalar is None and histogram is None and name not in _OTHERS:
            continue
        value = _value(line)
        if value is None:
            continue
        if scalar is not None:
            sums[scalar] += value
            if scalar == "running":
                engines.add(_label(line, "engine"))
                model_name = model_name or _label(line, "model_name")
        elif histogram is not None:
            short, part = histogram
            if part == "bucket":
                try:
                    bound = float(_label(line, "le"))
                except ValueError:
                    continue
                counts = buckets[short]
                counts[bound] = counts.get(bound, 0.0) + value
            else:
                totals[histogram] = totals.get(histogram, 0.0) + value
        elif name == "vllm:request_success_total":
            reason = _label(line, "finished_reason")
            success[reason] = success.get(reason, 0.0) + value
        elif name == "vllm:engine_sleep_state":
            asleep = asleep or (value == 0.0 and _label(line, "sleep_state") == "awake")
        else:
            cache.append(line)

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
        success_total=success,
        sleeping=asleep,
        kv_cache_size_tokens=_cache_tokens(cache),
        num_gpu_blocks=sum(_integer(_label(line, "num_gpu_blocks")) for line in cache),
        block_size=max((_integer(_label(line, "block_size")) for line in cache), default=0),
        served_total=sums["served"],
        inside_s_total=sums["queue_s"] + sums["inference_s"],
        ttft_s=_histogram(buckets["ttft"], totals, "ttft"),
        itl_s=_histogram(buckets["itl"], totals, "itl"),
        e2e_s=_histogram(buckets["e2e"], totals, "e2e"),
    )


def _value(line: str) -> float | None:
    """Return the sample's value: the first word after the labels (a time stamp may follow)."""
    end = line.rfind("}")
    words = line[end + 1 :].split() if end > 0 else line.split()[1:]
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return value if 0.0 <= value <= MOST else None


def _label(line: str, name: str) -> str:
    """Return the value of label *name*, or "". Escaped quotes are not handled; vLLM's own labels have none."""
    mark = f'{name}="'
    start = line.find(mark)
    while start > 0 and line[start - 1] not in "{,":  # `block_size` also ends `user_specified_block_size`
        start = line.find(mark, start + 1)
    if start < 0:
        return ""
    start += len(mark)
    end = line.find('"', start)
    return line[start:end] if end >= 0 else ""


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


def _histogram(buckets: dict[float, float], totals: dict[tuple[str, str], float], short: str) -> Histogram:
    bounds = tuple(sorted(buckets))
    return Histogram(
        bounds,
        tuple(buckets[bound] for bound in bounds),
        totals.get((short, "sum"), 0.0),
        totals.get((short, "count"), 0.0),
    )
