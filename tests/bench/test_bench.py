import json
import subprocess
import sys

import pytest

from tests.bench import __main__ as bench


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_every_benchmark_keeps_to_the_interface():
    assert "routing" in bench.names()
    assert not any(name.startswith(("_", "test")) for name in bench.names())


@pytest.mark.nightly
def test_one_json_object_and_nothing_else():
    done = call("routing", "--json", "--batches", "2", "--calls", "5")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["decision_us"] == max(result["by_policy_us"].values())
    assert set(result["plain_ratio"]) == set(result["by_policy_us"])


@pytest.mark.nightly
def test_a_table_without_json():
    done = call("routing", "--batches", "2", "--calls", "5")
    assert done.returncode == 0, done.stderr
    assert "by_policy_us.join_shortest_queue" in done.stdout


def test_unknown_names_and_options_are_refused():
    assert call("nonesuch").returncode == 2
    assert call("routing", "--json", "--nonesuch").returncode == 2
    assert call("--batches", "2").returncode == 2
