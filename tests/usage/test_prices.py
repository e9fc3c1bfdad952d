"""Prices count from a moment on: no recount changes a sum, and a correction says what it changes."""

from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db.models import Sum

from controlplane.events.models import Event
from controlplane.fleet.models import GpuType, Instance, Price, PriceOf, SloClass
from controlplane.gateway.models import LedgerRow
from controlplane.usage import counting
from controlplane.usage.counting import count_hours, count_usage
from controlplane.usage.models import InstanceHour, UsageHour, UsageMark
from controlplane.usage.prices import set_price

pytestmark = pytest.mark.sql
TEN = datetime(2026, 7, 20, 10, tzinfo=UTC)
GPUS = 2


def at(minutes: float) -> datetime:
    return TEN + timedelta(minutes=minutes)


@pytest.fixture
def instance(make_instance):
    """Runs from 9 on, at 4 dollars an hour for each of its two GPUs."""
    made = make_instance(created_at=at(-60))
    price(made, 4, BEGINNING)
    return made


BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def price(instance: Instance, usd: float, from_at: datetime, of: PriceOf = PriceOf.GPU) -> None:
    name = instance.deployment.gpu_type.name
    Price.objects.filter(of=of, name=name, from_at=BEGINNING).delete() if from_at == BEGINNING else None
    Price.objects.create(of=of, name=name, amount=usd, from_at=from_at)


def ran(make_request, instance, begin: float, end: float, **values) -> LedgerRow:
    return make_request(
        arrived_at=at(begin), queue_ms=0.0, e2e_ms=(end - begin) * 60_000, instance=instance.name, **values
    )


def dollars(hour: datetime, column: str = "cost_usd", model=UsageHour) -> float:
    rows = model.objects.filter(hour__gte=hour, hour__lt=hour + timedelta(hours=1))
    return rows.aggregate(sum=Sum(column))["sum"] or 0.0


@pytest.mark.parametrize("spot", [None, 1.0])
def test_a_price_counts_from_its_moment_on_in_any_recount(make_request, instance, spot):
    """D02: 4 dollars until 10:40, 2 from then on; the hour before stays, whatever comes late, and without its instance."""
    SloClass.objects.filter(name="interactive").update(kind="opportunistic" if spot else "interactive")
    ran(make_request, instance, -60, 100)
    price(instance, 2, at(40))
    if spot:
        price(instance, spot, BEGINNING, PriceOf.SPOT)
        Price.objects.create(of=PriceOf.SPOT, name=instance.deployment.gpu_type.name, amount=None, from_at=at(40))
    expected = {at(-60): GPUS * 4.0, TEN: GPUS * (4 * 40 + 2 * 20) / 60, at(60): GPUS * 2.0}
    spot_or = {hour: GPUS * spot if spot else usd for hour, usd in expected.items()}
    charged = spot_or | ({TEN: GPUS * (spot * 40 + 2 * 20) / 60, at(60): GPUS * 2 * 40 / 60} if spot else {})
    charged[at(60)] = GPUS * 2 * 40 / 60
    for late in range(3):
        count_usage(at(120 + late))
        assert {hour: dollars(hour) for hour in expected} == pytest.approx(expected)
        assert {hour: dollars(hour, "charged_usd") for hour in charged} == pytest.approx(charged)
        assert {hour: dollars(hour, "cost_usd", InstanceHour) for hour in expected} == pytest.approx(expected)
        if late == 0:
            ran(make_request, instance, -30, -29)
        else:
            Instance.objects.filter(name=instance.name).delete()
            ran(make_request, instance, -20, -19)


def test_a_price_that_is_edited_counts_from_now_on(make_request, instance, monkeypatch):
    now = [at(40)]
    monkeypatch.setattr("controlplane.fleet.models.prices.timezone.now", lambda: now[0])
    gpu, slo_class = instance.deployment.gpu_type, SloClass.objects.get(name="interactive")
    Price.objects.all().delete()
    now[0] = at(-999)
    gpu.save()
    slo_class.save()
    now[0] = at(40)
    gpu.on_demand_usd_per_hour, slo_class.price_factor = 2, 3
    gpu.save()
    slo_class.save()
    gpu.save()
    assert list(Price.objects.filter(of=PriceOf.GPU).values_list("amount", flat=True)) == [2.0, 1.35]
    ran(make_request, instance, 0, 60)
    count_usage(at(60))
    assert dollars(TEN) == pytest.approx(GPUS * (1.35 * 40 + 2 * 20) / 60)
    assert dollars(TEN, "charged_usd") == pytest.approx(GPUS * (1.35 * 40 + 3 * 2 * 20) / 60)


