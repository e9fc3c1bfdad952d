import argparse

import pytest

from tests.bench import queue


@pytest.mark.nightly
def test_the_bench_states_what_it_is_asked_for():
    result = queue.run(argparse.Namespace(seeds=1, best_s=1.0, compile=False))
    asked = (
        *("cold_s", "cold_attainment", "cold_lateness_of_edf", "gap_1s", "warm_ms", "warm_gap"),
        *("large_s", "large_gap", "group_400k_ms", "group_one_us", "first_call_s"),
    )
    assert all(result[key] >= 0 for key in asked)
    # Budgets are in processor time, so these are much the same on every machine.
    assert result["cold_attainment"] > max(rule["attainment"] for rule in result["rules"].values())
    assert result["cold_lateness_s"] < min(rule["lateness_s"] for rule in result["rules"].values())
    assert result["cold_lateness_of_edf"] < 0.25
