"""An emulated server's metrics: what is counted, and the `/metrics` page with the names and labels of vLLM 0.32.

The page has every `vllm:` series of a server with default options, in vLLM's order, `_created` included. Missing are the
series of the Python process and of the HTTP framework (`python_*`, `process_*`, `http_*`); the multi-modal, external
cache and FLOPS series stay zero, and `request_prefill_kv_computed_tokens` does not subtract cached tokens. Sixty pages
are read every second, so everything but the numbers is built once.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from workers.emulator.protocol.answers import Sequence
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
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def token_bounds(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to *limit*: vLLM's buckets for lengths in tokens."""
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


@dataclass(slots=True)
class Gauges:
    """What changes in both directions; set after each engine step, as in vLLM."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    sleep_level: int | None = None  # None: awake
    adapters: str = ""  # LoRA adapters of running requests

    def sleeps_at(self, level: int | None) -> float:
        return float(self.sleep_level == level)


class Metrics:
    """Everything one server counts."""

    def __init__(self, spec: InstanceSpec) -> None:
        tokens = token_bounds(spec.max_model_len)
        self.gauges = Gauges()
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache, and found there
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected = 0
        self.step_tokens = Histogram(STEP_TOKENS)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_generation_tokens = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.request_n = Histogram(SEQUENCES)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self.request_prefill_tokens = Histogram(tokens)
        self.ttft_s = Histogram(TTFT_S)
        self.itl_s = Histogram(ITL_S)
        self.time_per_token_s = Histogram(ITL_S)
        self.e2e_s = Histogram(LATENCY_S)
        self.queue_s = Histogram(LATENCY_S)
        self.inference_s = Histogram(LATENCY_S)
        self.prefill_s = Histogram(LATENCY_S)
        self.decode_s = Histogram(LATENCY_S)
        self.sleep_operations: dict[str, Histogram] = {}
        self._labels = f'engine="0",model_name="{_escaped(spec.model)}"'
        self._model = f'model_name="{_escaped(spec.model)}"'
        self._created = f"{time.time():.7e}"
        self._cache_line = _cache_line(spec)
        self._lora = spec.enable_lora
        self._parts: list[str | Callable[[], str]] = []
        self._build()

    def render(self) -> bytes:
        """The page."""
        return "".join([part if isinstance(part, str) else part() for part in self._parts]).encode()

    def sleep_operation(self, operation: str, duration_s: float) -> None:
        """Note one sleep or wake-up; its series appear with the first one."""
        if operation not in self.sleep_operations:
            self.sleep_operations[operation] = Histogram(SLEEP_OPERATION_S)
            self._parts.clear()
            self._build()
        self.sleep_operations[operation].observe(duration_s)

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        """Count *sequence*, which is complete or aborted."""
        self.finished[sequence.finish_reason] += 1
        self.e2e_s.observe(now_s - sequence.arrival_s)
        self.queue_s.observe((now_s if sequence.admitted_s is None else sequence.admitted_s) - sequence.arrival_s)
        self.request_preemptions.observe(sequence.preemptions)
        self.request_prompt_tokens.observe(sequence.prompt.tokens)
        self.request_prefill_tokens.observe(sequence.prompt.tokens)
        self.request_generation_tokens.observe(sequence.produced)
        self.request_max_tokens.observe(sequence.max_tokens)
        if sequence.produced and sequence.admitted_s is not None:
            decode_s = sequence.last_token_s - sequence.first_token_s
            self.decode_s.observe(decode_s)
            self.prefill_s.observe(sequence.first_token_s - sequence.admitted_s)
            self.inference_s.observe(sequence.last_token_s - sequence.admitted_s)
            self.time_per_token_s.observe(decode_s / max(sequence.produced - 1, 1))

    def _build(self) -> None:
        """Lay out the page: fixed text, and functions for the numbers."""
        gauges = self.gauges
        for name in ("flops", "read_bytes", "write_bytes"):
            self._counter(f"estimated_{name}_per_gpu", "Estimated by vLLM only.", [("", _zero)])
        self._gauge("num_requests_running", "Requests in model execution batches.", [("", lambda: gauges.running)])
        self._gauge("num_requests_waiting", "Requests waiting to be processed.", [("", lambda: gauges.waiting)])
        self._gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting, by reason.",
            [('reason="capacity"', lambda: gauges.waiting), ('reason="deferred"', _zero)],
        )
        states = ((None, "awake"), (1, "weights_offloaded"), (2, "discard_all"))
        self._gauge(
            "engine_sleep_state",
            "Engine sleep state: awake = 0 means sleeping.",
            [(f'sleep_state="{state}"', partial(gauges.sleeps_at, level)) for level, state in states],
        )
        self._gauge("kv_cache_usage_perc", "KV cache usage, 1 is full.", [("", lambda: gauges.kv_usage)])
        self._counter("prefix_cache_queries", "Tokens looked up in the cache.", [("", lambda: self.prefix_queries)])
        self._counter("prefix_cache_hits", "Tokens found in the cache.", [("", lambda: self.prefix_hits)])
        for name in ("external_prefix_cache", "mm_cache"):
            for what in ("queries", "hits"):
                self._counter(f"{name}_{what}", f"Cache {what}.", [("", _zero)])
        self._counter("num_preemptions", "Preemptions by the engine.", [("", lambda: self.preemptions)])
        self._counter("prompt_tokens", "Prefill tokens processed.", [("", lambda: self.prompt_tokens)])
        self._counter(
            "prompt_tokens_by_source",
            "Prompt tokens by source.",
            [
                ('source="local_compute"', lambda: max(self.prompt_tokens - self.prefix_hits, 0)),
                ('source="local_cache_hit"', lambda: self.prefix_hits),
                ('source="external_kv_transfer"', _zero),
            ],
        )
        self._counter("prompt_tokens_cached", "Cached prompt tokens.", [("", lambda: self.prefix_hits)])
        tiers = [(f'source="{tier}"', _zero) for tier in ("host", "p2p", "disk", "external_unspecified")]
        self._counter(
            "prompt_tokens_cached_by_source", "By tier.", [('source="device"', lambda: self.prefix_hits), *tiers]
        )
        self._counter("generation_tokens", "Generation tokens processed.", [("", lambda: self.generation_tokens)])
        self._counter(
            "request_success",
            "Requests that ended, by reason.",
            [(f'finished_reason="{reason}"', partial(self.finished.__getitem__, reason)) for reason in FINISH_REASONS],
        )
        self._counter(
            "admission_rejections",
            "Requests rejected by a queue limit.",
            [('reason="max_num_queued_reqs"', lambda: self.rejected), ('reason="max_num_queued_tokens"', _zero)],
            common=self._model,
        )
        for name, histogram, text in (
            ("request_prompt_tokens", self.request_prompt_tokens, "Prompt tokens of a request."),
            ("request_generation_tokens", self.request_generation_tokens, "Generated tokens of a request."),
            ("iteration_tokens_total", self.step_tokens, "Tokens of an engine step."),
            ("request_max_num_generation_tokens", self.request_max_generation_tokens, "Longest sequence of a request."),
            ("request_params_n", self.request_n, "The request's n."),
            ("request_params_max_tokens", self.request_max_tokens, "The request's max_tokens."),
            ("time_to_first_token_seconds", self.ttft_s, "Time to first token."),
            ("inter_token_latency_seconds", self.itl_s, "Time between two tokens."),
            ("request_time_per_output_token_seconds", self.time_per_token_s, "Mean time per token of a request."),
            ("e2e_request_latency_seconds", self.e2e_s, "Time from arrival to the last token."),
            ("request_queue_time_seconds", self.queue_s, "Time in the waiting queue."),
            ("request_inference_time_seconds", self.inference_s, "Time from first schedule to the last token."),
            ("request_prefill_time_seconds", self.prefill_s, "Time from first schedule to the first token."),
            ("request_decode_time_seconds", self.decode_s, "Time from the first to the last token."),
            ("request_num_preemptions", self.request_preemptions, "Preemptions of a request."),
            ("request_prefill_kv_computed_tokens", self.request_prefill_tokens, "Prompt tokens computed."),
        ):
            self._histogram(name, text, [(self._labels, histogram)])
        self._parts.append(self._cache_line)
        if self._lora:
            self._parts.append(_typed("lora_requests_info", "gauge", "Running stats on LoRA requests."))
            self._parts.append(self._lora_line)
        if self.sleep_operations:
            self._histogram(
                "sleep_mode_operation_duration_seconds",
                "Duration of one sleep-mode operation.",
                [(f'operation="{name}"', histogram) for name, histogram in self.sleep_operations.items()],
            )
            self._gauge(
                "sleep_mode_operations_in_flight",
                "Sleep-mode operations currently awaited.",
                [(f'operation="{name}"', _zero) for name in self.sleep_operations],
                common="",
            )

    def _lora_line(self) -> str:
        """vLLM's series whose value is the time of the last step."""
        labels = f'max_lora="1",running_lora_adapters="{_escaped(self.gauges.adapters)}",waiting_lora_adapters=""'
        return f"vllm:lora_requests_info{{{labels}}} {time.time()}\n"

    def _gauge(
        self, name: str, text: str, series: Iterable[tuple[str, Callable[[], float]]], common: str | None = None
    ) -> None:
        self._parts.append(_typed(name, "gauge", text))
        self._lines(name, series, self._labels if common is None else common)

    def _counter(
        self, name: str, text: str, series: list[tuple[str, Callable[[], float]]], common: str | None = None
    ) -> None:
        common = self._labels if common is None else common
        self._parts.append(_typed(f"{name}_total", "counter", text))
        self._lines(f"{name}_total", series, common)
        self._creation(name, [",".join(filter(None, (common, label))) for label, _ in series])

    def _histogram(self, name: str, text: str, series: list[tuple[str, Histogram]]) -> None:
        self._parts.append(_typed(name, "histogram", text))
        for labels, histogram in series:
            self._parts.append(_histogram_lines(name, labels, histogram))
        self._creation(name, [labels for labels, _ in series])

    def _lines(self, name: str, series: Iterable[tuple[str, Callable[[], float]]], common: str) -> None:
        for label, value in series:
            labels = ",".join(filter(None, (common, label)))
            self._parts.append(_line(f"vllm:{name}{{{labels}}} ", value))

    def _creation(self, name: str, labels: list[str]) -> None:
        """When each series began: Prometheus clients detect a restart by it."""
        lines = "".join(f"vllm:{name}_created{{{label}}} {self._created}\n" for label in labels)
        self._parts.append(_typed(f"{name}_created", "gauge", "Start of the series.") + lines)


def _zero() -> float:
    return 0.0


def _typed(name: str, kind: str, text: str) -> str:
    return f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\n"


def _line(start: str, value: Callable[[], float]) -> Callable[[], str]:
    return lambda: f"{start}{float(value())}\n"


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


def _cache_line(spec: InstanceSpec) -> str:
    """vLLM's `cache_config_info`: the whole configuration as labels of one series."""
    labels = {
        "_block_size_resolved": True,
        "block_size": spec.block_size_tokens,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "effective_attention_block_size": spec.block_size_tokens,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "engine": 0,
        "gpu_memory_utilization": 0.9,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": round(spec.kv_tokens / spec.max_model_len, 2),
        "kv_cache_memory_bytes": None,
        "kv_cache_size_tokens": spec.kv_tokens,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": None,
        "num_gpu_blocks": spec.kv_blocks,
        "num_gpu_blocks_override": None,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "replayssm_buffer_len": 16,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": True,
        "use_kda_recoverssm": False,
        "use_replayssm": False,
        "user_specified_block_size": False,
    }
    text = ",".join(f'{name}="{value}"' for name, value in labels.items())
    head = _typed("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    return f"{head}vllm:cache_config_info{{{text}}} 1.0\n"
