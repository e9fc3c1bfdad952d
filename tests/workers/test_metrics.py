"""The parser against a page recorded from vLLM 0.32 on CPU, and against pages that are wrong."""

import pytest

from tests.oracles.histograms import ended, quantile
from tests.workers.conftest import DATA
from workers.vllm.metrics import VllmMetrics, parse

PAGE = (DATA / "vllm-0.32.0-metrics.txt").read_text()


def test_recorded_page() -> None:
    m = parse(PAGE)
    assert m.model_name == "tiny"
    assert (m.running, m.waiting, m.sleeping) == (4, 2, False)
    assert m.kv_usage_ratio == pytest.approx(0.0010987, rel=1e-4)
    assert (m.prompt_tokens_total, m.generation_tokens_total, m.preemptions_total) == (5491, 45100, 2)
    assert (m.prefix_queries_total, m.prefix_hits_total) == (5491, 1664)
    assert (m.kv_cache_size_tokens, m.num_gpu_blocks, m.block_size) == (2_097_152, 16_384, 128)


def test_the_oracle_reads_its_histograms() -> None:
    m = ended(PAGE)
    assert m.success_total == {"stop": 1, "length": 114, "abort": 6, "error": 0, "repetition": 0}
    assert (m.ttft_s.count, m.itl_s.count, m.e2e_s.count) == (126, 44_980, 121)
    assert (m.ttft_s.bounds[2], m.ttft_s.counts[2]) == (0.01, 64)
    assert m.e2e_s.sum == pytest.approx(110.270, abs=1e-3)
    assert quantile(m.ttft_s, 0.5) == pytest.approx(0.00985714, rel=1e-5)
    assert quantile(m.itl_s, 0.99) == pytest.approx(0.00993135, rel=1e-5)


def test_bytes_and_text_are_alike() -> None:
    assert parse(PAGE.encode()) == parse(PAGE)


def test_engines_are_summed() -> None:
    second = PAGE.replace('engine="0"', 'engine="1"')
    one, two = parse(PAGE), parse(PAGE + second)
    assert two.running == 2 * one.running
    assert two.waiting == 2 * one.waiting
    assert two.generation_tokens_total == 2 * one.generation_tokens_total
    assert two.kv_cache_size_tokens == 2 * one.kv_cache_size_tokens
    assert two.block_size == one.block_size
    assert two.kv_usage_ratio == pytest.approx(one.kv_usage_ratio)


def test_engines_of_unequal_load() -> None:
    """C43: requests add up, use is that of all their memory."""
    series = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
    values = ((3, 0.2), (5, 0.6))
    lines = [
        f'{name}{{engine="{engine}",model_name="m"}} {value}'
        for engine, each in enumerate(values)
        for name, value in zip(series, each, strict=True)
    ]
    m = parse("\n".join(lines))
    assert (m.running, m.kv_usage_ratio) == (8, pytest.approx(0.4))


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_running{",
        'vllm:num_requests_running{engine="0"} many',
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_running{engine="0"}',
        'vllm:a_name_of_next_year{engine="0"} 3',
        "vllm:",
        "}{",
        "\x00\xff",
    ],
)
def test_broken_lines_are_skipped(line: str) -> None:
    assert parse(line) == VllmMetrics()
    assert parse(f"{line}\n{PAGE}\n{line}") == parse(PAGE)


def test_values_may_carry_a_time_stamp_and_blanks_in_labels() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="a model"} 3 1795176392000\nvllm:num_requests_waiting 2\n'
    m = parse(text)
    assert (m.running, m.waiting, m.model_name) == (3, 2, "a model")


def test_sleep_state() -> None:
    awake = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"}'
    assert parse(f"{awake} 0.0").sleeping
    assert not parse(f"{awake} 1.0").sleeping


def test_kv_capacity_from_blocks_when_tokens_are_not_given() -> None:
    m = parse('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",user_specified_block_size="7"} 1.0')
    assert (m.kv_cache_size_tokens, m.block_size, m.num_gpu_blocks) == (1600, 16, 100)
    unknown = parse('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0')
    assert unknown.kv_cache_size_tokens == 0


ODD = ["1e308", "-1", "NaN", "+Inf", "1" * 5000, "0x10", "²", "٣", "1_000", "", "2147483648", "9007199254740993", "-0"]


@pytest.mark.parametrize("value", ODD)
def test_numbers_that_cannot_be_are_not_said(value):
    scalars = (
        "num_requests_running",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "request_queue_time_seconds_sum",
    )
    lines = [f'vllm:{name}{{engine="{engine}"}} {value}' for name in scalars for engine in range(2)]
    lines += [
        f'vllm:cache_config_info{{kv_cache_size_tokens="{value}",num_gpu_blocks="{value}",block_size="{value}"}} 1.0'
    ] * 2
    metrics = parse("\n".join(lines))
    assert 0 <= metrics.running <= 2**54
    assert 0 <= metrics.generation_tokens_total <= 2**54
    assert 0.0 <= metrics.kv_usage_ratio <= 1.0
    assert 0 <= metrics.kv_cache_size_tokens < 2**31
    assert 0 <= metrics.num_gpu_blocks < 2**31


def test_the_kv_use_of_older_servers_is_read():
    """C78."""
    assert parse('vllm:gpu_cache_usage_perc{model_name="m"} 0.5').kv_usage_ratio == 0.5
