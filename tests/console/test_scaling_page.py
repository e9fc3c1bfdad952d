"""Scaling: the matrix and its cost, plans and reasons, deciding on them, policies, what was moved, and the calendar."""

import csv
import io
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.console.formats import signed
from controlplane.console.pages.scaling import calendar, cards, tables
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Maintenance, Region, ScheduledMinimum
from controlplane.planning import history, selectors
from controlplane.planning.models import PolicyMode, ScalingMove, ScalingPolicy
from tests.console import planning_rows


@pytest.fixture
def now(db):
    return timezone.now()


@pytest.fixture
def two_places(deployment, make_instance, gpu_type):
    """Two instances ready and one loading in US East, one draining and one ready in US West."""
    west = Region.objects.create(name="us-west", title="US West")
    other = Deployment.objects.create(
        model=deployment.model, region=west, gpu_type=gpu_type, tensor_parallel=2, min_instances=0, max_instances=5
    )
    for state in ("ready", "ready", "loading"):
        make_instance(state=state)
    for state in ("ready", "draining", "stopped"):
        make_instance(state=state, deployment=other)
    return deployment, other


def url(name: str, *args) -> str:
    return reverse(f"console:{name}", args=args)


def page(reader, name="scaling", *args, **query) -> str:
    answer = reader.get(url(name, *args), query)
    assert answer.status_code == 200
    return answer.content.decode()


def table(answer) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))


# The matrix


def test_the_matrix_counts_present_and_planned_and_their_cost(two_places, now):
    model = two_places[0].model
    plan = planning_rows.plan(model, now, "advice", (1, -1))
    matrix = tables.matrix("", {model.name: plan}, {"us-east": "US East"}, now)
    (line,) = matrix.lines
    east, west = line.cells
    assert matrix.regions == (("us-east", "US East"), ("us-west", "us-west"))
    assert (east.present, east.target, east.delta, east.not_ready) == (3, 4, 1, "1 starting")
    assert (west.present, west.target, west.delta, west.not_ready) == (1, 0, -1, "1 draining")
    assert (line.present, line.planned, line.delta) == (4, 4, 0)
    assert matrix.totals == [(3, 4), (1, 0)]
    each = 2 * 1.35
    assert matrix.usd_now == pytest.approx(4 * each)
    assert matrix.usd_planned == pytest.approx(4 * each)
    assert matrix.usd_delta == pytest.approx(0)
    plan.valid_until = now - timedelta(minutes=1)
    matrix = tables.matrix("", {model.name: plan}, {}, now)
    assert [cell.target for cell in matrix.lines[0].cells] == [None, None], "a plan that is out of date says nothing"
    assert matrix.planned == matrix.present == 4


def test_a_place_without_a_deployment_is_empty(two_places, make_instance, now, gpu_type):
    other = two_places[0].model
    other.pk, other.name = None, "another"
    other.save()
    Deployment.objects.create(model=other, region=two_places[1].region, gpu_type=gpu_type, tensor_parallel=4)
    matrix = tables.matrix("", {}, {}, now)
    first = matrix.lines[0]
    assert first.model == "another"
    assert [cell.deployed for cell in first.cells] == [False, True]
    assert tables.matrix("llama-3.1-8b", {}, {}, now).lines[0].model == "llama-3.1-8b"


def test_the_current_plan_is_the_newest_that_still_stands(two_places, now):
    model = two_places[0].model
    shadow = planning_rows.plan(model, now, "shadow")
    planning_rows.plan(model, now, "rejected")
    planning_rows.plan(model, now, "superseded")
    planning_rows.plan(model, now, "failed")
    assert selectors.current_plans() == {model.name: shadow}
    advice = planning_rows.plan(model, now, "advice")
    assert selectors.current_plans() == {model.name: advice}
    assert selectors.waiting_plans() == [advice]


