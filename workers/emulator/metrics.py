"""An emulated server's metrics: what is counted, and the `/metrics` page with the names and labels of vLLM 0.32.

The page has every `vllm:` series of a server with default options, in vLLM's order, `_created` included. Missing are
the series of the Python process and of the HTTP framework (`python_*`, `process_*`, `http_*`); the multi-modal,
external cache and FLOPS series stay zero, and `request_prefill_kv_computed_tokens` does not subtract cached tokens.
Sixty pages are read every second, so everything but the numbers is built once: prometheus_client takes eighty times as
long for a page.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from workers.emulator.answers import Sequence
from workers.emulator.spec import InstanceSpec

LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SLEEP_OPERATION_S = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS: tuple[float, ...] = ()
"""Placeholder for the server's `token_bounds`."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
"""Sleep states, with the sleep level of each."""
TIERS = ("host", "p2p", "disk", "external_unspecified")

Value = Callable[["Metrics"], float]


def _zero(metrics: "Metrics") -> float:
    return 0.0


def _sleeps_at(level: int | None) -> Value:
    return lambda metrics: metrics.sleep_level == level


def _finished(reason: str) -> Value:
    return lambda metrics: metrics.finished[reason]


RUNNING, WAITING, HITS = attrgetter("running"), attrgetter("waiting"), attrgetter("prefix_hits")
SERIES: tuple[tuple[str, str, str, dict[str, Value]], ...] = (
    ("counter", "estimated_flops_per_gpu", "Estimated by vLLM only.", {"": _zero}),
    ("counter", "estimated_read_bytes_per_gpu", "Estimated by vLLM only.", {"": _zero}),
    ("counter", "estimated_write_bytes_per_gpu", "Estimated by vLLM only.", {"": _zero}),
    ("gauge", "num_requests_running", "Requests in model execution batches.", {"": RUNNING}),
    ("gauge", "num_requests_waiting", "Requests waiting to be processed.", {"": WAITING}),
    ("gauge", "num_requests_waiting_by_reason", "Requests waiting, by reason.",
     {'reason="capacity"': WAITING, 'reason="deferred"': _zero}),
    ("gauge", "engine_sleep_state", "Engine sleep state: awake = 0 means sleeping.",
     {f'sleep_state="{state}"': _sleeps_at(level) for state, level in SLEEP_STATES.items()}),
    ("gauge", "kv_cache_usage_perc", "KV cache usage, 1 is full.", {"": attrgetter("kv_usage")}),
    ("counter", "prefix_cache_queries", "Tokens looked up in the cache.", {"": attrgetter("prefix_queries")}),
    ("counter", "prefix_cache_hits", "Tokens found in the cache.", {"": HITS}),
    ("counter", "external_prefix_cache_queries", "Cache queries.", {"": _zero}),
    ("counter", "external_prefix_cache_hits", "Cache hits.", {"": _zero}),
    ("counter", "mm_cache_queries", "Cache queries.", {"": _zero}),
    ("counter", "mm_cache_hits", "Cache hits.", {"": _zero}),
    ("counter", "num_preemptions", "Preemptions by the engine.", {"": attrgetter("preemptions")}),
    ("counter", "prompt_tokens", "Prefill tokens processed.", {"": attrgetter("prompt_tokens")}),
    ("counter", "prompt_tokens_by_source", "Prompt tokens by source.",
     {'source="local_compute"': attrgetter("computed_tokens"), 'source="local_cache_hit"': HITS,
      'source="external_kv_transfer"': _zero}),
    ("counter", "prompt_tokens_cached", "Cached prompt tokens.", {"": HITS}),
    ("counter", "prompt_tokens_cached_by_source", "By tier.",
     {'source="device"': HITS, **{f'source="{tier}"': _zero for tier in TIERS}}),
    ("counter", "generation_tokens", "Generation tokens processed.", {"": attrgetter("generation_tokens")}),
    ("counter", "request_success", "Requests that ended, by reason.",
     {f'finished_reason="{reason}"': _finished(reason) for reason in FINISH_REASONS}),
    ("counter", "admission_rejections", "Requests rejected by a queue limit.",
     {'reason="max_num_queued_reqs"': attrgetter("rejected"), 'reason="max_num_queued_tokens"': _zero}),
)  # fmt: skip
"""Counters and gauges in vLLM's order: kind, name, text, and the value by label."""

