"""Measures of a result that is small enough to check by hand, and of a large one against the plain definitions."""

from itertools import pairwise

import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.queueing.promises import ClassTerms, Promise
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.cluster.world import OUTCOME, Outcome, State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import (
    LATENCIES,
    PERCENTILES,
    STATISTICS,
    counter_table,
    hour_table,
    latency_s,
    request_table,
    series_table,
    statistics,
)
from scheduling.simulation.result import Result
from scheduling.simulation.workload.requests import make_requests

ENGINE = EngineConfig(8, 512, 16, 100, "fcfs", 1000, Profile(0.0, 0.01, 1e-4, 0.0, 0.01, 0.0, 0.0))
TENANTS = ["acme", "globex"]
CLASSES = [ClassTerms("iw"), ClassTerms("niw")]


def result(outcomes: list[tuple], promises=(), **values) -> Result:
    """Return one request for each (ttft, e2e, queue, preemptions, state)."""
    records = np.zeros(len(outcomes), OUTCOME)
    for record, (ttft_s, e2e_s, queue_s, preemptions, state) in zip(records, outcomes, strict=True):
        record["ttft_s"], record["e2e_s"], record["queue_s"] = ttft_s, e2e_s, queue_s
        record["preemptions"], record["state"] = preemptions, state
    cluster = Cluster(
        [
            InstanceSpec("llama", "east", ENGINE, "h100", usd_per_hour=4.0, spot_usd_per_hour=1.0),
            InstanceSpec("bloom", "west", ENGINE, "2 x a100", usd_per_hour=2.0),
        ],
        classes=CLASSES,
        promises=promises,
    )
    state_s = np.zeros((2, len(State)))
    state_s[0, [State.READY, State.SPOT, State.LOADING]] = 3600, 1800, 900
    state_s[1, [State.READY, State.EMPTY, State.DRAINING]] = 1800, 7200, 360
    fields = {
        "cluster": cluster,
        "requests": make_requests(
            np.arange(len(outcomes), dtype=float),
            np.full(len(outcomes), 10, np.int32),
            np.array([5, 1, 11, 2][: len(outcomes)], np.int32),
            model=np.array([0, 0, 1, 1][: len(outcomes)], np.int16),
            region=np.array([0, 1, 0, 1][: len(outcomes)], np.int16),
            slo_class=np.array([0, 1, 0, 0][: len(outcomes)], np.int16),
            tenant=np.zeros(len(outcomes), np.int32),
        ),
        "outcomes": records,
        "state_s": state_s,
        "counters": {"preemptions": 3, "swaps": 1},
        "series": None,
        "decisions": None,
        "changes": np.zeros(0),
        "end_s": 10.0,
    }
    return Result(**{**fields, **values})


FOUR = [
    (0.5, 2.5, 0.0, 0, Outcome.DONE),
    (1.0, 1.0, 0.2, 2, Outcome.DONE),
    (2.0, 4.0, 1.0, 1, Outcome.DONE),
    (np.nan, np.nan, 0.3, 0, Outcome.FAILED),
]


def select(table, **wanted) -> list[dict]:
    return [row for row in table.as_dicts() if wanted.items() <= row.items()]


def value(table, **wanted):
    (row,) = select(table, **wanted)
    return row["value"]


def test_latencies_are_what_they_are_called() -> None:
    four = result(FOUR)
    assert latency_s(four, "ttft").tolist()[:3] == [0.5, 1.0, 2.0]
    assert latency_s(four, "itl") == pytest.approx([0.5, np.nan, 0.2, np.nan], nan_ok=True)
    assert latency_s(four, "normalised") == pytest.approx([0.5, 1.0, 4 / 11, np.nan], nan_ok=True)
    assert np.isnan(latency_s(four, "queue")[3])  # it did not end well


