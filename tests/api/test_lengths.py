"""`/api`: output lengths: who reads, who decides, and what they get."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.lengths import training
from controlplane.lengths.models import LengthMinute, LengthVersion

pytestmark = pytest.mark.django_db


def made(number, state="shadow"):
    return LengthVersion.objects.create(number=number, kind="trees", state=state, measures={"mae": 50.0})


@pytest.fixture
def measures():
    now = timezone.now()
    for tenant, predictor, error, hours in (
        ("acme", "trees 0", 30, 1),
        ("acme", "shadow trees 1", 20, 1),
        ("beta", "cache", 5, 1),
        ("beta", "cache", 500, 48),
    ):
        LengthMinute.objects.create(
            minute=now - timedelta(hours=hours),
            model="m",
            tenant=tenant,
            predictor=predictor,
            requests=10,
            predicted_tokens=1100,
            output_tokens=1000,
            absolute_error_tokens=10 * error,
            within_25=5,
            within_50=10,
            within_100=10,
            below_median=4,
            below_upper=9,
        )


def test_measures_by_series_over_a_range(sign_in, measures):
    viewer = sign_in("viewer")
    items = viewer.get("lengths").json()["items"]
    assert [(row["tenant"], row["predictor"], row["mae_tokens"]) for row in items] == [
        ("acme", "shadow trees 1", 20.0),
        ("acme", "trees 0", 30.0),
        ("beta", "cache", 5.0),
    ]
    assert items[0] | {"mae_tokens": None} == {
        "model": "m",
        "tenant": "acme",
        "predictor": "shadow trees 1",
        "requests": 10,
        "mean_output_tokens": 100.0,
        "mae_tokens": None,
        "bias_tokens": 10.0,
        "acc_25": 0.5,
        "acc_50": 1.0,
        "acc_100": 1.0,
        "below_median": 0.4,
        "below_upper": 0.9,
    }
    (row,) = viewer.get("lengths", tenant="beta", hours=72).json()["items"]
    assert (row["requests"], row["mae_tokens"]) == (20, 252.5)
    assert len(viewer.get("lengths", predictor="trees 0").json()["items"]) == 1
    assert viewer.get("lengths", model="other").json()["items"] == []
    assert viewer.get("lengths", hours=-1).status_code == 422


def test_versions_are_read_promoted_and_rolled_back(sign_in):
    operator = sign_in("operator")
    made(1, "active")
    made(2)
    assert [row["number"] for row in operator.get("lengths/versions").json()["items"]] == [2, 1]
    assert operator.post("lengths/versions/2/promote", reason="better").json()["state"] == "active"
    assert operator.post("lengths/versions/2/promote").status_code == 409
    assert operator.post("lengths/versions/1/rollback", reason="worse").json()["state"] == "active"
    assert operator.post("lengths/versions/1/rollback").json()["state"] == "rejected"  # to the bundled trees
    assert operator.post("lengths/versions/1/rollback").status_code == 409
    made(3)
    assert operator.post("lengths/versions/99/promote").status_code == 404
    assert Event.objects.get(kind="length_version.promoted").reason == "better"


def test_training_is_asked_for(sign_in, monkeypatch, settings):
    operator, tasks = sign_in("operator"), []
    monkeypatch.setattr(training, "send_task", lambda *task, **named: tasks.append(task) or True)
    assert operator.post("lengths/train", reason="now").status_code == 409
    settings.LENGTH_TRAIN_SAMPLES = 0
    answer = operator.post("lengths/train", reason="now")
    assert (answer.status_code, answer.json()) == (202, {"kind": "trees"})
    assert tasks == [("workers.tasks.lengths.train_length_model", "trees", "operator", "now")]
    assert operator.post("lengths/train", reason="now", kind="preserve").status_code == 202
    assert operator.post("lengths/train", reason="now", kind="oracle").status_code == 409
