"""The queues page: lanes in order, late requests, the group in the side panel, and its actions by role."""

import pytest

from controlplane.console.live import fragments
from controlplane.console.live.state import tables_of
from controlplane.console.pages.queues import lanes
from controlplane.dispatch.queues import services
from controlplane.dispatch.queues.commands import GatewaySilent
from controlplane.events.models import Event
from tests.console import batch_rows
from tests.console.feed import columns

PAGE = "/queues/?region=us-east"


def group(number, place=1, **values):
    return {
        "number": number, "region": "us-east", "instance": "instance-1", "model": "llama-3.1-8b", "place": place,
        "slo_class": "interactive", "count": 86, "tokens": 4000, "start_s": 36.0, "service_s": 72.0, "due_s": 120.0,
        "slack_s": 45.0, "pinned": False, "risk": "",
    } | values  # fmt: skip


def lane(name="instance-1", **values):
    return {
        "instance": name, "region": "us-east", "model": "llama-3.1-8b", "order": "qlm", "state": "ready", "running": 41,
        "kv_ratio": 0.62, "waiting": 172, "service_s": 144.0,
    } | values  # fmt: skip


def summary_queues(groups, instances, **values):
    unknown = ("late_requests", "oldest_wait_s", "attainment_ratio", "fcfs_ratio", "solved_ms", "solved_at")
    counts = {"region": "us-east", "waiting": 172, "groups": len(groups), "queues": 1, "at_risk": 1, "late": 1}
    row = dict.fromkeys(unknown) | counts | values
    change = {
        "at": 1_800_000_000.0, "by": "scheduler", "why": "2 groups would be late", "what": "3 of 7 groups moved",
        "before_ratio": 0.9, "after_ratio": 0.97, "before_late_s": 4.0, "after_late_s": 1.0, "took_ms": 12.0,
    }  # fmt: skip
    return {
        "groups": columns(groups),
        "lanes": columns(instances),
        "queues": columns([row]),
        "reorders": columns([change, change | {"by": "olga"}]),
    }


@pytest.fixture
def shown(live, fleet_feed):
    """`shown(groups, instances)`: set the live state."""

    def show(groups, instances, **values):
        original = fleet_feed.summary
        fleet_feed.summary = lambda ts: original(ts) | {"queues": summary_queues(groups, instances, **values)}
        live.show(fleet_feed)

    return show


@pytest.fixture
def usual(shown):
    shown(
        [
            group(7, risk="risk", slack_s=9.0),
            group(8, 2, risk="late", slack_s=-14.0, slo_class="standard", pinned=True),
            group(9, 3),
        ],
        [lane(), lane("instance-2", order="fcfs", waiting=None, model="other")],
    )


def get(client, user, path=PAGE):
    client.force_login(user)
    answer = client.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_blocks_are_buttons_named_in_full_in_order(client, viewer, usual):
    page = get(client, viewer)
    assert (
        'aria-label="86 requests of llama-3.1-8b, interactive, starts in 36 s, slack 9 s, at risk, place 1 of 3"'
        in page
    )
    assert "late by 14 s, pinned, place 2 of 3" in page
    assert page.index('id="group-7"') < page.index('id="group-8"') < page.index('id="group-9"')
    assert "style=" not in page.partition("<main")[2]


def test_other_orders_make_no_claims(client, viewer, usual):
    assert "order: FCFS" in get(client, viewer)


def test_reorders_say_what_they_gained(client, viewer, usual):
    page = get(client, viewer)
    assert "2 groups would be late" in page
    assert '90.0% to <b class="ok-text">97.0%</b>' in page
    assert "12 ms" in page
    assert "Undo" not in page
    client.logout()


def test_an_order_that_is_worse_than_fcfs_says_so(client, viewer, shown):
    for attainment, said in ((0.941, True), (0.968, False), (0.9676, False), (None, False)):
        shown([group(7)], [lane()], attainment_ratio=attainment, fcfs_ratio=0.968)
        text = get(client, viewer)
        assert ("predicted to keep 94.1% of what waits in time, first come, first served 96.8%" in text) == said
        assert ('queue/us-east/attainment_ratio"><span class="label" data-level="warning"' in text) == said


def test_nothing_waits(client, viewer, shown):
    shown([], [lane(waiting=0)], waiting=0)
    page = get(client, viewer)
    assert "Nothing waits. Requests are placed as they arrive." in page
    assert "41 run" in page


