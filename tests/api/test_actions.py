"""`POST /api/RESOURCE/ROW/ACTION`: what a body needs, and what it may not have."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.alerts.models import Alert, AlertRule, Condition

pytestmark = pytest.mark.django_db
LATER = (timezone.now() + timedelta(hours=1)).isoformat()


@pytest.fixture
def alert():
    rule = AlertRule.objects.create(name="a rule", condition=Condition.JOB)
    times = dict.fromkeys(("since", "opened_at", "seen_at"), timezone.now())
    return Alert.objects.create(rule=rule, subject="plans", **times)


@pytest.mark.parametrize(
    ("action", "body", "status", "field"),
    [
        ("acknowledge", {}, 200, None),
        ("acknowledge", {"until": LATER}, 422, "until"),
        ("silence", {"reason": "known", "until": LATER}, 200, None),
        ("silence", {"reason": "over", "until": None}, 200, None),
        ("silence", {"reason": "known"}, 422, "until"),
        ("silence", {"until": LATER}, 422, "reason"),
        ("silence", {"reason": "known", "until": "soon"}, 422, "until"),
        ("silence", {"reason": "known", "until": "2020-01-01T00:00:00Z"}, 422, "until"),
        ("silence", {"reason": "known", "until": LATER, "for": 3}, 422, "for"),
        ("explode", {"reason": "known"}, 422, "action"),
    ],
)
def test_a_body_has_what_its_action_needs_and_no_more(sign_in, alert, action, body, status, field):
    answer = sign_in("operator").post(f"alerts/{alert.pk}/{action}", **body)
    assert answer.status_code == status, answer.content
    assert (answer.json().get("error") or {"field": None})["field"] == field
    alert.refresh_from_db()
    assert (alert.silenced_until is not None) == (status == 200 and body.get("until") is not None)
    assert (alert.acknowledged_at is not None) == (status == 200 and action == "acknowledge")