def test_the_page_shows_what_would_change_and_why(reader, two_places, now):
    """The model whose plan awaits approval is open."""
    model = two_places[0].model
    plan = planning_rows.plan(model, now, "advice", (1, -1), note="us-west falls 12 tok/s short of its share")
    html = page(reader)
    for word in (
        "Present and planned instances",
        "1 starting",
        "1 draining",
        "the peak of",
        "2 limits reached",
        "epsilon 0.8",
        f'href="{url("scaling")}?plan={plan.pk}"',
        "US West falls 12 tok/s short",
        "Needed now",
        "Use now",
        "SLO now",
        "Awaiting approval",
    ):
        assert word in html, word
    assert html.count('data-tone="more"') >= 2
    assert html.count('data-tone="fewer"') >= 2
    assert f'id="approve-plans-{plan.pk}"' not in html, "a viewer reads"
    assert "limits reached" not in page(reader, open="")
    titled = cards.titled("only 3 g exist in us-east (of us-east-2, m-us-east-1)", {"us-east": "US East", "g": "G"})
    assert titled == "only 3 G exist in US East (of us-east-2, m-us-east-1)"


def test_empty_pages_say_what_comes(reader, language_model):
    html = page(reader)
    assert "Nothing is deployed" in html
    assert "Nothing was planned or moved" in html
    assert "Nothing is scheduled, planned or under maintenance" in page(reader, "calendar")


# Deciding


def test_a_plan_says_what_is_left_and_when_its_autoscaler_moves(reader, two_places, now):
    model = two_places[0].model
    going = planning_rows.plan(model, now, "in_progress", (2, -1))
    going.targets[0] |= {"left": 2, "obstacle": "a100-80gb: no node has 2 free GPUs"}
    going.targets[1] |= {"left": 0}
    going.save()
    html = page(reader, plan=going.pk)
    assert "In progress" in html
    assert "2 instances not added in" in html
    assert "no node has 2 free GPUs" in html
    followed = planning_rows.plan(model, now, "in_force", (2, -1), strategy="lt_ua")
    html = page(reader, plan=followed.pk)
    assert "Active" in html
    assert "LT-UA adds only while use is above 70%" in html


def test_a_plan_that_was_replaced_keeps_its_address_and_says_by_which(reader, acting, two_places, now):
    model = two_places[0].model
    old = planning_rows.plan(model, now, "superseded", (1, 1), note="the old one")
    new = planning_rows.plan(model, now, "advice", (2, 2))
    html = page(reader, plan=old.pk)
    assert "the old one" in html
    assert f'Replaced by <a class="inline" href="?plan={new.pk}">plan {new.pk}</a>' in html
    assert f'id="card-{new.pk}"' in html
    approve = reverse("console:operate", args=["plans", old.pk, "approve"])
    said = acting.post(approve, {"reason": "x"}, follow=True).content.decode()
    assert f"Plan {old.pk} for {model} is replaced and cannot be approved. Plan {new.pk} came in its place." in said


def test_the_dialog_shows_demand_forecast_use_and_slo_of_now(acting, two_places, now):
    model = two_places[0].model
    planning_rows.minutes(now, 0.2)
    plan = planning_rows.plan(model, now, "advice", (1, -1))
    plan.inputs |= {"forecast_tokens_per_s": {"us-east": 900.0}, "deferred_tokens_per_s": {"us-east": 100.0}}
    plan.save()
    html = page(acting)
    dialog = html[html.index(f'<dialog id="approve-plans-{plan.pk}"') :].split("</dialog>")[0]
    words = " ".join(re.sub("<[^>]+>", "", dialog).split())
    assert re.search(r"Needed now [\d.,k]+ tok/s: [\d.,k]+ interactive", words)
    assert "Forecast 1,000 tok/s: 900 interactive at most, 100 deferred" in words
    assert re.search(r"Use now \d+", words)
    assert words.count("nothing was judged in 10 min") == 1


# Policies


def test_a_policy_is_set_with_a_reason(acting, language_model, deployment):
    html = page(acting, open=language_model.name)
    assert f'id="policy-{language_model.pk}"' in html
    assert '<option value="lt_ua"' in html
    given = {"strategy": "lt_ua", "mode": "auto", "parameters": "", "reason": "shadow was right for a week"}
    answer = acting.post(url("change-model", language_model.pk, "policy"), given, follow=True)
    assert "is scaled by LT-UA, mode auto, from now on" in answer.content.decode()
    row = ScalingPolicy.objects.get()
    assert (row.model, row.strategy, row.mode, row.parameters) == (language_model, "lt_ua", PolicyMode.AUTO, {})
    event = Event.objects.latest("pk")
    assert event.reason == "shadow was right for a week"
    assert event.user.username == "operator"