def test_requests_by_group() -> None:
    table = request_table(result(FOUR), TENANTS)
    assert value(table, by="all", measure="requests") == 4
    assert value(table, by="all", measure="done") == 3
    assert value(table, by="model", group="bloom", measure="done") == 1
    assert value(table, by="region", group="west", measure="requests") == 2
    assert value(table, by="model", group="llama", measure="preemptions") == 2
    assert value(table, by="all", measure="ttft_s", statistic="p50") == 1.0
    assert value(table, by="slo_class", group="iw", measure="e2e_s", statistic="max") == 4.0
    assert value(table, by="region", group="west", measure="ttft_s", statistic="mean") == 1.0
    assert value(table, by="all", measure="throughput", statistic="requests_per_s") == pytest.approx(0.3)
    assert value(table, by="model", group="bloom", measure="throughput", statistic="output_tokens_per_s") == 1.1
    assert not select(table, group="globex")  # asked for nothing
    assert not select(table, measure="slo_attainment")  # nothing was promised
    assert len(select(table, by="all")) == 5 + len(LATENCIES) * len(STATISTICS)


def test_promises_are_kept_by_those_that_end_in_time() -> None:
    promises = [Promise(ttft_s=1.5, itl_s=0.5), Promise()]
    table = request_table(result(FOUR, promises), TENANTS)
    # Three of the class: the first keeps both, the third is late, the fourth failed.
    assert value(table, by="slo_class", group="iw", measure="slo_attainment") == pytest.approx(1 / 3)
    assert value(table, by="all", measure="slo_attainment") == pytest.approx(1 / 3)
    assert not select(table, by="slo_class", group="niw", measure="slo_attainment")
    by_deadline = request_table(result(FOUR, [Promise(), Promise(deadline_s=1.0)]), TENANTS)
    assert value(by_deadline, by="slo_class", group="niw", measure="slo_attainment") == 1.0
    sooner = request_table(result(FOUR, [Promise(), Promise(e2e_s=5.0, deadline_s=0.9)]), TENANTS)
    assert value(sooner, by="slo_class", group="niw", measure="slo_attainment") == 0.0


def test_hours_and_dollars() -> None:
    table = hour_table(result(FOUR))
    assert value(table, by="gpu_type", group="h100", measure="ready_h") == 1.0
    assert value(table, by="gpu_type", group="h100", measure="instance_h") == 1.25
    assert value(table, by="gpu_type", group="h100", measure="donated_h") == 0.5
    assert value(table, by="gpu_type", group="h100", measure="wasted_h") == 0.25
    assert value(table, by="gpu_type", group="h100", measure="cost_usd") == 5.0
    assert value(table, by="gpu_type", group="h100", measure="spot_income_usd") == 0.5
    assert value(table, by="model", group="bloom", measure="wasted_h") == pytest.approx(0.1)
    assert value(table, by="model", group="bloom", measure="cost_usd") == pytest.approx(
        1.2
    )  # empty places cost nothing


def test_series_by_endpoint() -> None:
    series = {
        name: np.array([[1, 2], [3, 4]]) for name in ("waiting", "running", "kv_tokens", "kv_capacity_tokens", "ready")
    }
    series["kv_capacity_tokens"] = np.array([[10, 0], [6, 8]])
    rows = series_table(result(FOUR, series={"t_s": np.array([0.0, 60.0]), **series})).as_dicts()
    assert [(row["t_s"], row["model"], row["kv_ratio"]) for row in rows] == [
        (0.0, "llama", 0.1), (0.0, "bloom", 0.0), (60.0, "llama", 0.5), (60.0, "bloom", 0.5),
    ]  # fmt: skip


def test_counters() -> None:
    assert value(counter_table(result(FOUR)), counter="preemptions") == 3


def test_nothing_done_is_not_a_number_and_no_requests_are_no_rows() -> None:
    table = request_table(result(FOUR[3:]), TENANTS)
    assert np.isnan(value(table, by="all", measure="ttft_s", statistic="p95"))
    empty = request_table(result([], [Promise(ttft_s=1.0)] * 2), TENANTS)
    assert value(empty, by="all", measure="requests") == 0


def test_statistics_are_those_of_numpy_and_in_order() -> None:
    values = np.random.default_rng(1).lognormal(0, 2, 1001)
    measured = dict(zip(STATISTICS, statistics(np.append(values, np.nan)), strict=True))
    assert measured["mean"] == pytest.approx(values.mean())
    for percentile in PERCENTILES:
        assert measured[f"p{percentile:.0f}"] == pytest.approx(np.percentile(values, percentile))
    ordered = [measured[name] for name in STATISTICS[1:]]
    assert all(low <= high for low, high in pairwise(ordered))
