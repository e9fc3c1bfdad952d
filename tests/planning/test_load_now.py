"""A proposed plan is judged against the load of now: what is asked for, what waits, and what its instances can serve."""

import pytest

from controlplane.console.pages.scaling.cards import card_of
from controlplane.fleet.models import Node, SloClass
from controlplane.planning import services
from controlplane.planning.forecasts.services import make_forecasts
from controlplane.planning.models import PlanStatus, PolicyMode
from controlplane.planning.plans import load_now
from controlplane.planning.plans.load_now import LoadNow, Waiting
from controlplane.planning.plans.services import make_plans
from scheduling.planning.capacity import LEAST_LEFT_S
from tests.planning.conftest import NOW, PLACE

ABLE = {"capability_tokens_per_s": {"a100": {"used": 1000.0}, "h100": {"used": 2000.0}}}


def plan(*changes):
    """Each (GPU type, present, target)."""
    rows = [{"gpu_type": gpu_type, "present": before, "target": after} for gpu_type, before, after in changes]
    return {"targets": rows, "inputs": ABLE}


@pytest.mark.parametrize(
    ("load", "changes", "below"),
    [
        (LoadNow(2900.0), [("a100", 5, 3)], False),
        (LoadNow(3100.0), [("a100", 5, 3)], True),
        (LoadNow(1000.0, 2100.0), [("a100", 5, 3)], True),
        (LoadNow(2900.0, waiting=Waiting(7, 1e6, 200.0)), [("a100", 5, 3)], True),
        (LoadNow(2900.0, waiting=Waiting(7, 0.0, 0.0, 200.0 * LEAST_LEFT_S)), [("a100", 5, 3)], True),
        (LoadNow(1000.0, 21_000.0, room=0.1), [("a100", 5, 3)], True),
        (LoadNow(1000.0, 19_000.0, Waiting(7, 1e6, 900.0), room=0.1), [("a100", 5, 3)], False),
        (LoadNow(9900.0), [("a100", 3, 5)], False),
        (LoadNow(9900.0), [("a100", 3, 3)], False),
        (LoadNow(4900.0), [("a100", 5, 1), ("h100", 0, 2)], False),
        (LoadNow(5100.0), [("a100", 5, 1), ("h100", 0, 2)], True),
        (LoadNow(9900.0), [("b200", 5, 3)], False),
    ],
)
def test_a_plan_that_takes_instances_away_says_where_less_is_left_than_is_asked_for_or_waits(load, changes, below):
    said = load.above(plan(*changes))
    assert bool(said) == below
    if said:
        assert f"{load.tokens_per_s:,.0f} needed now" in said


@pytest.mark.django_db
@pytest.mark.usefixtures("minute_windows")
@pytest.mark.parametrize("waits", [0, 40])
def test_a_proposal_below_the_load_of_now_says_so_in_its_note_and_where_it_is_approved(
    make_minutes, make_instance, deployment, language_model, monkeypatch, waits
):
    """Batch lines that are due now need thrice an instance; the forecast needs one of three."""
    SloClass.objects.create(name="flex", title="Flex", kind="non_interactive", deadline_s=3600)
    make_minutes(40, prompt=6_000, output=600)
    for _ in range(3):
        make_instance(node=Node.objects.get())
    make_forecasts(NOW)
    services.set_policy(language_model, "lt_u", PolicyMode.ASK, {}, "a test")
    waiting = {PLACE[0]: Waiting(waits, 0.0, 0.0, waits * 1e6)}
    monkeypatch.setattr(load_now.waiting_work, "read", lambda: waiting)
    (row,) = make_plans(NOW)
    assert (row.status, [(one["present"], one["target"]) for one in row.targets]) == (PlanStatus.ADVICE, [(3, 1)])
    card = card_of(row, {}, NOW)
    assert ("Below the load now" in row.note, "40 requests waiting" in card["below"]) == (waits > 0, waits > 0)
    load = load_now.read(NOW)[PLACE[0]]
    assert (load.interactive, load.deferred, load.waiting.requests) == (pytest.approx(110.0), 0.0, waits)


@pytest.mark.django_db
@pytest.mark.usefixtures("minute_windows")
def test_the_load_of_now_is_of_each_kind_of_class(make_minutes):
    SloClass.objects.create(name="flex", title="Flex", kind="non_interactive", deadline_s=3600)
    SloClass.objects.create(name="rest", title="Rest", kind="opportunistic")
    make_minutes(10, prompt=60_000, output=0, slo_met=9, slo_judged=10)
    make_minutes(10, prompt=600_000, output=0, slo_class="flex", slo_met=10, slo_judged=10)
    make_minutes(10, prompt=6_000_000, output=0, slo_class="rest")
    load = load_now.read(NOW)[PLACE[0]]
    assert (load.interactive, load.deferred) == (pytest.approx(1000.0), pytest.approx(10_000.0))
    assert load.slo is not None
    assert (load.slo.slo_class, load.slo.ratio) == ("interactive", 0.9)
