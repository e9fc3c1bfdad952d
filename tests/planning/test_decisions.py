"""What operators decide: plans approved and rejected, policies set; each decision is an event."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.planning import services
from controlplane.planning.models import PlanStatus, PolicyMode, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import load_now

pytestmark = pytest.mark.django_db


@pytest.fixture
def make_plan(language_model):
    def make(status=PlanStatus.ADVICE, minutes=60, **values):
        valid_until = timezone.now() + timedelta(minutes=minutes)
        return ScalingPlan.objects.create(
            model=language_model, strategy="lt_ua", status=status, valid_until=valid_until, **values
        )

    return make


class TestPlans:
    def test_an_approved_plan_is_to_be_carried_out(self, make_plan, operator):
        plan = make_plan(targets=[{"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 2}])
        services.approve(plan, operator, "the evening peak")
        assert (plan.status, plan.decided_by) == (PlanStatus.APPROVED, "operator")
        plan.refresh_from_db()
        assert plan.status == PlanStatus.APPROVED
        assert plan.decided_at is not None
        event = Event.objects.get(kind="plan.approved")
        assert (event.user, event.reason, event.before) == (operator, "the evening peak", {"status": "advice"})
        assert event.after["targets"] == plan.targets

    def test_a_rejected_one_is_not(self, make_plan, operator):
        plan = make_plan()
        services.reject(plan, operator, "we know better")
        assert plan.status == PlanStatus.REJECTED
        assert Event.objects.get(kind="plan.rejected").reason == "we know better"

    def test_what_an_older_approved_plan_left_to_do_is_superseded(self, make_plan, operator):
        target = {"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 3, "obstacle": "no GPU is free"}
        older = make_plan(PlanStatus.IN_PROGRESS, targets=[target | {"left": 2}])
        services.approve(make_plan(targets=[target | {"target": 2}]), operator)
        older.refresh_from_db()
        assert older.status == PlanStatus.SUPERSEDED
        assert older.note == "2 instances not added in us-east: no GPU is free"

    @pytest.mark.parametrize("status", sorted(set(PlanStatus) - {PlanStatus.ADVICE}))
    @pytest.mark.parametrize("decide", [services.approve, services.reject])
    def test_only_advice_is_decided_about(self, make_plan, operator, status, decide):
        plan = make_plan(status)
        with pytest.raises(ActionError, match=f"is {status.label.lower()} and cannot be"):
            decide(plan, operator)
        plan.refresh_from_db()
        assert plan.status == status
        assert not Event.objects.exists()

    def test_it_is_not_undone_where_less_would_be_left_than_is_asked_for(
        self, make_plan, make_instance, operator, language_model, monkeypatch
    ):
        for _ in range(3):
            make_instance()
        plan = make_plan(targets=[{"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 3}])
        plan.inputs = {"capability_tokens_per_s": {"a100-80gb": {"used": 1000.0}}}
        plan.save()
        services.approve(plan, operator)
        monkeypatch.setattr(load_now, "read", lambda now: {language_model.name: load_now.LoadNow(1500.0)})
        with pytest.raises(ActionError, match="Below the load now: 1,000 tok/s as planned, 1,500 needed now"):
            services.undo(plan, operator, "a test")
        monkeypatch.setattr(load_now, "read", lambda now: {language_model.name: load_now.LoadNow(900.0)})
        services.undo(plan, operator, "a test")
        back = ScalingPlan.objects.first()
        assert (back.status, back.note) == (PlanStatus.APPROVED, f"Undoes plan {plan.pk}")
        assert [(row["present"], row["target"]) for row in back.targets] == [(3, 1)]

    @pytest.mark.sql
    def test_a_second_operator_reads_that_the_first_was_faster(self, make_plan, operator):
        plan = make_plan()
        same = ScalingPlan.objects.get(pk=plan.pk)
        services.reject(plan, operator)
        with pytest.raises(ActionError, match="is rejected"):
            services.approve(same, operator)

    def test_a_plan_for_a_time_that_is_over_is_not_approved(self, make_plan, operator):
        plan = make_plan(minutes=-1)
        with pytest.raises(ActionError, match="was for the time until"):
            services.approve(plan, operator)


class TestPolicies:
    def test_a_policy_is_made_and_changed_with_an_event_each(self, language_model, operator):
        services.set_policy(language_model, "reactive", PolicyMode.SHADOW, {}, operator)
        assert Event.objects.get(kind="scaling_policy.created").user == operator
        services.set_policy(language_model, "lt_ua", PolicyMode.AUTO, {}, operator, "it did well in shadow")
        event = Event.objects.get(kind="scaling_policy.changed")
        assert event.before == {"strategy": "reactive", "mode": "shadow"}
        assert event.after == {"strategy": "lt_ua", "mode": "auto"}
        row = ScalingPolicy.objects.get()
        assert (row.model, row.strategy, row.mode) == (language_model, "lt_ua", "auto")

    def test_setting_what_is_set_is_no_event_and_leaves_plans_alone(self, language_model, operator, make_plan):
        services.set_policy(language_model, "lt_u", PolicyMode.ASK, {}, operator)
        plan = make_plan()
        services.set_policy(language_model, "lt_u", PolicyMode.ASK, {}, operator)
        assert Event.objects.count() == 1
        plan.refresh_from_db()
        assert plan.status == PlanStatus.ADVICE

    def test_a_change_supersedes_what_waits(self, language_model, operator, make_plan):
        services.set_policy(language_model, "lt_u", PolicyMode.ASK, {}, operator)
        waiting, done = make_plan(), make_plan(PlanStatus.CARRIED_OUT)
        services.set_policy(language_model, "lt_u", PolicyMode.OFF, {}, operator)
        waiting.refresh_from_db()
        done.refresh_from_db()
        assert (waiting.status, done.status) == (PlanStatus.SUPERSEDED, PlanStatus.CARRIED_OUT)

    @pytest.mark.parametrize(
        ("strategy", "mode", "parameters", "field"),
        [
            ("no such", "auto", {}, "strategy"),
            ("reactive", "always", {}, "mode"),
            ("reactive", "auto", ["a list"], "parameters"),
        ],
    )
    def test_what_cannot_be_is_refused_at_its_field(self, language_model, operator, strategy, mode, parameters, field):
        with pytest.raises(ValidationError) as refused:
            services.set_policy(language_model, strategy, mode, parameters, operator)
        assert field in refused.value.message_dict
        assert not ScalingPolicy.objects.exists()
        assert not Event.objects.exists()