def test_before_any_gateway(client, viewer):
    assert "No queue is reported: nothing is deployed, or no gateway is connected." in get(client, viewer, "/queues/")


def test_one_class_alone(client, viewer, usual):
    page = get(client, viewer, f"{PAGE}&class=standard")
    assert 'id="group-8"' in page
    assert 'id="group-7"' not in page


def test_many_lanes_are_folded_but_for_trouble(client, viewer, shown):
    names = [f"instance-{number}" for number in range(lanes.FOLD_ABOVE + 1)]
    shown(
        [group(7, instance=names[0], risk="late", slack_s=-1.0)],
        [lane(names[0]), *(lane(name, model="calm") for name in names[1:])],
    )
    page = get(client, viewer)
    assert '<details class="lane-model" id="lanes-llama-31-8b" open>' in page
    assert '<details class="lane-model" id="lanes-calm">' in page


def test_the_side_panel_shows_the_group_and_what_operators_may_do(client, operator, viewer, usual):
    page = get(client, operator, f"{PAGE}&group=7")
    assert "place 1 of 3" in page
    assert "Pin group 7?" in page
    assert "Unpin group 8?" in get(client, operator, f"{PAGE}&group=8")
    assert "Pin group 7?" not in get(client, viewer, f"{PAGE}&group=7")
    assert "Group 99 has left the queue." in get(client, viewer, f"{PAGE}&group=99")


def test_an_action_is_one_event_with_before_and_after(client, operator, usual, fleet, monkeypatch):
    asked = []

    def ask(command, **values):
        asked.append((command, values))
        return group(7, place=3)

    monkeypatch.setattr(services, "ask", ask)
    client.force_login(operator)
    answer = client.post("/queues/groups/7/bump/", {"reason": "a demo", "next": PAGE}, follow=True)
    assert "Group 7 is bumped." in answer.content.decode()
    assert asked == [("act", {"number": 7, "action": "bump", "operator": "operator", "reason": "a demo"})]
    event = Event.objects.get(kind="queue_group.bumped")
    assert (event.actor, event.reason, event.inputs["group"]) == ("operator", "a demo", 7)
    assert (event.before, event.after) == ({"place": 3, "pinned": False}, {"place": 1, "pinned": True})
    assert client.post("/queues/groups/7/dance/").status_code == 404


def test_without_a_gateway_nothing_is_recorded(acting, usual, monkeypatch):
    def silent(command, **values):
        raise GatewaySilent("No gateway answers; nothing was done")

    monkeypatch.setattr(services, "ask", silent)
    answer = acting.post("/queues/groups/7/pin/", {"next": PAGE}, follow=True)
    assert "No gateway answers; nothing was done." in answer.content.decode()
    assert not Event.objects.filter(kind__startswith="queue_group").exists()


def test_blocks_and_tiles_of_a_region_are_kept_fresh(shown, live):
    shown([group(7), group(8, region="us-west")], [lane()])
    state = live.feed.latest()
    html = fragments.html_of(state, "queues:us-east")
    assert {name for name in html if name.startswith("group/")} == {"group/7/size", "group/7/said"}
    assert "data-start=" in html["group/7/size"]
    before = fragments.drawn_of(state, "queues:us-east")
    shown([group(7, pinned=True), group(8, region="us-west")], [lane()])
    assert fragments.drawn_of(live.feed.latest(), "queues:us-east") != before
    assert tables_of({})["queues"] == []


def test_held_work_says_how_old_it_is_when_it_is_due_and_what_released_the_last(client, viewer, live, fleet_feed):
    original = fleet_feed.summary
    fleet_feed.summary = lambda ts: original(ts) | {"held": batch_rows.held(ts)}
    live.show(fleet_feed)
    page = get(client, viewer)
    table = page.partition('data-fragment="queues/held"')[2].partition("</table>")[0]
    row = next(each for each in table.split("<tr>") if "bloom-176b" in each)
    for words in (
        "5,730",
        "10 h 41 min",
        "2 min",
        "45 s",
        "Slack 45 s: use is overruled",
        "it had to start for its deadline, at 72% use",
    ):
        assert words in row, words
    html = fragments.html_of(live.feed.latest(), "queues:us-east")["queues/held"]
    assert html.strip() in page
