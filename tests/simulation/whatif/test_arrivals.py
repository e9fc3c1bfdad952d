"""Requests after a fork, drawn at the level of forecasts; and those of the ledger."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow
from controlplane.planning.models import Forecast
from controlplane.simulation.whatif import timing
from controlplane.simulation.whatif.arrivals import drawn, expected_requests, forecast_arrivals, recent, recorded
from controlplane.simulation.whatif.changes.applying import parsed
from scheduling.fleet.state import RunningRequest, WaitingRequest
from scheduling.simulation.workload.prefix_groups import as_text
from tests.gateway.rows import served_row

AT = datetime(2026, 11, 22, 14, 0, tzinfo=UTC)


def stream(**values):
    rates = {"start_s": -600.0, "window_s": 600.0, "mean": [1.0, 2.0], "lower": [0.5, 1.0], "upper": [1.5, 3.0]}
    where = {"model": "m", "region": "east"} | {name: values[name] for name in ("model", "region") if name in values}
    moments = np.cumsum([0.0, *(values.get("gaps") or [0.0])])[:2]
    rows = [
        row(moments[0], *where.values(), "fast", "acme", 10, 30, 31),
        row(moments[1], *where.values(), "slow", "zeta", 20, 40, 41),
    ]
    return {**where, "gaps": [], "rows": rows, "calls": 1.0, "requests_per_s": rates} | values


def row(at_s, model, region, slo_class, tenant, prompt, output, predicted, *call):
    """Return a row as a start keeps it."""
    moment = (AT + timedelta(seconds=float(at_s))).isoformat()
    call = call or ("", "", "", None, None, "done", "")
    return [moment, model, region, slo_class, tenant, prompt, output, prompt, predicted, False, "", "weights", *call]


def arrivals(*streams, horizon_s: float = 1200.0):
    return {"kind": "forecast", "horizon_s": horizon_s, "streams": list(streams)}


def test_the_mean_over_seeds_is_the_forecast_and_seeds_differ_within_the_band():
    counts = np.array([len(drawn(arrivals(stream()), seed)) for seed in range(60)])
    # The second window continues: 1,200 s at 2 requests a second, between 80 % bounds of 1 and 3, drawn within the 95 %.
    assert counts.mean() == pytest.approx(2400, rel=0.15)
    assert counts.min() > 2400 * (1 - 0.5 * 1.96 / 1.2816) - 200
    assert counts.max() < 2400 * (1 + 0.5 * 1.96 / 1.2816) + 200
    assert counts.std() > 300


def test_requests_are_counted_before_they_are_drawn():
    """2 a second for 1,200 s, of each of two streams."""
    assert expected_requests(arrivals(stream(), stream()), 1200.0) == pytest.approx(2 * 2400, rel=0.01)


def test_whole_rows_are_drawn_in_order_of_time():
    workload = drawn(arrivals(stream()), 1)
    workload.check()
    assert workload.arrival_s[-1] < 1200
    names = [workload.slo_class.names[code] for code in workload.slo_class.codes]
    rows = {
        (name, int(prompt), int(output), int(predicted))
        for name, prompt, output, predicted in zip(
            names, workload.prompt_tokens, workload.output_tokens, workload.predicted_tokens, strict=True
        )
    }
    assert rows == {("fast", 10, 30, 31), ("slow", 20, 40, 41)}


def test_gaps_keep_their_burstiness():
    gaps = [0.01] * 90 + [10.0] * 10
    flat = {"start_s": 0.0, "window_s": 1200.0, "mean": [3.0], "lower": [3.0], "upper": [3.0]}
    bursty = drawn(arrivals(stream(gaps=gaps, requests_per_s=flat)), 1).arrival_s
    even = drawn(arrivals(stream(requests_per_s=flat)), 1).arrival_s
    spread = [np.diff(each).std() / np.diff(each).mean() for each in (bursty, even)]
    assert spread[0] > 2.5
    assert 0.9 < spread[1] < 1.1


def test_the_sampled_requests_are_unchanged():
    workload = recent(arrivals(stream(gaps=[5.0]), stream(model="n", region="west", gaps=[2.0])))
    workload.check()
    assert workload.arrival_s.tolist() == [0.0, 0.0, 2.0, 5.0]
    assert workload.prompt_tokens.tolist() == [10, 10, 20, 20]
    assert [workload.model.names[code] for code in workload.model.codes] == ["m", "n", "n", "m"]
    assert [workload.slo_class.names[code] for code in workload.slo_class.codes] == ["fast", "fast", "slow", "slow"]


def test_the_same_seed_draws_the_same():
    one, other = (drawn(arrivals(stream(), stream(region="west")), 7) for _ in range(2))
    np.testing.assert_array_equal(one.arrival_s, other.arrival_s)
    np.testing.assert_array_equal(one.prompt_tokens, other.prompt_tokens)


@pytest.fixture
def rows(db):
    slo_class = SloClass.objects.create(name="interactive", title="Interactive", kind="interactive", priority=0)
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)

    def make(count, **values):
        made = [
            served_row(
                request_id=f"r{number}",
                arrived_at=AT - timedelta(seconds=10 * (count - number)),
                tenant=tenant,
                prompt_tokens=100,
                output_tokens=50,
                predicted_prompt_tokens=100,
                predicted_output_tokens=60,
                **values,
            )
            for number in range(count)
        ]
        return LedgerRow.objects.bulk_create(made)

    return make


def forecast(quantity: str, tokens_per_s: float) -> None:
    Forecast.objects.create(
        made_at=AT - timedelta(minutes=5),
        model="m",
        region="east",
        quantity=quantity,
        forecaster="arima",
        window_s=600,
        start_at=AT,
        mean=[tokens_per_s] * 6,
        lower_80=[0.8 * tokens_per_s] * 6,
        upper_80=[1.2 * tokens_per_s] * 6,
        lower_95=[0.7 * tokens_per_s] * 6,
        upper_95=[1.3 * tokens_per_s] * 6,
    )


def test_rates_are_the_forecast_tokens_by_the_tokens_of_a_request(rows):
    rows(100)
    forecast("prompt", 300.0)
    forecast("output", 150.0)
    made, remarks = forecast_arrivals(AT, 1800.0)
    (one,) = made["streams"]
    assert one["requests_per_s"]["mean"][0] == pytest.approx(3.0)
    assert one["requests_per_s"]["upper"][0] == pytest.approx(3.6)
    assert not any("no forecast" in remark for remark in remarks)
    assert len(drawn(made, 0)) == pytest.approx(5400, rel=0.35)


def test_without_a_forecast_requests_come_as_lately_and_that_is_said(rows):
    rows(100)
    made, remarks = forecast_arrivals(AT, 1800.0)
    assert made["streams"][0]["requests_per_s"]["mean"][0] == pytest.approx(0.1)
    assert any("no forecast for m" in remark for remark in remarks)


COMMON = {
    "request_id": "r",
    "model": "m",
    "region": "east",
    "served_in": "east",
    "slo_class": "interactive",
    "tenant": "t",
    "prompt_tokens": 60,
    "sequences": 1,
    "attempts": 1,
}


def waiting_request(**values):
    return WaitingRequest(**COMMON, **values)


def running_request(**values):
    return RunningRequest(
        **COMMON, expected_prompt=60, expected_tokens=60, instance=0, placed_s=-500.0, streamed=True, **values
    )


def test_what_has_not_ended_counts_as_long_as_it_will_be(rows):
    rows(100)
    runs = running_request(arrival_s=-500.0, predicted_tokens=900, output_tokens=1000)
    waits = waiting_request(arrival_s=-1.0, predicted_tokens=700)
    made, _ = forecast_arrivals(AT, 1800.0, [runs, waits])
    (one,) = made["streams"]
    outputs = [each[6] for each in one["rows"]]
    assert len(outputs) == 102
    assert 1500 in outputs
    assert outputs[-1] == 700
    assert one["gaps"][-1] == pytest.approx(9.0)  # the last that ended came 10 s before, the one that waits 1 s


def test_long_waiting_requests_do_not_change_the_arrival_rate(rows):
    rows(100)
    old = waiting_request(arrival_s=-86_400.0, predicted_tokens=900)
    made, _ = forecast_arrivals(AT, 1800.0, [old])
    assert made["streams"][0]["requests_per_s"]["mean"][0] == pytest.approx(0.1)


def test_an_empty_ledger_is_said(db):
    made, remarks = forecast_arrivals(AT, 60.0)
    assert len(drawn(made, 0)) == 0
    assert any("ledger" in remark for remark in remarks)


def test_recorded_requests_are_those_of_the_ledger(rows):
    rows(20)
    LedgerRow.objects.filter(request_id="r19").update(unserved=True, prompt_tokens=0, output_tokens=0)
    at = AT - timedelta(seconds=100)
    workload = recorded({"kind": "ledger", "since": at.isoformat(), "until": AT.isoformat()}, at)
    assert workload.arrival_s.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]
    assert workload.output_tokens.tolist() == [50] * 9 + [60]
    assert workload.predicted_tokens.tolist() == [60] * 10
    assert workload.tenant.names == ["acme"]


def test_an_estimate_counts_what_edits_of_demand_add():
    def count(start, horizon_s, *changes):
        return timing.expected(start, horizon_s, parsed(changes))

    start = SimpleNamespace(arrivals=arrivals(stream(), stream(model="n")), scenario={}, at=datetime.now(UTC))
    whole = count(start, 1200.0)
    assert whole == pytest.approx(len(drawn(start.arrivals, 1)), rel=0.25)
    twice = {"kind": "demand", "edit": "factor", "by": 2.0}
    assert count(start, 1200.0, twice) == pytest.approx(2 * whole)
    assert count(start, 1200.0, twice | {"models": ["n"]}) == pytest.approx(whole)  # a run counts these exactly
    evenly = SimpleNamespace(arrivals={"kind": "clients"}, scenario={"clients": [{"requests_per_s": 2.0}]})
    burst = {"kind": "demand", "edit": "burst", "by": 3.0, "from_s": 0.0, "until_s": 300.0}
    assert count(evenly, 600.0, burst) == pytest.approx(2400)


def test_whole_runs_are_drawn_also_those_that_began_before():
    calls = [(run, step) for run in range(30) for step in range(3)]
    rows = [
        row(
            40 * run + 15 * step, "m", "east", "fast", "acme", 64, 20, 20,
            "agent", f"r{run}", "work", None, 5000.0, "done", as_text([7, 100 + run], 16),
        )
        for run, step in calls
    ]  # fmt: skip
    flat = {"start_s": 0.0, "window_s": 1200.0, "mean": [0.3], "lower": [0.3], "upper": [0.3]}
    one = stream(rows=rows, gaps=[40.0] * 29, calls=3.0, requests_per_s=flat)
    workload = drawn(arrivals(one), 1)
    workload.check()
    assert len(workload) == pytest.approx(360, rel=0.3)
    runs = [np.flatnonzero(workload.calls.run == number) for number in np.unique(workload.calls.run)]
    steps = [workload.calls.step[rows].tolist() for rows in runs]
    assert {tuple(each) for each in steps} > {(1, 2, 3), (2, 3)}
    assert all(np.ptp(workload.arrival_s[rows]) == pytest.approx(15 * (rows.size - 1)) for rows in runs)
    assert all(workload.arrival_s[rows[0]] < 30 for rows, each in zip(runs, steps, strict=True) if each[0] > 1)
    own = [set(workload.prefix_hashes[slice(*workload.prefix_first[rows[0] : rows[0] + 2])].tolist()) for rows in runs]
    assert [len(each) for each in own] == [2] * len(runs)
    assert len(set.union(*own)) == len(runs) + 1, "drawn runs share what all runs share, and nothing else"
