"""What migrations make of rows: plans of before `applied` was split keep what they were; `siloed` becomes `reactive`."""

from datetime import timedelta
from importlib import import_module

import pytest
from django.apps import apps
from django.utils import timezone

from controlplane.planning.models import ScalingPlan, ScalingPolicy

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
states = import_module("controlplane.planning.migrations.0004_plan_states")
siloed = import_module("controlplane.planning.migrations.0006_siloed_is_reactive")


def test_each_applied_plan_gets_the_state_that_it_was_in(language_model):
    now = timezone.now()

    def plan(status, change, minutes, by="planner", note=""):
        target = {"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 1 + change}
        return ScalingPlan.objects.create(
            model=language_model, strategy="lt_ua", status=status, targets=[target], decided_by=by, note=note,
            valid_until=now + timedelta(minutes=minutes), carried_out_at=now,
        ).pk  # fmt: skip

    expected = {
        plan("failed", 2, -9): ("expired", False),
        plan("applied", 2, -9, by="operator"): ("carried_out", True),
        plan("applied", 2, -9, by="operator", note="1 instance could not be added in time."): ("expired", False),
        plan("applied", 0, -9): ("carried_out", True),
        plan("applied", 3, 4): ("superseded", False),
        plan("applied", 3, 5): ("in_force", False),
        plan("shadow", 3, 5): ("shadow", True),
    }
    states.split(apps, None)
    states_now = {row.pk: (row.status, row.carried_out_at is not None) for row in ScalingPlan.objects.all()}
    assert states_now == expected


def test_a_policy_of_silos_continues_as_reactive(language_model):
    row = ScalingPolicy.objects.create(model=language_model, strategy="siloed", memory={"kept": 1.0})
    siloed.to_reactive(apps, None)
    row.refresh_from_db()
    assert (row.strategy, row.memory) == ("reactive", {"kept": 1.0})
