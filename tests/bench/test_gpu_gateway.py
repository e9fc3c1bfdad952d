"""What the benchmark on a GPU draws and sums up; it needs no server."""

import pytest

from tests.bench import gpu_gateway
from tests.bench.__main__ import measure
from tests.bench.gpu_gateway import Job, Timed, brief, fresh, poisson


def test_without_a_server_nothing_is_measured():
    assert "skipped" in measure("gpu_gateway", [])


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no swaps; there are overhead"):
        measure("gpu_gateway", ["--vllm", "http://127.0.0.1:1", "--parts", "swaps", "--out", str(tmp_path)])


def test_arms_have_the_same_load_and_different_prompts():
    jobs = poisson([(40, 7), (5_000, 9_000)], 10.0, 1, most=50, longest_prompt=300)
    assert jobs == poisson([(40, 7), (5_000, 9_000)], 10.0, 1, most=50, longest_prompt=300)
    assert {(job.prompt, job.output) for job in jobs} == {(40, 7), (300, 2_000)}
    first, second = fresh(jobs), fresh(jobs, lambda job: job.output)
    assert [job.at_s for job in first] == [job.at_s for job in second]
    assert [job.priority for job in second] == [job.output for job in jobs]
    assert not {tuple(gpu_gateway.words(job)) for job in first} & {tuple(gpu_gateway.words(job)) for job in second}


def test_failures_count_as_failures_and_not_as_times():
    timed = [Timed(Job(n, 0.0, 10, 20), 0.1 * n, 1.0 * n) for n in range(1, 5)]
    figures = brief([*timed, Timed(Job(9, 0.0, 10, 20), None, None, "503 busy")], 4.0)
    assert (figures["requests"], figures["failed"], figures["errors"]) == (5, 1, ["503 busy"])
    assert (figures["requests_per_s"], figures["output_tokens_per_s"], figures["e2e_mean_s"]) == (1.0, 20, 2.5)
    assert (figures["ttft_p50_ms"], figures["e2e_p95_ms"]) == (300.0, 4000.0)
    assert brief([], 1.0) == {"requests": 0, "failed": 0, "seconds": 1.0}
