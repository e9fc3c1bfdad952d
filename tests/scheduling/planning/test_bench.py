import argparse

import pytest

from tests.bench import planner


@pytest.mark.nightly
def test_the_bench_states_what_it_is_asked_for():
    result = planner.run(argparse.Namespace(seeds=1))
    asked = ("ilp_4x3x2_ms", "ilp_30x20x5_s", "ilp_30x20x5_gap", "ilp_50x30x6_s", "ilp_50x30x6_gap")
    assert all(result[key] > 0 for key in asked)
    # The gaps are the same on every machine.
    assert result["ilp_4x3x2_gap"] <= 0.005
    assert result["ilp_30x20x5_gap"] < 0.01
    assert result["ilp_50x30x6_gap"] < 0.01
