"""Changed settings on the page of the instances, on an instance's own page and among what needs attention."""

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.problems import read_known
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.models import Deployment, Rollout
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.rollouts import services as rollouts

pytestmark = pytest.mark.django_db


@pytest.fixture
def started(make_instance):
    row = make_instance()
    row.launched_with = revisions.settings_of(launch_spec(row))
    row.save()
    return row


@pytest.fixture
def outdated(started):
    Deployment.objects.update(max_num_seqs=7)
    return started


def html_of(client, name, *args, **query):
    answer = client.get(reverse(f"console:{name}", args=args), query)
    assert answer.status_code == 200
    return answer.content.decode()


def post(client, deployment, action, **values):
    path = reverse("console:operate", args=["deployments", deployment.pk, action])
    return client.post(path, {"next": reverse("console:fleet")} | values, follow=True)


def test_nothing_is_said_while_all_are_up_to_date(acting, started):
    page = html_of(acting, "fleet")
    assert "Roll out" not in page
    assert "outdated" not in page
    assert 'id="rollouts" data-region hidden' in page
    assert "Outdated" not in html_of(acting, "instance", started.name)


def test_an_outdated_one_is_marked_and_its_limit_is_what_it_was_started_with(reader, outdated):
    page = html_of(reader, "fleet")
    assert "<strong>0 of 1</strong> up to date" in page
    assert "was started with other max_num_seqs" in page
    assert "Roll out" not in page  # an operator's
    own = html_of(reader, "instance", outdated.name)
    assert "started with other max_num_seqs than its deployment has now" in own
    assert "of 256</span>" in own


def test_an_operator_rolls_out_and_cancels(acting, outdated, deployment):
    page = post(acting, deployment, "roll-out").content.decode()
    assert "give a reason" in page
    assert not Rollout.objects.exists()
    page = post(acting, deployment, "roll-out", reason="fewer at once").content.decode()
    assert "begins within seconds" in page
    assert "Begins within seconds." in page
    assert 'id="rollouts" data-region data-refresh-s="5"' in page
    assert "in progress" in post(acting, deployment, "roll-out", reason="again").content.decode()
    page = post(acting, deployment, "cancel-rollout", reason="not today").content.decode()
    assert "is cancelled" in page
    event = Event.objects.get(kind="rollout.started")
    assert reverse("console:fleet") in html_of(acting, "event", event.pk)
    assert "rollout started" in html_of(acting, "events")


def test_a_failed_one_needs_attention_until_the_settings_are_changed_back(outdated, deployment):
    rollout = rollouts.start(deployment, "ada", "x")
    assert read_known(timezone.now()).problems == ()
    Rollout.objects.filter(pk=rollout.pk).update(state="failed", message="one: out of memory")
    (problem,) = read_known(timezone.now()).problems
    assert problem.title == "The rollout of llama-3.1-8b in US East failed"
    assert problem.words == "one: out of memory"
    Deployment.objects.update(max_num_seqs=256)
    assert read_known(timezone.now()).problems == ()


def test_the_form_says_how_a_version_proves_itself_and_the_page_why_it_went_back(acting, outdated, deployment):
    page = post(acting, deployment, "roll-out", reason="x", bake_s="long").content.decode()
    assert "bake_s: Input should be a valid integer" in page
    post(acting, deployment, "roll-out", reason="x", bake_s="5", auto_back="off")
    rollout = Rollout.objects.get()
    assert (rollout.bake_s, rollout.auto_back) == (5, False)
    assert "Go back" in html_of(acting, "fleet")
    assert "the settings before are not known" in post(acting, deployment, "roll-back", reason="x").content.decode()
    Rollout.objects.update(state="rolled_back", message="3 of 10 requests failed", ended_at=timezone.now())
    Deployment.objects.update(max_num_seqs=256)
    assert "The last rollout went back" in html_of(acting, "fleet")
    assert "3 of 10 requests failed" in html_of(acting, "fleet")
