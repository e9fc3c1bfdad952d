"""`/api/deployments/ID/rollout`, and what instances say of the settings they were started with."""

import pytest

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.models import Deployment, Rollout
from controlplane.fleet.rollouts import revisions

pytestmark = pytest.mark.django_db


@pytest.fixture
def outdated(make_instance, deployment):
    """An instance that runs 256 sequences at once, of a deployment that says 7 by now."""
    row = make_instance()
    row.launched_with, row.api_key = revisions.settings_of(launch_spec(row)), "hidden"
    row.save()
    Deployment.objects.update(max_num_seqs=7, api_key="hidden-too")
    return row


def test_an_instance_says_which_settings_are_other(sign_in, outdated, make_instance):
    make_instance()
    viewer = sign_in("viewer")
    answer = viewer.get("instances")
    assert [row["outdated"] for row in answer.json()["items"]] == [["max_num_seqs"], []]
    assert viewer.get("instances/instance-1").json()["outdated"] == ["max_num_seqs"]
    assert "hidden" not in answer.content.decode()


def test_begun_followed_and_cancelled(sign_in, outdated, deployment):
    path, operator = f"deployments/{deployment.pk}/rollout", sign_in("operator")
    assert operator.get(path).json() == {
        "total": 1,
        "up_to_date": 0,
        "outdated": {"instance-1": ["max_num_seqs"]},
        "rollout": None,
    }
    assert operator.post(path).status_code == 422  # without a reason
    begun = operator.post(path, reason="fewer at once")
    assert begun.status_code == 202
    assert (begun.json()["state"], begun.json()["actor"]) == ("in_progress", "operator")
    again = operator.post(path, reason="again")
    assert again.status_code == 409
    assert "in progress" in again.json()["error"]["message"]
    assert operator.get(path).json()["rollout"]["id"] == begun.json()["id"]
    cancelled = operator.send("DELETE", f"{path}?reason=not%20today", {})
    assert cancelled.json()["state"] == "cancelled"
    assert Event.objects.get(kind="rollout.cancelled").reason == "Cancelled by operator: not today"
    assert operator.send("DELETE", path, {}).status_code == 409
    assert operator.get("deployments/0/rollout").status_code == 404


def test_without_a_reason_the_cancelling_says_who(sign_in, outdated, deployment):
    path, operator = f"deployments/{deployment.pk}/rollout", sign_in("operator")
    operator.post(path, reason="x")
    assert operator.send("DELETE", path, {}).json()["message"] == "Cancelled by operator"


def test_how_a_version_proves_itself_is_given_and_it_goes_back_on_request(sign_in, outdated, deployment):
    path, operator = f"deployments/{deployment.pk}/rollout", sign_in("operator")
    assert operator.post(path, reason="x", bake_s=-1).status_code == 422
    begun = operator.post(path, reason="x", bake_s=300, failure_budget=0.01, min_requests=50, auto_back=False).json()
    given = ("bake_s", "failure_budget", "min_requests", "auto_back", "going_back", "cause")
    assert [begun[name] for name in given] == [300, 0.01, 50, False, False, ""]
    refused = operator.post(f"{path}/back", reason="too slow")
    assert refused.status_code == 409
    assert "the settings before are not known" in refused.json()["error"]["message"]
    before = revisions.launched_with(deployment, launch_spec(outdated))
    Rollout.objects.update(before=before)  # as an instance of this release has them
    back = operator.post(f"{path}/back", reason="too slow")
    assert (back.status_code, back.json()["going_back"], back.json()["cause"]) == (
        202,
        True,
        "Asked by operator: too slow",
    )
    assert Deployment.objects.get().max_num_seqs == 256
    assert sign_in("viewer").post(f"{path}/back", reason="x").status_code == 403
