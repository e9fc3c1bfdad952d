"""Usage as it is counted: nothing twice, nothing lost, and in all exactly what the fleet cost."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import Sum
from django.db.models.functions import TruncHour

from controlplane.accounts.services import create_api_key
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Price, SloClass
from controlplane.gateway.models import LedgerRow
from controlplane.usage import counting
from controlplane.usage.counting import count_usage
from controlplane.usage.models import SUMS, UsageHour, UsageMark
from controlplane.usage.paid_time import ENDED_AT, paid_periods

pytestmark = pytest.mark.sql
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
USD_PER_INSTANCE_HOUR = 2 * 1.35


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


@pytest.fixture
def instance(make_instance):
    return make_instance(created_at=NOON)


@pytest.fixture
def ran(make_request, instance):
    """`ran(10, 20, …)`: a request that ran on the instance from minute 10 to minute 20."""

    def make(begin: float, end: float, waited_minutes: float = 0.0, **values) -> LedgerRow:
        return make_request(
            arrived_at=at(begin - waited_minutes),
            queue_ms=waited_minutes * 60_000,
            e2e_ms=(end - begin + waited_minutes) * 60_000,
            instance=instance.name,
            **values,
        )

    return make


def set_up(row, **values) -> None:
    """Set *values* on *row*, and its prices as if it always had them."""
    for name, value in values.items():
        setattr(row, name, value)
    Price.objects.filter(name=row.name).delete()
    row.save()


def rows() -> list[dict]:
    """Sums by the hour."""
    hours = UsageHour.objects.annotate(of=TruncHour("hour")).order_by().values("of", "tenant", "model", "slo_class")
    sums = hours.annotate(**{f"sum_{name}": Sum(name) for name in SUMS})
    return [
        {"hour": row["of"], "tenant": row["tenant"], **{name: row[f"sum_{name}"] for name in SUMS}}
        for row in sums.order_by("of", "tenant", "model", "slo_class")
    ]


def total(name: str, hour: datetime | None = None, **of) -> float:
    if hour is not None:
        of |= {"hour__gte": hour, "hour__lt": hour + timedelta(hours=1)}
    return UsageHour.objects.filter(**of).aggregate(sum=Sum(name))["sum"] or 0.0


def test_an_hour_is_shared_by_kv_token_seconds(ran, acme, globex):
    set_up(SloClass.objects.get(name="interactive"), price_factor=2)
    ran(0, 30, prompt_tokens=300, output_tokens=0)
    ran(0, 30, prompt_tokens=50, output_tokens=100, tenant=globex)
    count_usage(at(60))
    hours = {row["tenant"]: row for row in rows() if row["hour"] == NOON}
    assert hours[acme.pk]["kv_token_s"] == pytest.approx(300 * 1800)
    assert hours[acme.pk]["cost_usd"] == pytest.approx(USD_PER_INSTANCE_HOUR / 2 * 0.75)
    assert hours[acme.pk]["charged_usd"] == pytest.approx(USD_PER_INSTANCE_HOUR * 0.75)
    assert hours[globex.pk]["gpu_s"] == pytest.approx(1800 * 2 * 0.25)
    assert hours[None]["cost_usd"] == pytest.approx(USD_PER_INSTANCE_HOUR / 2)
    assert hours[None]["requests"] == hours[None]["charged_usd"] == 0


@pytest.mark.parametrize(
    ("kind", "line", "spot_usd", "work", "charged"),
    [
        ("interactive", False, "0.75", "interactive", 2.0),
        ("non_interactive", False, "0.75", "non_interactive", 2.0),
        ("non_interactive", True, "0.75", "batch", 2.0 * 0.3),
        ("opportunistic", False, "0.75", "opportunistic", 0.75 / 1.35),
        ("opportunistic", False, None, "opportunistic", 2.0),
    ],
    ids=["interactive", "non-interactive", "batch line", "opportunistic", "opportunistic, spot price unknown"],
)
def test_work_is_charged_by_class_batch_discount_or_spot_price(
    ran, acme, instance, settings, kind, line, spot_usd, work, charged
):
    """An hour of the instance costs 2 x $1.35; the class doubles it, a batch line pays 30% of that."""
    settings.BATCH_PRICE_FACTOR = 0.3
    deadline_s = 3600 if kind == "non_interactive" else None
    set_up(SloClass.objects.get(name="interactive"), kind=kind, price_factor=2, deadline_s=deadline_s)
    set_up(instance.deployment.gpu_type, spot_usd_per_hour=spot_usd)
    ran(0, 60, request_id="batch_req_1_7" if line else "req_1")
    count_usage(at(60))
    assert set(UsageHour.objects.filter(tenant=acme).values_list("work", flat=True)) == {work}
    assert total("cost_usd", tenant=acme) == pytest.approx(USD_PER_INSTANCE_HOUR)
    assert total("charged_usd", tenant=acme) == pytest.approx(charged * USD_PER_INSTANCE_HOUR)


def test_keys_models_and_classes_have_separate_rows(ran, acme):
    key, _ = create_api_key(acme, "first", "a test")
    ran(0, 1, api_key=key)
    ran(0, 1)
    ran(0, 1, model="llama-2-70b")
    ran(0, 1, slo_class="gone")
    count_usage(at(30))
    assert UsageHour.objects.filter(tenant=acme).count() == 4
    assert UsageHour.objects.get(api_key=key).requests == 1


def test_counting_again_changes_nothing(ran):
    ran(5, 50)
    ran(55, 70)
    count_usage(at(80))
    first = rows()
    assert sum(row["requests"] for row in first) == 2
    for _ in range(3):
        count_usage(at(80))
    assert rows() == first


def test_a_request_is_in_the_hours_in_which_it_ran_and_counted_once(ran, acme):
    ran(30, 90, waited_minutes=20, prompt_tokens=100, output_tokens=0)
    ran(55, 60 + 6 * 60, waited_minutes=50, prompt_tokens=100, output_tokens=0)
    count_usage(at(8 * 60))
    assert total("requests", tenant=acme) == total("requests", hour=NOON) == 2
    assert total("kv_token_s", tenant=acme) == pytest.approx(100 * 60 * (60 + 365))
    assert total("kv_token_s", hour=at(6 * 60), tenant=acme) == pytest.approx(100 * 3600)
    assert total("cost_usd") == pytest.approx(8 * USD_PER_INSTANCE_HOUR)


def test_late_rows_are_counted_in_their_hour(ran, acme):
    ran(5, 10)
    count_usage(at(180))
    assert total("requests", tenant=acme) == 1
    ran(12, 20)  # a journal that was taken up after a crash
    count_usage(at(181))
    assert total("requests", tenant=acme) == 2
    assert total("cost_usd") == pytest.approx(181 / 60 * USD_PER_INSTANCE_HOUR)


def test_a_row_whose_transaction_ended_after_that_of_a_later_one_is_found(ran, acme):
    slow = ran(1, 2)
    ran(1, 2)
    slow_pk = slow.pk
    slow.delete()  # not committed yet
    count_usage(at(180))
    assert total("requests", tenant=acme) == 1
    slow.pk = slow_pk
    slow.save(force_insert=True)
    count_usage(at(181))
    assert total("requests", tenant=acme) == 2


def test_the_hour_is_fresh_and_grows(ran):
    ran(0, 1)
    count_usage(at(2))
    assert total("cost_usd") == pytest.approx(USD_PER_INSTANCE_HOUR / 30)
    ran(2, 3)
    count_usage(at(4))
    assert total("requests") == 2
    assert total("cost_usd") == pytest.approx(USD_PER_INSTANCE_HOUR / 15)


def test_usage_survives_its_ledger(ran, settings):
    settings.LEDGER_KEEP_DAYS = 1
    ran(0, 30)
    count_usage(at(60))
    before = UsageHour.objects.filter(hour=NOON).values_list("pk", *SUMS)
    kept = list(before)
    LedgerRow.objects.all().delete()
    count_usage(at(60 * 30))
    assert list(before) == kept
    assert total("requests") == 1


def test_a_ledger_of_many_rows_is_counted_in_chunks(ran, monkeypatch):
    monkeypatch.setattr(counting, "CHUNK_ROWS", 3)
    for minute in range(8):
        ran(minute * 20, minute * 20 + 10)
    assert count_usage(at(180)) > 4
    assert total("requests") == 8
    assert total("cost_usd") == pytest.approx(3 * USD_PER_INSTANCE_HOUR)


def test_concurrent_counters_leave_it_to_the_faster(ran, monkeypatch):
    ran(0, 30)
    count_usage(at(40))
    counted = counting.count_hours

    def slowly(hours, now, final):
        UsageMark.objects.update(counted_until=at(50))  # another process has counted meanwhile
        return counted(hours, now, final)

    monkeypatch.setattr(counting, "count_hours", slowly)
    before = rows()
    assert count_usage(at(45)) == 0
    assert rows() == before


def test_an_instance_costs_what_it_does_until_it_is_stopped(ran, instance):
    def moved(minute: float, before: str, after: str, **inputs) -> None:
        Event.objects.create(
            at=at(minute), kind="instance.moved", subject_type="instance", subject_id=str(instance.pk), actor="a test",
            before={"state": before}, after={"state": after}, inputs=inputs,
        )  # fmt: skip

    moved(20, "ready", "draining")
    moved(30, "draining", "stopped")
    moved(90, "stopped", "provisioning")
    moved(100, "provisioning", "loading")
    ran(0, 10)
    count_usage(at(120))
    assert total("cost_usd", hour=NOON) == pytest.approx(USD_PER_INSTANCE_HOUR / 2)
    assert total("cost_usd", hour=at(60)) == pytest.approx(USD_PER_INSTANCE_HOUR / 2)


def test_a_server_that_ended_with_the_stack_costs_nothing_from_then_on():
    noticed = Event(
        at=at(600),
        before={"state": "ready"},
        after={"state": "stopped"},
        inputs={ENDED_AT: at(30).isoformat()},
    )
    again = Event(at=at(601), before={"state": "stopped"}, after={"state": "provisioning"})
    paid = paid_periods(NOON, at(660), InstanceState.READY, [noticed, again])
    assert [(until - since) / 60 for since, until in paid] == [30, 59]


def test_one_that_shares_its_gpus_has_them_while_it_is_awake():
    slept = Event(at=at(30), before={"state": "draining"}, after={"state": "sleeping"})
    woke = Event(at=at(45), before={"state": "sleeping"}, after={"state": "loading"})
    for shares, minutes in ((False, [30, 15, 15]), (True, [30, 15])):
        paid = paid_periods(NOON, at(60), InstanceState.READY, [slept, woke], shares_gpus=shares)
        assert [(until - since) / 60 for since, until in paid] == minutes