def test_a_policy_that_cannot_be_is_refused_in_words(acting, language_model):
    for changes, words in (
        ({"reason": ""}, "give a reason"),
        ({"parameters": "{broken"}, "not JSON"),
        ({"parameters": "[1]"}, "JSON object"),
        ({"parameters": '{"no_such_parameter": 1}'}, "no_such_parameter"),
        ({"strategy": "guessing"}, "no strategy"),
        ({"mode": "sometimes"}, "not a valid choice"),
    ):
        given = {"strategy": "lt_ua", "mode": "ask", "parameters": "{}", "reason": "x"} | changes
        assert acting.post(url("change-model", language_model.pk, "policy"), given).status_code == 302
        said = acting.get(url("events")).content.decode()  # the next page shows the message
        assert words in said, changes
    assert not ScalingPolicy.objects.exists()


# Plans and moves


def test_plans_that_only_follow_each_other_are_one_row_and_decisions_are_rows(two_places, now):
    model = two_places[0].model
    first = planning_rows.plan(model, now - timedelta(minutes=30), "superseded")
    for minutes in (25, 20, 15):
        planning_rows.plan(model, now - timedelta(minutes=minutes), "superseded")
    decided = planning_rows.plan(model, now - timedelta(minutes=10), "carried_out", (2, -1), decided_by="anna")
    planning_rows.plan(model, now - timedelta(minutes=5), "superseded")
    active = planning_rows.plan(model, now, "in_force", (1, 1), decided_by="planner", decided_at=now)
    entries = history.entries("", now - timedelta(hours=1))
    assert [(entry.plan.pk, entry.again, entry.more, entry.less) for entry in entries] == [
        (active.pk, 1, 2, 0),
        (decided.pk, 0, 2, -1),
        (decided.pk - 1, 3, 1, 0),
    ]
    assert [entry.since for entry in entries] == [now - timedelta(minutes=5), decided.made_at, first.made_at]
    assert history.entries("another", now - timedelta(hours=1)) == []


def test_moves_of_one_kind_within_a_minute_are_a_row_which_says_what_it_takes_back(two_places, now):
    place = {"model": "llama-3.1-8b", "region": "us-east", "gpu_type": "a100-80gb", "strategy": "lt_ua"}
    for seconds, delta, source in ((600, 1, "floor"), (580, 1, "floor"), (300, -1, "strategy"), (10, -1, "plan")):
        at = now - timedelta(seconds=seconds)
        ScalingMove.objects.create(at=at, delta=delta, source=source, reason=source, **place)
    entries = history.entries("", now - timedelta(hours=1))
    assert [(entry.move.source, entry.more, entry.less) for entry in entries] == [
        ("plan", 0, -1),
        ("strategy", 0, -1),
        ("floor", 2, 0),
    ]
    assert [entry.takes_back and entry.takes_back.source for entry in entries] == [None, "floor", None]


def test_both_are_listed_with_their_reasons_and_as_files(reader, two_places, now):
    planning_rows.plan(two_places[0].model, now, "shadow", note="all is well")
    planning_rows.moves(now)
    html = page(reader)
    for words in ("Simulated only", "all is well", "use is 84%, above 70%", "Safety autoscaler"):
        assert words in html
    rows = table(reader.get(url("scaling"), {"format": "csv", "table": "moves"}))
    assert {row["Change (instances)"] for row in rows} == {"1", "-1"}
    assert all(row["Reason"] for row in rows)
    assert [row["Note"] for row in table(reader.get(url("scaling"), {"format": "csv", "table": "plans"}))] == [
        "all is well"
    ]


def test_queries_do_not_grow_with_rows(reader, two_places, now, django_assert_max_num_queries):
    planning_rows.furnish(now, 1)
    for _ in range(20):
        planning_rows.plan(two_places[0].model, now, "superseded")
        planning_rows.moves(now)
    with django_assert_max_num_queries(60):
        page(reader)
    with django_assert_max_num_queries(50):
        page(reader, "calendar")


# The calendar


