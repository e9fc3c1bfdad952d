"""Maintenance: a place is cordoned and emptied until its window ends, by itself or by hand, and serves again after that."""

from datetime import UTC, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from controlplane.alerts.problems import find, read_known
from controlplane.events.models import Event
from controlplane.fleet import maintenance, places, selectors, services
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Deployment, Instance, Launcher, Maintenance
from controlplane.fleet.spot import services as spot
from controlplane.planning.execution import executor

pytestmark = pytest.mark.django_db
S = InstanceState
HOUR = timedelta(hours=1)


@pytest.fixture
def here(make_instance, node):
    """Instances of one node: two that serve, one that starts."""
    states = (S.READY, S.READY, S.LOADING)
    return [make_instance(state=state, node=node, launcher=Launcher.EMULATED) for state in states]


def begin(place, operator, hours=2, **more):
    return maintenance.plan(place, operator, "a new kernel", timezone.now() + hours * HOUR, **more)


def states(rows):
    return [Instance.objects.get(pk=row.pk).state for row in rows]


def settle(*rows):
    """What drains has been idle for a while, and workers have stopped what they were told to."""
    Instance.objects.filter(state=S.DRAINING).update(state_changed_at=timezone.now() - timedelta(minutes=1))
    for row in executor.drained():
        executor.finish_drain(row, 0, executor.PLANNER)
    for row in rows:
        if (command := services.open_command(row)) is not None:
            assert command.verb == "stop"
            services.move(row, S.STOPPED, actor="worker", reason=command.reason)
            row.commands.update(state="done")


@pytest.mark.parametrize("of", ["node", "region"])
def test_a_place_is_emptied_and_serves_again_after_the_window(here, node, operator, of):
    place = node if of == "node" else node.region
    row = begin(place, operator)
    place.refresh_from_db()
    assert "maintenance until" in place.cordoned
    assert "a new kernel" in place.cordoned
    assert states(here) == [S.DRAINING, S.DRAINING, S.LOADING]
    assert services.open_command(here[2]).verb == "stop", "nothing runs on it yet"
    assert "2 instances drain" in maintenance.planned(row)
    settle(*here)
    assert states(here) == [S.STOPPED] * 3
    with pytest.raises(ActionError, match="cordoned"):
        services.start(Instance.objects.get(pk=here[0].pk), operator, "too early")
    assert maintenance.advance() == 0, "while it lasts, nothing there moves"
    assert maintenance.advance(row.until) == 3
    place.refresh_from_db()
    assert (place.cordoned, states(here)) == ("", [S.PROVISIONING] * 3)
    assert {one.restart for one in Instance.objects.all()} == {""}


def test_what_is_in_maintenance_is_not_missing_but_what_waits_for_it_is_an_alarm(here, node, operator, deployment):
    def found(least, waiting=0):
        Deployment.objects.filter(pk=deployment.pk).update(min_instances=least, max_instances=9)
        row = {"model": "llama-3.1-8b", "region": "us-east", "waiting": waiting, "instances_ready": 0}
        return [(each.title, each.words) for each in find({"endpoints": [row]}, read_known(timezone.now()))]

    row, of = begin(node, operator), "llama-3.1-8b in US East"
    away = f"3 in maintenance until {row.until:%d %b %H:%M} UTC"
    assert found(least=3) == []
    assert found(least=3, waiting=5) == [(f"No instance of {of} is ready", f"5 requests wait for one; {away}")]
    assert found(least=4) == [(f"0 of 4 instances of {of} are ready", f"fewer than its minimum; {away}")]
    maintenance.end(row, operator, "done")
    assert found(least=3) == [(f"0 of 3 instances of {of} are ready", "fewer than its minimum")]


def test_a_window_to_come_begins_by_itself_and_can_be_cancelled(here, node, operator):
    starts = timezone.now() + HOUR
    row, later = (
        begin(node, operator, from_at=starts),
        begin(node, operator, hours=9, from_at=timezone.now() + 8 * HOUR),
    )
    assert "begins on" in maintenance.planned(row)
    node.refresh_from_db()
    assert (node.cordoned, maintenance.advance(), states(here)) == ("", 0, [S.READY, S.READY, S.LOADING])
    with pytest.raises(ActionError, match="has maintenance from"):
        begin(node, operator, hours=3)
    assert maintenance.advance(starts) == 3
    node.refresh_from_db()
    assert node.cordoned
    assert "cancelled" in maintenance.end(later, operator, "not needed")
    kinds = set(Event.objects.filter(subject_type="node").values_list("kind", flat=True))
    assert {"node.maintenance_planned", "node.cordoned", "node.maintenance_cancelled"} <= kinds


def test_ended_by_hand_what_still_drains_serves_on(here, node, operator):
    row = begin(node, operator)
    with pytest.raises(ActionError, match="in maintenance until"):
        services.uncordon(node, operator, "too early")
    maintenance.end(row, operator, "done")
    node.refresh_from_db()
    assert (node.cordoned, states(here)[:2]) == ("", [S.READY, S.READY])
    assert executor.drained() == []
    with pytest.raises(ActionError, match="has ended"):
        maintenance.end(row, operator, "again")


