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
    path, operator = f"deployments/{deployment.pk}", sign_in("operator")
    assert operator.get(f"{path}/rollout").json() == {
        "total": 1,
        "up_to_date": 0,
        "outdated": {"instance-1": ["max_num_seqs"]},
        "rollout": None,
    }
    assert operator.post(f"{path}/roll-out").status_code == 422  # without a reason
    assert operator.post(f"{path}/roll-out", reason="fewer at once").status_code == 200
    begun = operator.get(f"{path}/rollout").json()["rollout"]
    assert (begun["state"], begun["actor"]) == ("in_progress", "operator")
    again = operator.post(f"{path}/roll-out", reason="again")
    assert again.status_code == 409
    assert "in progress" in again.json()["error"]["message"]
    assert operator.post(f"{path}/cancel-rollout", reason="not today").status_code == 200
    assert operator.get(f"{path}/rollout").json()["rollout"]["state"] == "cancelled"
    assert Event.objects.get(kind="rollout.cancelled").reason == "Cancelled by operator: not today"
    assert operator.post(f"{path}/cancel-rollout").status_code == 409
    assert operator.get("deployments/0/rollout").status_code == 404


def test_how_a_version_proves_itself_is_given_and_it_goes_back_on_request(sign_in, outdated, deployment):
    path, operator = f"deployments/{deployment.pk}", sign_in("operator")
    for wrong, field in (({"bake_s": -1}, "bake_s"), ({"colour": 1}, "colour")):
        refused = operator.post(f"{path}/roll-out", reason="x", **wrong)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, field)
    assert operator.post(f"{path}/undeploy", reason="x", bake_s=1).status_code in (403, 422)
    given = {"bake_s": 300, "failure_budget": 0.01, "min_requests": 50, "auto_back": False}
    assert operator.post(f"{path}/roll-out", reason="x", **given).status_code == 200
    begun = operator.get(f"{path}/rollout").json()["rollout"]
    assert begun | given | {"going_back": False, "cause": ""} == begun
    refused = operator.post(f"{path}/roll-back", reason="too slow")
    assert refused.status_code == 409
    assert "the settings before are not known" in refused.json()["error"]["message"]
    before = revisions.launched_with(deployment, launch_spec(outdated))
    Rollout.objects.update(before=before)  # as an instance of this release has them
    assert operator.post(f"{path}/roll-back", reason="too slow").status_code == 200
    assert (Rollout.objects.get().going_back, Rollout.objects.get().cause) == (True, "Asked by operator: too slow")
    assert Deployment.objects.get().max_num_seqs == 256
    assert sign_in("viewer").post(f"{path}/roll-back", reason="x").status_code == 403
