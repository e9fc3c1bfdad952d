import argparse

import pytest

from tests.bench import planner


@pytest.mark.nightly
def test_the_bench_states_what_it_is_asked_for():
    result = planner.run(argparse.Namespace(seeds=1))
    assert all(result[key] > 0 for key in ("ilp_4x3x2_ms", "ilp_10x5x3_ms", "ilp_30x20x5_s"))
    # The gaps are the same on every machine.
    assert max(result["ilp_4x3x2_gap"], result["ilp_10x5x3_gap"]) <= 0.005
    assert result["ilp_30x20x5_gap"] < 0.05
