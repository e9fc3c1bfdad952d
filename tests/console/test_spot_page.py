"""The spot pool on the fleet's pages and in REST: what is donated, what it earns, and the actions on it."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Donation, DonationState
from controlplane.fleet.spot import services as spot
from controlplane.planning.execution import executor
from controlplane.tuning import services as tuning
from controlplane.tuning.selectors import tuned

pytestmark = pytest.mark.django_db
S = InstanceState


@pytest.fixture
def donated(make_instance):
    make_instance()
    row = make_instance()
    fleet.drain(row, "planner", "the plan asks for one fewer")
    spot.donate(row, "planner", "the plan asks for one fewer")
    return row


def page(client, user, name="fleet", *args):
    client.force_login(user)
    return client.get(reverse(f"console:{name}", args=args)).content.decode()


def test_a_donated_instance_says_who_let_it_go_its_price_and_when_it_could_be_back(client, viewer, operator, donated):
    Donation.objects.create(
        instance=donated, actor="planner", spot_usd_per_hour="1.2", state=DonationState.RECLAIMED,
        donated_at=timezone.now() - timedelta(hours=2), reclaim_at=timezone.now() - timedelta(hours=1),
        ended_at=timezone.now() - timedelta(hours=1) + timedelta(seconds=54), evicted_requests=7,
    )  # fmt: skip
    fleet_page = page(client, viewer)
    assert "Running spare work" in fleet_page
    assert "1 runs spare work, $1.20 an hour at the spot price" in " ".join(fleet_page.split())
    assert "Stop spare work" not in fleet_page, "a viewer acts on nothing"
    assert "Stop spare work" in page(client, operator)
    text = page(client, viewer, "instance", donated.name)
    assert "the plan asks for one fewer" in text
    assert "could be reclaimed in about 54 s" in text
    assert "$1.20 an hour" in text
    assert "Reclaim…" in page(client, operator, "instance", donated.name)


def test_a_gpu_type_without_a_spot_price_earns_an_unknown_amount(client, operator, donated):
    Donation.objects.update(spot_usd_per_hour=None, donated_at=timezone.now() - timedelta(hours=3))
    for name in ("fleet", "usage"):
        text = page(client, operator, name)
        assert name == "fleet" or "pot price unknown" in text
        assert "$0.00 at the spot price" not in text
        assert "$0.00 an hour at the spot price" not in text
    client.force_login(operator)
    (line,) = client.get("/api/v1/usage", {"group_by": "work"}).json()["donated"]
    assert (line["model"], line["offered_usd"]) == ("llama-3.1-8b", None)
    assert line["instance_hours"] == line["unpriced_hours"]


def test_reclaiming_is_an_action_of_the_instance(client, operator, donated):
    client.force_login(operator)
    client.post(reverse("console:operate", args=["instances", donated.pk, "reclaim"]), {"reason": "load"})
    donated.refresh_from_db()
    assert donated.state == S.RECLAIMING
    assert "is reclaimed since" in page(client, operator, "instance", donated.name)


def test_stop_donating_switches_the_setting_off_and_stops_what_is_donated(client, operator, language_model, donated):
    tuning.change("SPOT_DONATE", True, actor="test")
    tuning.change("SPOT_DONATE", True, actor="test", model=language_model)
    client.force_login(operator)
    client.post(reverse("console:stop-donating"), {"reason": "a benchmark"})
    assert not tuned(language_model.name).SPOT_DONATE
    donated.refresh_from_db()
    assert (donated.state, donated.held) == (S.DRAINING, "")
    type(donated).objects.filter(pk=donated.pk).update(state_changed_at=timezone.now() - timedelta(seconds=10))
    assert [row.pk for row in executor.drained()] == [donated.pk]
    assert executor.finish_drain(executor.drained()[0], 0, "planner")
    fleet.move(donated, S.STOPPED, actor="worker", reason="stopped")
    assert Donation.objects.get().state == DonationState.STOPPED


def test_rest(client, viewer, operator, donated):
    client.force_login(viewer)
    (donation,) = client.get("/api/donations").json()["items"]
    assert donation["instance"] == donated.name
    client.force_login(operator)
    reclaimed = client.post(f"/api/instances/{donated.name}/reclaim", {"reason": "load"}, "application/json")
    assert reclaimed.status_code == 200
    donated.refresh_from_db()
    assert donated.state == "reclaiming"
