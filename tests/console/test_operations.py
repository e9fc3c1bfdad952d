"""Operations on rows: offered where they fit, carried out for a reason, refused in words; dialogs say what they do.

Who may: tests/access. What becomes of the rows: the tests of each service.
"""

import pytest
from django.template import engines
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape

from controlplane.console.operations import OFFERS, label_of, sentence_of
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Instance, Swap, SwapGroup
from controlplane.lengths.models import LengthVersion, VersionState
from controlplane.lengths.services import promote
from controlplane.planning.models import ScalingPlan
from tests.console import planning_rows
from tests.console.test_pages import text_of

pytestmark = pytest.mark.django_db
EVERY = [(name, each) for name, offer in OFFERS.items() for each in offer.operations]


@pytest.fixture
def do(client, fleet_admin):
    """`do("nodes", row, "cordon", reason="…")`: what the page says then."""
    client.force_login(fleet_admin)

    def act(name, row, verb, reason="a test", **values):
        return text_of(client.post(of(name, row, verb), {"reason": reason} | values, follow=True))

    return act


def of(name, row, verb):
    return reverse("console:operate", args=[name, row.pk, verb])


@pytest.mark.parametrize(("name", "operation"), EVERY, ids=lambda each: getattr(each, "verb", each))
def test_a_dialog_says_what_it_does_and_asks_why(rf, node, name, operation):
    """The tag draws it from the declaration, so that a new operation has its dialog."""
    tag = "{% load console %}{% operation name row verb 'the {}' row cancel='Keep it' %}<b>More.</b>{% endoperation %}"
    context = {"name": name, "row": node, "verb": operation.verb}
    html = engines["django"].from_string(tag).render(context, rf.get("/fleet/"))
    label = label_of(name, operation.verb)
    for words in (
        f'commandfor="{operation.verb}-{name}-{node.pk}"', f"{label}…", f"{label} the {node}?", "<b>More.</b>", "Keep it",
        escape(operation.about.split("`")[0][:40]), f'action="{of(name, node, operation.verb)}"', 'name="reason" required',
        'name="next" value="/fleet/"',
    ):  # fmt: skip
        assert words in html, words


def test_it_is_carried_out_with_a_reason_and_answers_on_the_page_of_the_form(do, client, node):
    assert "is unchanged: give a reason" in do("nodes", node, "cordon", reason=" ")
    assert do("nodes", node, "cordon", reason="  cooling\n fails ").count("nothing is started there")
    node.refresh_from_db()
    assert "cooling fails" in node.cordoned
    assert Event.objects.get(kind="node.cordoned").reason == "cooling fails"
    answer = client.post(of("nodes", node, "uncordon"), {"reason": "x", "next": "/fleet/?q=m"})
    assert answer["Location"] == "/fleet/?q=m"
    answer = client.post(of("nodes", node, "cordon"), {"reason": "x", "next": "https://evil.example/"})
    assert answer["Location"] == reverse("console:fleet"), "not to another site"


def test_what_does_not_fit_is_refused_in_words(do, client, make_instance):
    row = make_instance()
    assert f"{row.name} is ready" in do("instances", row, "resume")
    assert not Event.objects.exists()
    for name, pk, verb in (("instances", row.pk, "explode"), ("gpus", row.pk, "drain"), ("instances", 99, "drain")):
        assert client.post(reverse("console:operate", args=[name, pk, verb]), {"reason": "x"}).status_code == 404
    assert client.get(of("instances", row, "drain")).status_code == 405


def test_it_needs_the_token_of_the_form(client, operator, make_instance):
    row, strict = make_instance(), Client(enforce_csrf_checks=True)
    strict.force_login(operator)
    answer = strict.post(of("instances", row, "drain"), {"reason": "x"})
    assert (answer.status_code, "out of date" in text_of(answer)) == (403, True)
    answer = client.post(of("instances", row, "drain"), {"reason": "x", "next": "/fleet/?q=m"})
    assert answer["Location"] == "/sign-in/?next=/fleet/%3Fq%3Dm", "not to an address that takes no GET"


@pytest.mark.parametrize(("verb", "before", "after"), [("drain", "ready", "draining"), ("resume", "draining", "ready")])
def test_an_instance_moves(do, make_instance, verb, before, after):
    row = make_instance(state=before)
    assert f"{row.name} is {after}" in do("instances", row, verb)
    row.refresh_from_db()
    assert row.state == after
    assert Event.objects.get(kind="instance.moved").before["state"] == before


def test_shared_gpus_are_swapped(do, deployment, make_instance, node):
    group = SwapGroup.objects.create(name="us-east-1")
    first = make_instance(name="first", node=node, swap_group=group)
    second = make_instance(name="second", node=node, state="sleeping", swap_group=group)
    page = do("instances", second, "swap", next=reverse("console:fleet"))
    assert "us-east-1 swaps to second, when first is idle." in page
    assert "<strong>Swaps to second</strong>" in page
    assert "Swap to…" not in page
    assert Swap.objects.get().instance == second
    assert "first has to wait for it" in do("instances", first, "swap")


def test_a_model_is_retired_and_set_active_again(do, deployment, make_instance):
    row = make_instance()
    assert "is undeployed" in do("deployments", deployment, "undeploy")
    assert Instance.objects.get(pk=row.pk).state == "draining"
    assert "is retired" in do("models", deployment.model, "retire")
    assert "active again" in do("models", deployment.model, "activate")
    assert "active again" in do("deployments", deployment, "activate")
    assert Deployment.objects.get().active


def test_a_plan_is_decided(do, make_instance, language_model):
    make_instance()
    plans = [planning_rows.plan(language_model, timezone.now(), "advice", (by,)) for by in (1, 2)]
    assert "is approved." in do("plans", plans[1], "approve")
    assert "is rejected." in do("plans", planning_rows.plan(language_model, plans[0].made_at, "advice"), "reject")
    assert Event.objects.get(kind="plan.approved").subject_id == str(plans[1].pk)
    plans[1].refresh_from_db()
    assert "is not the last that was approved" in do("plans", plans[0], "undo")
    said = do("plans", plans[1], "undo")
    back = ScalingPlan.objects.order_by("pk").last()
    assert f"Plan {back.pk} undoes plan {plans[1].pk}" in said
    assert (back.status, back.decided_by) == ("approved", "fleet-admin")
    assert [(row["present"], row["target"]) for row in back.targets] == [(1, 1)]
    plans[1].refresh_from_db()
    assert plans[1].status == "superseded"


def test_a_length_version_is_decided(do, monkeypatch):
    monkeypatch.setattr("controlplane.lengths.services._obstacle", lambda row: "")
    shadow = LengthVersion.objects.create(number=3, kind="trees", state=VersionState.SHADOW)
    for verb, state, words in (
        ("promote", "active", "trees 3 is promoted."),
        ("rollback", "rejected", "trees 3 is rolled back."),
    ):
        assert words in do("length-versions", shadow, verb)
        shadow.refresh_from_db()
        assert shadow.state == state
    with pytest.raises(Exception, match="shadow"):
        promote(shadow, "somebody")


@pytest.mark.parametrize(
    ("verb", "done", "words"),
    [
        ("cordon", "node-1 is cordoned: nothing is started there", "node-1 is cordoned: nothing is started there"),
        ("approve", "plan 3", "plan 3 is approved."),
        ("reject", "plan 3", "plan 3 is rejected."),
    ],
)
def test_what_became_of_it(verb, done, words):
    assert sentence_of(verb, done if verb == "cordon" else Named(done)) == words


class Named:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name