def test_the_calendar_has_what_is_scheduled_planned_and_under_maintenance(reader, two_places, node, now):
    model, kept = two_places[0].model, {"begins": "08:00", "ends": "18:00", "instances": 3}
    ScheduledMinimum.objects.create(name="office", model=model, region=two_places[0].region, weekdays="mon", **kept)
    plan = planning_rows.plan(model, now, "in_force", (1, -1))
    Maintenance.objects.create(
        node=node, from_at=now, until=now + timedelta(hours=2), reason="a fan", created_by="anna"
    )
    items = {item.lane: item for item in calendar.items("", "", now)}
    assert [len(items[lane].windows) for lane in calendar.LANES] == [1, 1, 2]
    assert items["Plans"].windows == [(plan.made_at, plan.valid_until)]
    html = page(reader, "calendar")
    for words in (
        "office: llama-3.1-8b",
        "at least 3 in US East",
        f"Active, {signed(1)} {signed(-1)}",
        "a fan",
        str(node),
    ):
        assert words in html, words
    assert [item.lane for item in calendar.items("", "us-west", now)] == ["Plans"]
    assert {item.lane for item in calendar.items("another", "", now)} == {"Maintenance"}


def test_the_calendar_looks_a_week_ahead_by_the_clock_of_the_region(reader, two_places, monkeypatch):
    """In the week of 29 March 2026 clocks of Berlin are put forward an hour."""
    now = datetime(2026, 3, 27, 12, tzinfo=UTC)
    monkeypatch.setattr(timezone, "now", lambda: now)
    Region.objects.filter(name="us-east").update(time_zone="Europe/Berlin")
    planning_rows.minutes(now, 72)
    figure = reader.get(url("calendar"), {"region": "us-east", "charts": "calendar"}).json()["charts"]["calendar"][
        "figure"
    ]
    mean = next(trace for trace in figure["data"] if trace["name"] == "forecast")
    known = [value for value in mean["y"] if value is not None]
    assert len(known) > 100
    assert mean["x"][-1] > "2026-04-03 12"
    assert [each["text"] for each in figure["layout"]["annotations"]] == ["Clocks go forward 1 h"]
    assert figure["layout"]["annotations"][0]["x"] == "2026-03-29 03:00:00"
    assert "Europe/Berlin" in page(reader, "calendar", region="us-east")
    figure = reader.get(url("calendar"), {"charts": "calendar"}).json()["charts"]["calendar"]["figure"]
    assert figure["layout"]["annotations"] == [], "the server's clock is UTC"


def test_a_minimum_is_scheduled_in_the_calendar_and_deleted(client, two_places, fleet_admin, operator):
    given = {"name": "office", "model": "llama-3.1-8b", "instances": "3", "region": "us-east"}
    given |= {"begins": "08:00", "ends": "18:00", "reason": "office hours"}
    client.force_login(operator)
    assert client.post(url("schedule"), given).status_code == 403  # as bounds
    client.force_login(fleet_admin)
    for changes, words in (
        ({"time_zone": "Berlin"}, "There is no time zone &#x27;Berlin&#x27;"),
        ({"begins": "0830Z"}, "is not such as 08:30"),
        ({"instances": ""}, "Give the number of instances."),
        ({"model": ""}, "model"),
    ):
        assert words in client.post(url("schedule"), given | changes, follow=True).content.decode()
    assert not ScheduledMinimum.objects.exists()
    days = {"on-mon": "on", "on-fri": "on", "time_zone": "Europe/Berlin", "except_on": "2026-12-25"}
    said = client.post(url("schedule"), given | days, follow=True).content.decode()
    assert "keeps at least 3 by the schedule office" in said
    row = ScheduledMinimum.objects.get()
    assert (row.region.name, row.weekdays, row.rule.zone) == ("us-east", "mon fri", "Europe/Berlin")
    assert 'data-opens="schedule"' in said
    gone = url("change-model", row.model_id, "unschedule")
    said = client.post(gone, {"schedule": "office", "reason": "no more"}, follow=True).content.decode()
    assert "The schedule office of llama-3.1-8b is deleted." in said
    assert [event.reason for event in Event.objects.filter(kind__startswith="scheduled")] == ["no more", "office hours"]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "+1 llama-3.1-8b on a100-80gb (a, b) in us-east: 12 tok/s must be served: now",
            "12 tok/s must be served: now",
        ),
        ("-2 llama-3.1-8b on a100-80gb in us-east: 3 serve it", "3 serve it"),
        ("+1 another on a100-80gb: x", "+1 another on a100-80gb: x"),
        ("use: 84%", "use: 84%"),
        ("as it is", "as it is"),
        ("", ""),
    ],
)
def test_a_reason_is_shown_without_the_place_next_to_it(reason, shown):
    assert cards.without_place(reason, "llama-3.1-8b") == shown
