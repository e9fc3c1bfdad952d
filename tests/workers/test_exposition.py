"""The emulated `/metrics` page: what Pilothouse reads, in the form of the one recorded from vLLM 0.32."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.oracles.histograms import ended
from tests.workers.conftest import DATA, spec
from workers.emulator.metrics import HISTOGRAMS, Metrics
from workers.vllm.metrics import parse

RECORDED = (DATA / "vllm-0.32.0-metrics.txt").read_text()


def bounds(page: str) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for name, bound in re.findall(r'^vllm:(\w+)_bucket\{.*?le="([^"]+)"', page, re.MULTILINE):
        by_name.setdefault(name, []).append(bound)
    return {name: by_name[name] for name in HISTOGRAMS}


def test_series_and_buckets_are_vllms() -> None:
    page = Metrics(spec()).render().decode()
    names = set(re.findall(r"^(vllm:\w+)\{", page, re.MULTILINE))
    assert names <= set(re.findall(r"^(vllm:\w+)\{", RECORDED, re.MULTILINE))
    assert bounds(page) == bounds(RECORDED)


def test_prometheus_can_read_it() -> None:
    page = Metrics(spec(model='odd "name"\\')).render().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
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
    of = ended(metrics.render())
    assert (of.success_total["stop"], m.preemptions_total) == (7, 2)
    assert (m.kv_cache_size_tokens, m.num_gpu_blocks, m.block_size) == (16_000, 1000, 16)
    assert of.ttft_s.counts[:4] == (0, 1, 2, 2)  # a value on a bound belongs to that bucket
    assert of.ttft_s.sum == pytest.approx(0.011)
    assert (of.itl_s.count, of.itl_s.sum) == (5, pytest.approx(0.15))
