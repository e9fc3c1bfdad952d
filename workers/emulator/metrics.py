"""An emulated server's metrics: what is counted, and the series of vLLM 0.32's `/metrics` that Pilothouse reads.

Sixty pages are read every second, so everything but the numbers is built once: prometheus_client takes eighty times as
long for a page.
"""

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from workers.emulator.answers import Sequence
from workers.emulator.spec import InstanceSpec

LATENCY_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS: Final = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
HISTOGRAMS: Final = {
    "iteration_tokens_total": STEP_TOKENS,
    "time_to_first_token_seconds": TTFT_S,
    "inter_token_latency_seconds": ITL_S,
    "e2e_request_latency_seconds": LATENCY_S,
    "request_queue_time_seconds": LATENCY_S,
    "request_inference_time_seconds": LATENCY_S,
}
FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES: Final = {"awake": None, "weights_offloaded": 1, "discard_all": 2}
"""Sleep states, with the sleep level of each."""
Value = Callable[["Metrics"], float]
GAUGES: Final = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
}
COUNTERS: Final = {
    "prefix_cache_queries": "prefix_queries",
    "prefix_cache_hits": "prefix_hits",
    "external_prefix_cache_hits": "restored_tokens",
    "num_preemptions": "preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "admission_rejections": "rejected",
}
"""Series, with the attribute of `Metrics` that each shows."""


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
        self.preemptions = self.rejected = 0
        self.prefix_queries = self.prefix_hits = 0  # tokens looked up in the prefix cache, and found there
        self.restored_tokens = self.restore_s = 0.0
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._parts: list[str | Callable[[], str]] = []
        self._build(spec)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def render(self) -> bytes:
        """Return the page."""
        return "".join([part if isinstance(part, str) else part() for part in self._parts]).encode()

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        """Count *sequence*, which is complete or aborted."""
        self.finished[sequence.finish_reason] += 1
        admitted_s = sequence.admitted_s
        self.observe("e2e_request_latency_seconds", now_s - sequence.arrival_s)
        self.observe("request_queue_time_seconds", (now_s if admitted_s is None else admitted_s) - sequence.arrival_s)
        if sequence.first_token_s and admitted_s is not None:
            self.observe("request_inference_time_seconds", sequence.last_token_s - admitted_s)

    def _build(self, spec: InstanceSpec) -> None:
        """Lay out the page as fixed text, and functions for the numbers."""
        labels = f'engine="0",model_name="{_escaped(spec.model)}"'
        for name, attribute in GAUGES.items():
            self._add("gauge", name, labels, attrgetter(attribute))
        for name, attribute in COUNTERS.items():
            self._add("counter", f"{name}_total", labels, attrgetter(attribute))
        if spec.offload_blocks:
            self._add("counter", "kv_offload_load_time_total", labels, attrgetter("restore_s"))
        self._parts.append("# TYPE vllm:engine_sleep_state gauge\n")
        for state, level in SLEEP_STATES.items():
            value = _equal(level)
            self._parts.append(self._line(f'engine_sleep_state{{{labels},sleep_state="{state}"}}', value))
        self._parts.append("# TYPE vllm:request_success_total counter\n")
        for reason in FINISH_REASONS:
            self._parts.append(
                self._line(f'request_success_total{{finished_reason="{reason}",{labels}}}', _finished(reason))
            )
        for name, histogram in self.histograms.items():
            self._parts += [f"# TYPE vllm:{name} histogram\n", _histogram_lines(name, labels, histogram)]
        cache = (
            f'block_size="{spec.block_size_tokens}",enable_prefix_caching="{spec.enable_prefix_caching}",engine="0",'
        )
        cache += f'kv_cache_size_tokens="{spec.kv_tokens}",num_gpu_blocks="{spec.kv_blocks}"'
        self._parts.append(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{cache}}} 1.0\n")

    def _add(self, kind: str, name: str, labels: str, value: Value) -> None:
        self._parts += [f"# TYPE vllm:{name} {kind}\n", self._line(f"{name}{{{labels}}}", value)]

    def _line(self, series: str, value: Value) -> Callable[[], str]:
        return lambda: f"vllm:{series} {float(value(self))}\n"


def _equal(level: int | None) -> Value:
    return lambda metrics: metrics.sleep_level == level


def _finished(reason: str) -> Value:
    return lambda metrics: metrics.finished[reason]


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