@pytest.mark.parametrize("ledger", ["kept", "gone"])
@pytest.mark.parametrize("of", [PriceOf.GPU, PriceOf.SLO_CLASS])
def test_a_correction_is_an_entry_that_says_what_it_changes(make_request, instance, ledger, of, fleet_admin):
    ran(make_request, instance, -60, 30, application="triage", run="r")
    count_usage(at(60))
    if ledger == "gone":
        LedgerRow.objects.all().delete()
    row = instance.deployment.gpu_type if of == PriceOf.GPU else SloClass.objects.get(name="interactive")
    before, was = dollars(at(-60), "charged_usd"), Price.objects.count()
    repriced = set_price(Price(of=of, name=row.name, amount=8, from_at=TEN, reason="the contract of July"), fleet_admin)
    assert (repriced.months, repriced.hours, repriced.until) == (["2026-07"], 1, None)
    assert dollars(at(-60), "charged_usd") == before
    cost = GPUS * (8 if of == PriceOf.GPU else 4)
    charged = GPUS * 0.5 * (8 if of == PriceOf.GPU else 8 * 4)
    for model in (UsageHour, InstanceHour):
        assert dollars(TEN, "cost_usd", model) == pytest.approx(cost)
        assert dollars(TEN, "charged_usd", model) == pytest.approx(charged)
    assert repriced.charged_usd[1] == pytest.approx(charged)
    event = Event.objects.get(kind="price.set")
    assert (event.reason, event.after["months"]) == ("the contract of July", ["2026-07"])
    assert Price.objects.count() == was + 1
    row.refresh_from_db()
    assert (row.on_demand_usd_per_hour if of == PriceOf.GPU else row.price_factor) == 8
    if ledger == "kept":  # a recount gives the same
        ran(make_request, instance, 1, 1)
        count_usage(at(61))
        assert dollars(TEN, "charged_usd") == pytest.approx(charged)


def test_a_correction_ends_at_the_next_entry(make_request, instance, fleet_admin):
    price(instance, 2, at(30))
    ran(make_request, instance, 0, 60)
    count_usage(at(60))
    name = instance.deployment.gpu_type.name
    repriced = set_price(Price(of=PriceOf.GPU, name=name, amount=10, from_at=TEN, reason="typing error"), fleet_admin)
    assert repriced.until == at(30)
    assert dollars(TEN) == pytest.approx(GPUS * (10 + 2) / 2)
    assert GpuType.objects.get(name=name).on_demand_usd_per_hour != 10


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"name": "none"}, "name"),
        ({"reason": ""}, "reason"),
        ({"amount": -1}, "amount"),
        ({"amount": None}, "amount"),
        ({"from_at": datetime(2099, 1, 1, tzinfo=UTC)}, "from_at"),
        ({"from_at": at(7)}, "from_at"),
        ({"of": PriceOf.BATCH}, "of"),
        ({"of": "euro"}, "of"),
    ],
)
def test_a_wrong_entry_is_refused_by_field(instance, values, field, fleet_admin):
    given = {"of": PriceOf.GPU, "name": instance.deployment.gpu_type.name, "amount": 1, "from_at": TEN, "reason": "r"}
    before = Price.objects.count()
    with pytest.raises(ValidationError) as refused:
        set_price(Price(**given | values), fleet_admin)
    assert list(refused.value.message_dict) == [field]
    assert Price.objects.count() == before


def test_a_quarter_that_was_counted_keeps_its_instances(make_request, instance):
    """One that is deleted, or changes its GPUs, changes no sum of the past."""
    ran(make_request, instance, 0, 10)
    count_usage(at(30))
    before = dollars(TEN)
    final = UsageMark.objects.get().counted_until - counting.FINAL_AFTER
    instance.deployment.tensor_parallel = 8
    instance.deployment.save()
    assert sum(row.cost_usd for one in count_hours([TEN], at(15), final) for row in one.rows) == pytest.approx(
        before / 2
    )