HISTOGRAMS: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("request_prompt_tokens", TOKENS, "Prompt tokens of a request."),
    ("request_generation_tokens", TOKENS, "Generated tokens of a request."),
    ("iteration_tokens_total", STEP_TOKENS, "Tokens of an engine step."),
    ("request_max_num_generation_tokens", TOKENS, "Longest sequence of a request."),
    ("request_params_n", SEQUENCES, "The request's n."),
    ("request_params_max_tokens", TOKENS, "The request's max_tokens."),
    ("time_to_first_token_seconds", TTFT_S, "Time to first token."),
    ("inter_token_latency_seconds", ITL_S, "Time between two tokens."),
    ("request_time_per_output_token_seconds", ITL_S, "Mean time per token of a request."),
    ("e2e_request_latency_seconds", LATENCY_S, "Time from arrival to the last token."),
    ("request_queue_time_seconds", LATENCY_S, "Time in the waiting queue."),
    ("request_inference_time_seconds", LATENCY_S, "Time from first schedule to the last token."),
    ("request_prefill_time_seconds", LATENCY_S, "Time from first schedule to the first token."),
    ("request_decode_time_seconds", LATENCY_S, "Time from the first to the last token."),
    ("request_num_preemptions", PREEMPTIONS, "Preemptions of a request."),
    ("request_prefill_kv_computed_tokens", TOKENS, "Prompt tokens computed."),
)


def token_bounds(limit: int) -> tuple[float, ...]:
    """Return vLLM's buckets for lengths in tokens: 1, 2, 5, 10, 20, 50 ... up to *limit*."""
    bounds = []
    power = 1
    while power <= limit:
        bounds += [float(m * power) for m in (1, 2, 5) if m * power <= limit]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts by bucket, not cumulative; the last one is beyond all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """All counters, gauges and histograms of one server."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.running = self.waiting = 0
        self.kv_usage = 0.0
        self.sleep_level: int | None = None  # None: awake
        self.adapters = ""  # LoRA adapters of running requests
        self.preemptions = self.rejected = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens looked up in the prefix cache, and found there
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        tokens = token_bounds(spec.max_model_len)
        self.histograms = {name: Histogram(bounds or tokens) for name, bounds, _ in HISTOGRAMS}
        self.sleep_operations: dict[str, Histogram] = {}
        self._spec = spec
        self._created = f"{time.time():.7e}"
        self._parts: list[str | Callable[[], str]] = []
        self._build()

    @property
    def computed_tokens(self) -> int:
        return max(self.prompt_tokens - self.prefix_hits, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def render(self) -> bytes:
        """Return the page."""
        return "".join([part if isinstance(part, str) else part() for part in self._parts]).encode()

    def sleep_operation(self, operation: str, duration_s: float) -> None:
        """Record one sleep or wake-up; its series appear with the first one."""
        if operation not in self.sleep_operations:
            self.sleep_operations[operation] = Histogram(SLEEP_OPERATION_S)
            self._parts.clear()
            self._build()
        self.sleep_operations[operation].observe(duration_s)

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        """Count *sequence*, which is complete or aborted."""
        observe = self.observe
        self.finished[sequence.finish_reason] += 1
        admitted_s = sequence.admitted_s
        observe("e2e_request_latency_seconds", now_s - sequence.arrival_s)
        observe("request_queue_time_seconds", (now_s if admitted_s is None else admitted_s) - sequence.arrival_s)
        observe("request_num_preemptions", sequence.preemptions)
        observe("request_prompt_tokens", sequence.prompt.tokens)
        observe("request_prefill_kv_computed_tokens", sequence.prompt.tokens)
        observe("request_generation_tokens", sequence.produced)
        observe("request_params_max_tokens", sequence.max_tokens)
        if sequence.first_token_s and admitted_s is not None:
            decode_s = sequence.last_token_s - sequence.first_token_s
            observe("request_decode_time_seconds", decode_s)
            observe("request_prefill_time_seconds", sequence.first_token_s - admitted_s)
            observe("request_inference_time_seconds", sequence.last_token_s - admitted_s)
            observe("request_time_per_output_token_seconds", decode_s / max(sequence.produced - 1, 1))

    def _build(self) -> None:
        """Lay out the page as fixed text, and functions for the numbers."""
        model = f'model_name="{_escaped(self._spec.model)}"'
        common = f'engine="0",{model}'
        for kind, name, text, series in SERIES:
            self._scalars(kind, name, text, series, model if name == "admission_rejections" else common)
        for name, _, text in HISTOGRAMS:
            self._histogram(name, text, {common: self.histograms[name]})
        self._parts.append(_cache_line(self._spec))
        if self._spec.enable_lora:
            self._parts += [_typed("lora_requests_info", "gauge", "Running stats on LoRA requests."), self._lora_line]
        if self.sleep_operations:
            by_label = {f'operation="{name}"': histogram for name, histogram in self.sleep_operations.items()}
            text = "Duration of one sleep-mode operation."
            self._histogram("sleep_mode_operation_duration_seconds", text, by_label)
            text = "Sleep-mode operations currently awaited."
            self._scalars("gauge", "sleep_mode_operations_in_flight", text, dict.fromkeys(by_label, _zero), "")

    def _scalars(self, kind: str, name: str, text: str, series: dict[str, Value], common: str) -> None:
        by_labels = {",".join(filter(None, (common, label))): value for label, value in series.items()}
        shown = f"{name}_total" if kind == "counter" else name
        self._parts.append(_typed(shown, kind, text))
        self._parts += [_line(f"vllm:{shown}{{{labels}}} ", value, self) for labels, value in by_labels.items()]
        if kind == "counter":
            self._creation(name, by_labels)

    def _histogram(self, name: str, text: str, series: dict[str, Histogram]) -> None:
        self._parts.append(_typed(name, "histogram", text))
        self._parts += [_histogram_lines(name, labels, histogram) for labels, histogram in series.items()]
        self._creation(name, series)

    def _creation(self, name: str, labels: dict[str, Any]) -> None:
        """Add the start time of each series, by which Prometheus clients detect a restart."""
        lines = "".join(f"vllm:{name}_created{{{label}}} {self._created}\n" for label in labels)
        self._parts.append(_typed(f"{name}_created", "gauge", "Start of the series.") + lines)

    def _lora_line(self) -> str:
        """Return vLLM's series whose value is the time of the last step."""
        labels = f'max_lora="1",running_lora_adapters="{_escaped(self.adapters)}",waiting_lora_adapters=""'
        return f"vllm:lora_requests_info{{{labels}}} {time.time()}\n"


