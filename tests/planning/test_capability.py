"""Capability from rows: bursts of the minutes, windows of endpoints, and the percentiles of classes."""

from datetime import timedelta

import pytest

from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile, SloClass, SloKind
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning.forecasts import demand
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans.expected import expect
from tests.planning.conftest import NOW, PLACE

pytestmark = pytest.mark.django_db


def measured():
    expected = expect(NOW, {})
    return capability.read(inventory.read({PLACE[0]}), expected.demand, NOW)[PLACE[0], "a100-80gb"]


def arrival_cv():
    return demand.read(NOW - timedelta(hours=4), NOW, 60).arrival_cv(PLACE)


@pytest.mark.nightly
def test_bursts_of_the_minutes_leave_less_of_an_instance(make_minutes):
    make_minutes(120, requests=40)
    assert arrival_cv() == 0.0  # as even as a clock
    even = measured()
    for row in MinuteRow.objects.order_by("minute")[::2]:
        row.requests = 240
        row.save()
    assert arrival_cv() == pytest.approx((((240 - 40) ** 2) / 2 / 140) ** 0.5, rel=0.05)
    uneven = measured()
    assert even.cv == 1.0 < uneven.cv
    assert uneven.reserve * uneven.cv > even.reserve * even.cv


def test_the_percentile_of_the_class_is_the_one_that_is_planned_for(make_minutes):
    make_minutes(30)
    assert measured().percentile == 95.0
    SloClass.objects.update(percentile=99.0)
    strict = measured()
    assert strict.percentile == 99.0
    assert capability.strictest()[1] == 99.0


@pytest.mark.sql
def test_a_window_is_of_all_instances_of_an_endpoint_and_of_its_classes_promises(deployment, acme, slo_class):
    SloClass.objects.update(percentile=90.0)
    names = ["one", "two"]
    Instance.objects.bulk_create(Instance(name=name, deployment=deployment, state="ready") for name in names)
    LedgerRow.objects.bulk_create(
        LedgerRow(
            request_id=f"r{at}",
            arrived_at=NOW - timedelta(minutes=20, seconds=at),
            tenant=acme,
            model=PLACE[0],
            region=PLACE[1],
            slo_class=slo_class.name,
            instance=names[at % 2],
            streamed=True,
            outcome="done",
            status_code=200,
            prompt_tokens=100,
            output_tokens=10,
            slo_met=at > 0,
        )
        for at in range(40)
    )
    (window,) = capability._windows(NOW)[PLACE[0], "a100-80gb"]
    assert window == (4000, 400, 1, 40, 2, pytest.approx(4.0))


def test_a_model_without_output_has_a_capability_of_its_prompts(make_minutes):
    """Requests of many inputs are longer than the context of one."""
    make_minutes(30)
    MinuteRow.objects.update(output_tokens=0)
    Model.objects.filter(name=PLACE[0]).update(task="embed", context_tokens=64)
    prompt, output = capability.mean_lengths(PLACE[0], NOW)
    row = MinuteRow.objects.first()
    assert (prompt, output) == (row.prompt_tokens / row.requests, 1.0)
    one = measured()
    assert prompt > 64
    assert one.prompt_tokens_per_s > 100 * one.output_tokens_per_s > 0
    engine = capability.engine_of(Deployment.objects.get(), PerformanceProfile.objects.get())
    assert engine.max_model_len > prompt


def test_long_deferred_requests_are_no_broken_promises_and_uncounted_classes_nothing(
    make_minutes, acme, language_model
):
    """A prompt that takes longer than a promise of interactive requests is late only where it is one of them."""
    Model.objects.update(context_tokens=131_072)
    SloClass.objects.create(name="batch", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
    SloClass.objects.create(name="spare", kind=SloKind.OPPORTUNISTIC)
    make_minutes(30)
    LedgerRow.objects.bulk_create(
        LedgerRow(
            request_id=f"r{at}",
            arrived_at=NOW - timedelta(seconds=at + 1),
            tenant=acme,
            model=PLACE[0],
            slo_class=("interactive", "batch", "spare")[at % 3],
            streamed=True,
            outcome="done",
            status_code=200,
            prompt_tokens=(1000, 60_000, 9)[at % 3],
            output_tokens=(100, 100, 90_000)[at % 3],
        )
        for at in range(60)
    )
    of_kind = {}
    for kind in (SloKind.NON_INTERACTIVE, SloKind.INTERACTIVE):
        SloClass.objects.filter(name="batch").update(kind=kind)
        capability._simulated.clear()
        of_kind[kind] = measured()
    assert of_kind[SloKind.NON_INTERACTIVE].out_of_reach == 0.0
    assert of_kind[SloKind.INTERACTIVE].out_of_reach == 0.5
    for one in of_kind.values():
        assert one.prompt_tokens_per_s == pytest.approx(305 * one.output_tokens_per_s)
