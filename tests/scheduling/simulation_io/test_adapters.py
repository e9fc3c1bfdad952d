"""LoRA adapters of a scenario: drawn for requests, held by instances, counted."""

from pathlib import Path

import numpy as np
import pytest

from scheduling.simulation.scenario import ScenarioError
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging.stage import stage

PROFILE = {"prefill": {"a_s": 0.02, "b_s_per_token": 1e-5}, "decode": {"a_s": 0.01, "b_s_per_sequence": 1e-4}}


def values(adapters=None, **group):
    return {
        "models": {"m": {"context_tokens": 4096} | ({"adapters": adapters} if adapters else {})},
        "gpus": {"g": {}},
        "regions": {"here": {}},
        "profiles": [{"model": "m", "gpu": "g"} | PROFILE],
        "fleet": [{"model": "m", "regions": ["here"], "gpu": "g", "instances": 2, "kv_tokens": 50_000} | group],
        "classes": {"chat": {}},
        "demand": {"duration_h": 0.1},
        "clients": [
            {
                "tenant": "t",
                "model": "m",
                "slo_class": "chat",
                "requests_per_s": 2.0,
                "prompt": {"median": 50, "p95": 100},
                "output": {"median": 20, "p95": 40},
            }
        ],
    }


def staged(*arguments, **group):
    return stage(check_scenario(values(*arguments, **group), Path("scenario")))


def test_adapters_are_drawn_and_counted():
    ready = staged({"count": 20, "share": 0.5, "zipf": 1.0}, max_loras=2, max_cpu_loras=6)
    adapter = ready.requests.adapter
    assert set(np.unique(adapter)) <= set(range(-1, 20))
    assert 0.4 < np.mean(adapter >= 0) < 0.6
    assert np.sum(adapter == 0) > np.sum(adapter == 9), "the first are the most popular ones"
    counters = ready.run().counters
    counts = [counters[f"adapter_{name}"] for name in ("not_loaded", "in_memory", "on_gpu")]
    assert sum(counts) == np.sum(adapter >= 0)
    assert min(counts) > 0


def test_more_memory_loads_less_and_answers_sooner():
    small, large = (
        staged({"count": 20}, max_loras=slots, max_cpu_loras=20, adapter_storage_s=1.0, adapter_memory_s=0.5).run()
        for slots in (1, 20)
    )
    assert large.counters["adapter_on_gpu"] > 2 * small.counters["adapter_on_gpu"]
    assert np.nanmean(large.outcomes["ttft_s"]) < np.nanmean(small.outcomes["ttft_s"])


@pytest.mark.parametrize(
    ("adapters", "group", "what"),
    [
        ({"count": 0}, {"max_loras": 1}, "count"),
        ({"count": 5}, {}, "max_loras"),
        ({"count": 5, "share": 1.5}, {"max_loras": 1}, "share"),
        (None, {"max_loras": 300}, "max_loras"),
    ],
)
def test_wrong_adapters_are_named(adapters, group, what):
    with pytest.raises(ScenarioError, match=what):
        staged(adapters, **group)


def test_without_adapters_nothing_is_drawn():
    ready = staged(None, max_loras=2)
    assert (ready.requests.adapter == -1).all()
    assert ready.requests.adapter.strides == (0,)


def test_the_requests_of_a_run_use_one_adapter():
    of_runs = values({"count": 20}, max_loras=2) | {
        "clients": [],
        "applications": [{"suite": "CG", "model": "m", "slo_class": "chat", "runs": 12, "window_h": 0.1}],
        "demand": {"too_long": "clip"},
    }
    requests = stage(check_scenario(of_runs, Path("scenario"))).requests
    used = [np.unique(requests.adapter[requests.run == number]) for number in range(12)]
    assert all(each.size == 1 and each[0] >= 0 for each in used)
    assert len({int(each[0]) for each in used}) > 4