def _typed(name: str, kind: str, text: str) -> str:
    return f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\n"


def _line(start: str, value: Value, metrics: Metrics) -> Callable[[], str]:
    return lambda: f"{start}{float(value(metrics))}\n"


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> Callable[[], str]:
    bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    heads = [f'vllm:{name}_bucket{{le="{bound}",{labels}}} ' for bound in bounds]
    count_head, sum_head = f"vllm:{name}_count{{{labels}}} ", f"vllm:{name}_sum{{{labels}}} "

    def lines() -> str:
        parts = []
        total = 0
        for head, count in zip(heads, histogram.counts, strict=True):
            total += count
            parts.append(f"{head}{total}.0\n")
        parts.append(f"{count_head}{total}.0\n{sum_head}{histogram.sum}\n")
        return "".join(parts)

    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


CACHE_CONFIG = """
_block_size_resolved="True",block_size="{block}",cache_dtype="auto",cache_hit_alignment_tokens="None",
effective_attention_block_size="{block}",enable_mamba_shared_prefix_checkpoint="False",enable_prefix_caching="{prefixes}",
engine="0",gpu_memory_utilization="0.9",hash_block_size="None",is_attention_free="False",kv_cache_dtype_skip_layers="[]",
kv_cache_layout="None",kv_cache_max_concurrency="{concurrency}",kv_cache_memory_bytes="None",kv_cache_size_tokens="{tokens}",
kv_offloading_backend="native",kv_offloading_size="None",kv_sharing_fast_prefill="False",mamba_block_size="None",
mamba_cache_dtype="auto",mamba_cache_mode="none",mamba_page_size_padded="None",mamba_ssm_cache_dtype="float32",
num_cpu_blocks="None",num_gpu_blocks="{blocks}",num_gpu_blocks_override="None",prefix_cache_retention_interval="0",
prefix_caching_hash_algo="sha256",prefix_match_unit="None",replayssm_buffer_len="16",skip_page_size_padded="None",
sliding_window="None",swa_bounded_replay="True",use_kda_recoverssm="False",use_replayssm="False",
user_specified_block_size="False"
""".replace("\n", "")
"""Labels of `cache_config_info`: vLLM's whole configuration of the cache."""


def _cache_line(spec: InstanceSpec) -> str:
    labels = CACHE_CONFIG.format(
        block=spec.block_size_tokens,
        blocks=spec.kv_blocks,
        tokens=spec.kv_tokens,
        prefixes=spec.enable_prefix_caching,
        concurrency=round(spec.kv_tokens / spec.max_model_len, 2),
    )
    head = _typed("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    return f"{head}vllm:cache_config_info{{{labels}}} 1.0\n"
