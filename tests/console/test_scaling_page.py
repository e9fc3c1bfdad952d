"""The scaling pages: the matrix and its cost, plans and reasons, deciding on them, policies, moves."""

import csv
import io
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.console.pages.plans import cards
from controlplane.console.pages.scaling import tables
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Region
from controlplane.planning import selectors
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
    model = two_places[0].model
    plan = planning_rows.plan(model, now, "advice", (1, -1), note="us-west falls 12 tok/s short of its share")
    html = page(reader)
    for word in (
        "Present and planned instances",
        "1 starting",
        "1 draining",
        "the peak of",
        "falls 12 tok/s short",
        "2 binding constraints",
        "epsilon 0.8",
        f'href="{url("plan", plan.pk)}"',
        "US West falls 12 tok/s short",
    ):
        assert word in html, word
    assert html.count('data-tone="more"') >= 2
    assert html.count('data-tone="fewer"') >= 2
    assert f'id="approve-plans-{plan.pk}"' not in html, "a viewer reads"
    titled = cards.titled("only 3 g exist in us-east (of us-east-2, m-us-east-1)", {"us-east": "US East", "g": "G"})
    assert titled == "only 3 G exist in US East (of us-east-2, m-us-east-1)"


def test_empty_pages_say_what_comes(reader, language_model):
    html = page(reader)
    for words in (
        "Nothing is deployed",
        "No plan yet",
        "No nightly what-if yet",
        "No instance has been moved by scaling",
        "Reactive floor alone",
    ):
        assert words in html
    assert "No plans yet" in page(reader, "plans")
    assert "No moves yet" in page(reader, "moves")
    assert "No plan fits these filters" in page(reader, "plans", status="advice")
    assert "No move fits these filters" in page(reader, "moves", source="floor")


# Deciding


def test_a_plan_says_what_is_left_and_when_its_strategy_moves(reader, two_places, now):
    model = two_places[0].model
    going = planning_rows.plan(model, now, "in_progress", (2, -1))
    going.targets[0] |= {"left": 2, "obstacle": "a100-80gb: no node has 2 free GPUs"}
    going.targets[1] |= {"left": 0}
    going.save()
    html = page(reader, "plan", going.pk)
    assert "In progress" in html
    assert "2 instances not added in" in html
    assert "no node has 2 free GPUs" in html
    followed = planning_rows.plan(model, now, "in_force", (2, -1), strategy="lt_ua")
    assert "In force" in page(reader, "plan", followed.pk)
    assert "LT-UA adds only while use is above 70%" in page(reader, "plan", followed.pk)


# Policies


def test_a_policy_is_set_with_a_reason(acting, language_model):
    html = page(acting)
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


def test_a_plan_shows_all_that_it_was_made_from(reader, two_places, now):
    plan = planning_rows.plan(two_places[0].model, now, "advice", (1, -1))
    html = page(reader, "plan", plan.pk)
    for word in (
        "Targets",
        "Binding constraints",
        "usd_per_gpu_hour",
        "This plan was made alone",
        "highs",
    ):
        assert word in html, word
    assert reader.get(url("plan", plan.pk + 1)).status_code == 404


def test_moves_are_listed_with_their_reasons(reader, two_places, now):
    planning_rows.moves(now)
    html = page(reader, "moves")
    assert html.count('<th scope="row">') == ScalingMove.objects.count() > 0
    assert "use is 84%, above 70%" in html
    assert (
        page(reader, "moves", source="floor").count("Reactive floor,")
        == ScalingMove.objects.filter(source="floor").count()
    )
    rows = table(reader.get(url("moves"), {"format": "csv"}))
    assert {row["Change (instances)"] for row in rows} == {"1", "-1"}
    assert all(row["Reason"] for row in rows)


def test_queries_do_not_grow_with_rows(reader, two_places, now, django_assert_max_num_queries):
    planning_rows.furnish(now, 1)
    for _ in range(20):
        planning_rows.plan(two_places[0].model, now, "superseded")
        planning_rows.moves(now)
    with django_assert_max_num_queries(60):
        page(reader)
    with django_assert_max_num_queries(13):
        page(reader, "plans")
    with django_assert_max_num_queries(13):
        page(reader, "moves")


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