def test_two_ticks_at_once_begin_it_once(here, node, operator):
    starts = timezone.now() + HOUR
    row = begin(node, operator, from_at=starts)
    stale = Maintenance.objects.get(pk=row.pk)
    maintenance.advance(starts)
    assert maintenance._begin(stale, starts) == 0
    assert Maintenance.objects.get(pk=row.pk).cordon, "its end still lifts the cordon"


def test_a_cordon_from_before_outlives_it(here, node, operator):
    services.cordon(node, operator, "bad fan")
    maintenance.end(begin(node, operator), operator, "done")
    node.refresh_from_db()
    assert "bad fan" in node.cordoned


def test_an_instance_that_loaded_before_its_stop_came_is_drained(here, node, operator):
    begin(node, operator)
    here[2].commands.update(state="failed")
    services.move(here[2], S.READY, actor="gateway", reason="answers")
    assert maintenance.advance() == 1
    assert states(here)[2] == S.DRAINING


def test_servers_started_elsewhere_drain_and_serve_again(node, operator, make_instance):
    row = make_instance(launcher=Launcher.EXTERNAL, node=node)
    window = begin(node, operator)
    settle()
    assert states([row]) == [S.DRAINING], "Pilothouse cannot stop it"
    maintenance.advance(window.until)
    assert states([row]) == [S.READY]


def test_donated_and_held_instances_stay_down_and_full_deployments_start_no_more(here, node, operator, make_instance):
    ready, spare, _ = here
    services.drain(spare, "planner", "one fewer")
    spot.donate(spare, "planner", "one fewer")
    held = make_instance(state=S.STOPPED, node=node, held="operator, broken")
    row = begin(node, operator)
    settle(*here)
    assert states((ready, spare, held)) == [S.STOPPED] * 3
    Deployment.objects.update(max_instances=1)
    elsewhere = make_instance(state=S.READY)
    maintenance.advance(row.until)
    assert states((ready, spare, held, elsewhere)) == [*[S.STOPPED] * 3, S.READY]
    assert not Instance.objects.exclude(restart="").exists(), "others have taken its place"


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [(0, -1, "ends before it begins"), (3, 2, "ends before it begins"), (0, 24 * 31, "30 days at most")],
)
def test_windows_that_are_refused(node, operator, start, end, why):
    now = timezone.now()
    with pytest.raises(ActionError, match=why):
        maintenance.plan(node, operator, "x", now + end * HOUR, now + start * HOUR)
    assert not Maintenance.objects.exists()


@pytest.mark.parametrize("hours", [0, 3])
def test_a_window_is_said_in_utc(node, operator, hours):
    """As a page in Berlin, or REST with +02:00, gives it."""
    until = (timezone.now() + 5 * HOUR).astimezone(ZoneInfo("Asia/Kolkata"))
    row = maintenance.plan(node, operator, "disk", until, until - 2 * HOUR if hours else None)
    said = f"{(row.from_at if hours else row.until).astimezone(UTC):%H:%M UTC}"
    assert said in maintenance.planned(row)
    node.refresh_from_db()
    assert hours or said in node.cordoned


def test_windows_between_two_times(node, operator):
    now = timezone.now()
    first = begin(node, operator)
    maintenance.end(first, operator, "done early")
    later = begin(node, operator, hours=6, from_at=now + 4 * HOUR)
    soon, late = now + timedelta(minutes=30), now + 5 * HOUR
    assert list(selectors.maintenance_windows(now - HOUR, late)) == [first, later]
    assert list(selectors.maintenance_windows(soon, late)) == [later], "the first one ended at once"
    assert not selectors.maintenance_windows(now + 7 * HOUR, now + 8 * HOUR)


def test_a_restart_drains_stops_and_starts(here, node, operator):
    ready = here[0]
    services.restart(ready, operator, "a leak")
    assert (ready.state, "a leak" in ready.restart) == (S.DRAINING, True)
    settle(ready)
    assert maintenance.advance() == 1
    assert states([ready]) == [S.PROVISIONING]
    node.refresh_from_db()
    services.cordon(node, operator, "fan")
    with pytest.raises(ActionError, match="would not start again"):
        services.restart(Instance.objects.get(pk=here[1].pk), operator, "x")
    assert places.obstacle(here[1])


def test_a_restart_is_withdrawn_by_resume_and_by_stop(here, operator):
    for instance, undo in ((here[0], services.resume), (here[1], services.stop)):
        services.restart(instance, operator, "a leak")
        undo(instance, operator, "no")
        instance.refresh_from_db()
        assert instance.restart == ""


def test_rest(acting, node):
    until = (timezone.now() + HOUR).isoformat()
    path = f"/api/nodes/{node.name}/maintenance"
    assert acting.post(path, {"reason": "x"}, "application/json").status_code == 422, "no end"
    answer = acting.post(path, {"reason": "a new kernel", "until": until}, "application/json")
    assert (answer.status_code, "is in maintenance until" in answer.json()["message"]) == (200, True)
    [row] = acting.get("/api/maintenance", {"since": timezone.now().isoformat()}).json()["items"]
    assert (row["node"], row["region"], row["state"]) == (node.name, None, "under_way")
    assert acting.post(f"/api/maintenance/{row['id']}/end", {"reason": "done"}, "application/json").status_code == 200
    assert acting.get("/api/maintenance", {"since": timezone.now().isoformat()}).json()["items"] == []
