"""The emulated `/metrics` page against the one recorded from vLLM 0.32."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.workers.conftest import DATA, spec
from workers.emulator.metrics import Metrics, token_bounds
from workers.vllm.metrics import parse

RECORDED = (DATA / "vllm-0.32.0-metrics.txt").read_text()
SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? ")
LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')


def series(page: str) -> dict[str, set[frozenset[str]]]:
    """Sample names and, for each, the sets of label names; without the process' and framework's own."""
    labels: dict[str, set[frozenset[str]]] = {}
    for line in page.splitlines():
        if match := SAMPLE.match(line):
            labels.setdefault(match[1], set()).add(frozenset(name for name, _ in LABEL.findall(match[2] or "")))
    return labels


def bounds(page: str) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for name, bound in re.findall(r'^(vllm:\w+)_bucket\{.*?le="([^"]+)"', page, re.MULTILINE):
        by_name.setdefault(name, []).append(bound)
    return by_name


def page(**changes: object) -> str:
    metrics = Metrics(spec(max_model_len=1024, enable_lora=False, **changes))
    metrics.sleep_operation("sleep", 0.001)
    metrics.sleep_operation("wake", 0.001)
    return metrics.render().decode()


def test_same_series_and_labels_as_vllm() -> None:
    emulated, recorded = series(page()), series(RECORDED)
    assert emulated == recorded


def test_same_buckets_as_vllm() -> None:
    assert bounds(page()) == bounds(RECORDED)


def test_same_label_values_where_they_are_fixed() -> None:
    def values(text: str, label: str) -> set[str]:
        return set(re.findall(rf'\b{label}="([^"]+)"', text))

    for label in ("reason", "finished_reason", "sleep_state", "source", "operation", "engine"):
        assert values(page(), label) == values(RECORDED, label), label


def test_prometheus_can_read_it() -> None:
    families = {family.name: family for family in text_string_to_metric_families(page(model='odd "name"\\'))}
    running = families["vllm:num_requests_running"].samples[0]
    assert running.labels == {"engine": "0", "model_name": 'odd "name"\\'}
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert families["vllm:generation_tokens"].type == "counter"


def test_numbers_arrive() -> None:
    metrics = Metrics(spec(block_size_tokens=16, kv_blocks=1000, max_model_len=1024))
    metrics.running, metrics.waiting, metrics.kv_usage = 3, 4, 0.25
    metrics.sleep_level = 1
    metrics.finished["stop"] = 7
    metrics.preemptions = 2
    metrics.observe("time_to_first_token_seconds", 0.005)
    metrics.observe("time_to_first_token_seconds", 0.006)
    metrics.observe("inter_token_latency_seconds", 0.03, times=5)
    m = parse(metrics.render())
    assert (m.running, m.waiting, m.kv_usage_ratio, m.sleeping) == (3, 4, 0.25, True)
    assert (m.success_total["stop"], m.preemptions_total) == (7, 2)
    assert (m.kv_cache_size_tokens, m.num_gpu_blocks, m.block_size) == (16_000, 1000, 16)
    assert m.ttft_s.counts[:4] == (0, 1, 2, 2)  # a value on a bound belongs to that bucket
    assert m.ttft_s.sum == pytest.approx(0.011)
    assert (m.itl_s.count, m.itl_s.sum) == (5, pytest.approx(0.15))


def test_lora_series_only_with_adapters_enabled() -> None:
    assert "lora_requests_info" not in page()
    assert "vllm:lora_requests_info{" in Metrics(spec(enable_lora=True)).render().decode()


def test_token_bounds() -> None:
    assert token_bounds(1024) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert token_bounds(7) == (1, 2, 5)
