"""Traces in arrays, and the checks and selections of workloads."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from scheduling.simulation.workload.columns import Coded, Workload, WorkloadError
from scheduling.simulation.workload.traces import TraceError, load_trace, read_trace

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens
5,ChatGPT,472,18
6,GPT-4,100,0
45.5,GPT-4,1087,230
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1300, "output_length": 52, "hash_ids": [7, 8, 9]}
{"timestamp": 10, "input_length": 0, "output_length": 5, "hash_ids": []}
{"timestamp": 20, "input_length": 600, "output_length": 5, "hash_ids": [7, 11]}
"""
LEDGER = """Request,Arrived (UTC),Tenant,Model,SLO class,Region,Outcome,Prompt (tokens),Output (tokens)
r3,2026-11-20T10:00:02Z,acme,llama,interactive,us-east,done,30,3
r2,2026-11-20T10:00:01Z,globex,llama,flex,us-west,cancelled,20,2
r1,2026-11-20T10:00:00Z,acme,bloom,interactive,us-east,rejected,0,0
r0,2026-11-20T09:59:59.5Z,acme,bloom,interactive,us-east,done,10,1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def same(name: str, requests: int) -> Coded:
    """*name* for every request."""
    return Coded(np.zeros(requests, np.int16), [name])


def workload(**values) -> Workload:
    columns = {
        "arrival_s": np.array([0.0, 1.0, 2.0]),
        "prompt_tokens": np.array([10, 20, 30], np.int32),
        "output_tokens": np.array([1, 2, 3], np.int32),
        "model": same("m", 3),
        "region": same("r", 3),
        "slo_class": same("c", 3),
        "tenant": same("t", 3),
    }
    return Workload(**{**columns, **values})


def test_a_trace_in_arrays(tmp_path: Path) -> None:
    loaded = load_trace(written(tmp_path, BURSTGPT), "burstgpt")
    loaded.check()
    assert loaded.arrival_s.tolist() == [0.0, 40.5]
    assert loaded.prompt_tokens.tolist() == [472, 1087]
    assert [loaded.model.names[code] for code in loaded.model.codes] == ["ChatGPT", "GPT-4"]
    assert loaded.left_out == 1  # it failed: nothing came out
    assert len(load_trace(written(tmp_path, BURSTGPT), "burstgpt", limit=1)) == 1


def test_shared_prefixes_stay_with_their_requests(tmp_path: Path) -> None:
    loaded = load_trace(written(tmp_path, MOONCAKE), "mooncake", unit="ms")
    assert loaded.prefix_first.tolist() == [0, 3, 5]
    assert loaded.prefix_hashes.tolist() == [7, 8, 9, 7, 11]
    assert loaded.prefix_block_tokens == 512
    last = loaded.select(np.array([1, 0]))
    assert last.prefix_first.tolist() == [0, 2, 5]
    assert last.prefix_hashes.tolist() == [7, 11, 7, 8, 9]


def test_the_ledger_is_sorted_by_arrival(tmp_path: Path) -> None:
    """As the console writes it: newest first."""
    path = written(tmp_path, LEDGER)
    loaded = load_trace(path, "ledger")
    assert loaded.arrival_s.tolist() == [0.0, 1.5, 2.5]
    assert loaded.prompt_tokens.tolist() == [10, 20, 30]
    assert [loaded.tenant.names[code] for code in loaded.tenant.codes] == ["acme", "globex", "acme"]
    assert [loaded.region.names[code] for code in loaded.region.codes] == ["us-east", "us-west", "us-east"]
    assert [loaded.slo_class.names[code] for code in loaded.slo_class.codes] == ["interactive", "flex", "interactive"]
    assert loaded.left_out == 1
    with pytest.raises(TraceError, match="request 2 came 1 s before the one above it"):
        list(read_trace(path, "ledger"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BURSTGPT.replace("45.5", "4.5"), "request 3 came 1.5 s before the one above it"),
        (BURSTGPT.replace("45.5", "-1"), "line 4, column Timestamp: '-1' is not a number from 0 up"),
        (BURSTGPT.replace("45.5", "nan"), "line 4, column Timestamp: 'nan' is not a number from 0 up"),
        (BURSTGPT.replace("1087", "10.5"), "line 4, column Request tokens: '10.5' is not a whole number"),
        (BURSTGPT.replace("1087", "-3"), "line 4, column Request tokens: '-3' is not a number from 0 up"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_trace(written(tmp_path, text), "burstgpt")


def test_loading_takes_little_more_than_the_arrays(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    rows = 20_000
    with path.open("w") as file:
        file.write("Timestamp,Model,Request tokens,Response tokens\n")
        file.writelines(f"{number / 10},m,{100 + number % 7},5\n" for number in range(rows))
    load_trace(path, "burstgpt", limit=10)
    tracemalloc.start()
    try:
        loaded = load_trace(path, "burstgpt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(loaded) == rows
    # 8 + 4 + 4 + 3 x 2 + 4 bytes, and 8 for where prefixes begin; an array grows by an eighth, and moves when it does.
    assert peak < 1.5 * 34 * rows + 200_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrival_s": np.array([0.0, 2.0, 1.0])}, "arrival_s of request 2 is earlier than the one before it: 1.0"),
        ({"arrival_s": np.array([-1.0, 0.0, 1.0])}, "arrival_s of request 0 is before 0: -1.0"),
        ({"arrival_s": np.array([0.0, np.nan, 1.0])}, "arrival_s of request 1 is not a finite number: nan"),
        ({"prompt_tokens": np.array([1, 0, 1], np.int32)}, "prompt_tokens of request 1 is less than 1: 0"),
        ({"output_tokens": np.array([1, 1, -5], np.int32)}, "output_tokens of request 2 is less than 1: -5"),
    ],
)
def test_impossible_requests_are_named(values, message: str) -> None:
    workload().check()
    with pytest.raises(WorkloadError, match=message):
        workload(**values).check()


def test_an_empty_workload_is_right() -> None:
    empty = workload().select(np.zeros(3, bool))
    empty.check()
