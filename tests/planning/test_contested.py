"""Moves that others undo: they wait for a cooldown, are said, and raise an alert where they continue."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.console.live.attention import Known, find
from controlplane.console.pages.plans.cards import cards_of
from controlplane.console.selectors.attention import endpoints_flapping
from controlplane.fleet.models import Deployment
from controlplane.planning.execution import contested, executor
from controlplane.planning.models import MoveSource, ScalingMove
from controlplane.tuning.selectors import tuned
from scheduling.scaling.owner import waits
from tests.console import planning_rows

pytestmark = pytest.mark.django_db
PLACE = ("llama-3.1-8b", "us-east")


def moved(delta: int, source: MoveSource, ago_s: float, plan=None) -> ScalingMove:
    return ScalingMove.objects.create(
        at=timezone.now() - timedelta(seconds=ago_s), plan=plan, source=source, strategy="lt_ua", model=PLACE[0],
        region=PLACE[1], gpu_type="a100-80gb", delta=delta, reason="a test",
    )  # fmt: skip


def why(source: MoveSource) -> executor.Why:
    return executor.Why(source, "lt_ua", "use is low")


@pytest.fixture
def three(make_instance):
    rows = [make_instance(launcher="emulator") for _ in range(3)]
    Deployment.objects.update(min_instances=0, max_instances=9)
    return rows


def test_what_one_added_another_does_not_take_away_within_the_cooldown(three):
    cooldown_s = tuned(PLACE[0]).SCALE_COOLDOWN_S
    moved(1, MoveSource.FLOOR, cooldown_s / 2)
    with pytest.raises(executor.Waits, match="the floor added one"):
        executor.move(-1, *PLACE, why(MoveSource.STRATEGY))
    assert executor.attempt(-1, *PLACE, why(MoveSource.STRATEGY)) is None
    last = contested.last_changes(PLACE[0], now=timezone.now())[PLACE[1]]
    assert waits(last, MoveSource.FLOOR, cooldown_s) == ""  # its own it may
    assert waits(last, MoveSource.OPERATOR, cooldown_s) == ""  # people may in any case
    ScalingMove.objects.update(at=timezone.now() - timedelta(seconds=cooldown_s + 1))
    made = executor.move(-1, *PLACE, why(MoveSource.STRATEGY))
    assert (made.delta, made.reason) == (-1, f"use is low The floor added one {cooldown_s + 1:.0f} s ago.")


def test_what_a_plan_added_stays_as_long_as_the_plan_holds(three, language_model):
    plan = planning_rows.plan(language_model, timezone.now(), "carried_out", (1,))
    moved(1, MoveSource.PLAN, 600, plan)
    with pytest.raises(executor.Waits, match="the plan added one 600 s ago, and it holds for"):
        executor.move(-1, *PLACE, why(MoveSource.FLOOR))
    plan.valid_until = timezone.now()
    plan.save()
    assert executor.move(-1, *PLACE, why(MoveSource.FLOOR)).delta == -1


def test_a_reverted_move_names_both_movers(client, viewer, three, language_model):
    plan = planning_rows.plan(language_model, timezone.now(), "carried_out", (-1,))
    moved(-1, MoveSource.PLAN, 100, plan)
    moved(1, MoveSource.FLOOR, 84)
    moved(1, MoveSource.FLOOR, 20)  # that is one more, and undoes nothing
    ((pair,),) = contested.undone_of([plan]).values()
    assert (pair.by.source, round(pair.after_s)) == ("floor", 16)
    said = "1 of its moves undone: reactive floor after 16 s"
    assert [card.undone for card in cards_of([plan], {}, timezone.now())] == [said]
    client.force_login(viewer)
    assert said in client.get(reverse("console:plan", args=[plan.pk])).content.decode()
    assert "Undone by reactive floor after 16 s." in client.get(reverse("console:moves")).content.decode()
    page = client.get(reverse("console:models"), {"open": PLACE[0]}).content.decode()
    assert "1 undone by another" in page


def test_flapping_raises_an_alert(three):
    for number in range(5):
        moved(1 if number % 2 else -1, MoveSource.FLOOR if number % 2 else MoveSource.STRATEGY, 500 - 60 * number)
    (flapping,) = contested.flapping(timezone.now())
    assert (flapping.reversals, flapping.by) == (4, {"Strategy between plans": (0, 3), "Reactive floor": (2, 0)})
    tables = {"instances": []}
    (item,) = find(tables, Known(flapping=endpoints_flapping(), titles={"us-east": "US East"}))["items"]
    assert item["title"] == "Scaling of llama-3.1-8b in US East flaps"
    assert (
        item["detail"]
        == "4 reversals in 15 min: reactive floor +2 \N{MINUS SIGN}0, strategy between plans +0 \N{MINUS SIGN}3"
    )
    ScalingMove.objects.update(at=timezone.now() - timedelta(hours=1))
    assert endpoints_flapping() == ()
