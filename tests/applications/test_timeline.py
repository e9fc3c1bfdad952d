"""A run on its time axis."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.applications.models import ApplicationRun, UnitReport
from controlplane.applications.spans import UNKNOWN_RATE, expectations, rates_of, spans_of
from controlplane.console.pages.applications import timeline
from controlplane.fleet.models import GpuType, Region
from controlplane.gateway.models import LedgerRow
from scheduling.applications.demand_graph import Backend, ServiceRate

BEGAN = timezone.now()


def called(unit, began_s, e2e_s, queue_s=0.0, ttft_s=None, **values):
    return LedgerRow(
        unit=unit, arrived_at=BEGAN + timedelta(seconds=began_s), e2e_ms=1000 * e2e_s, queue_ms=1000 * queue_s,
        ttft_ms=1000 * (queue_s if ttft_s is None else ttft_s), outcome="done", model="m", **values,
    )  # fmt: skip


def reported(unit, began_s, ended_s, kind="container"):
    at = [None if second is None else BEGAN + timedelta(seconds=second) for second in (began_s, ended_s)]
    return UnitReport(unit=unit, kind=kind, backend=unit, began_at=at[0], ended_at=at[1])


CALLS = [
    called("plan", 0, 4, 0.5, 1.0),
    called("write", 4.01, 10, 3.0, 4.0),
    called("write", 4.01, 6),
    called("answer", 23, 2),
]
TESTS = [reported("tests", 14.1, 22)]


@pytest.fixture
def spans():
    return spans_of(CALLS, TESTS, BEGAN, BEGAN + timedelta(seconds=30))


def test_the_critical_path_is_what_each_step_waited_for(spans):
    assert [span.unit for span in spans] == ["plan", "write", "write", "tests", "answer"]
    assert [(span.unit, round(span.duration_s)) for span in spans if span.critical] == [
        ("plan", 4), ("write", 10), ("tests", 8), ("answer", 2),
    ]  # fmt: skip


def test_parts_of_the_path_and_the_client_are_the_duration(spans):
    went = timeline.where_time_went([span for span in spans if span.critical], 25.0)
    seconds = {piece.part: round(piece.seconds, 2) for piece in went}
    assert seconds == {"queue": 3.5, "prefill": 1.5, "decode": 11.0, "container": 7.9, "client": 1.1}
    assert went[-1].x + went[-1].width == pytest.approx(1000, abs=1)


def test_waits_on_the_path_are_lost_time_the_longest_first(spans):
    lost = timeline.losses([span for span in spans if span.critical])
    assert [(loss.seconds, loss.span.unit) for loss in lost] == [(3.0, "write"), (0.5, "plan")]


def test_a_unit_without_an_end_is_open_until_now():
    (span,) = spans_of([], [reported("tests", 5, None)], BEGAN, BEGAN + timedelta(seconds=9))
    assert (span.is_open, span.duration_s, span.outcome) == (True, 4.0, "Runs, end not reported")


def test_expected_and_actual_service_at_each_call_with_a_rank():
    standing = {"rank_s": 3.0, "remaining_s": 20.0, "worst_s": 60.0, "attained_s": 4.0}
    calls = [called("plan", 0, 4), called("write", 5, 9, output_tokens=500, trace=[{"run": standing}])]
    spans = spans_of(calls, [reported("tests", 15, 22)], BEGAN, BEGAN)
    units = {"plan": Backend("llm", "m"), "write": Backend("llm", "m"), "tests": Backend("container", "tests")}
    rates = {"plan": ServiceRate(4.0), "write": ServiceRate(0, 0, 0.02), "tests": ServiceRate()}
    (row,) = expectations(spans, units, rates)
    assert (row.rank_s, row.expected_s, row.actual_s, row.error_s) == (
        3.0,
        20.0,
        pytest.approx(17.0),
        pytest.approx(-3.0),
    )


@pytest.mark.django_db
def test_service_counts_by_the_gpus_that_serve_the_region(deployment, profile):
    """Another region has GPUs twice as slow, and a profile of GPUs that no region has is read for none."""
    units = {
        "plan": Backend("llm", deployment.model.name),
        "tests": Backend("container", "t"),
        "new": Backend("llm", "n"),
    }
    for factor, name, west in ((2.0, "slow", True), (9.0, "nowhere", False)):
        slower = {one: factor * getattr(profile, one) for one in ("decode_a_s", "decode_b_s_per_sequence")}
        gpu_type = GpuType.objects.create(
            name=name, title=name, memory_bytes=2**36, on_demand_usd_per_hour=1, spot_usd_per_hour=1
        )
        copied(profile, gpu_type=gpu_type, **slower)
        if west:
            copied(deployment, gpu_type=gpu_type, region=Region.objects.create(name="a-west", title="West"))
    east, west, first = (rates_of(units, region) for region in ("us-east", "a-west", ""))
    assert west["plan"].output_s == pytest.approx(2 * east["plan"].output_s)
    assert first == west, "the first one by name"
    assert (east["tests"], east["new"]) == (ServiceRate(), UNKNOWN_RATE)


def copied(row, **values):
    kept = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields if not field.primary_key}
    for name in values:
        kept.pop(f"{name}_id", None)
    return type(row).objects.create(**kept | values)


@pytest.mark.parametrize(
    ("values", "slack_s", "level", "words"),
    [
        ({}, None, "", "Runs, 0 calls"),
        ({}, 5.0, "fine", "In time so far"),
        ({}, -5.0, "late", "Will be late: 5.0 s after"),
        ({"ended_s": 10}, None, "", "Ended after 10.0 s; it had no deadline"),
        ({"ended_s": 10, "deadline_s": 12}, None, "fine", "In time, 2.0 s before"),
        ({"ended_s": 10, "deadline_s": 7}, None, "late", "Late by 3.0 s, after 10.0 s. 1.5 s of it were waits"),
        ({"ended_s": 10, "outcome": "abandoned"}, None, "risk", "Abandoned after 10.0 s"),
        ({"ended_s": 10, "outcome": "failed", "deadline_s": 12}, None, "late", "Failed after 10.0 s"),
    ],
)
def test_the_verdict_says_how_it_ended(values, slack_s, level, words):
    ended_s = values.pop("ended_s", None)
    run = ApplicationRun(began_at=BEGAN, last_call_at=BEGAN, **values)
    run.ended_at = None if ended_s is None else BEGAN + timedelta(seconds=ended_s)
    said = timeline.verdict(run, 1.5, slack_s)
    assert said[0] == level
    assert words in said[1]
