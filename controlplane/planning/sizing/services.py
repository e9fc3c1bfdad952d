"""Writes of capacity plans: asking. Workers answer (`working`)."""

from datetime import datetime, timedelta
from typing import Any, Final

from django.db import transaction
from pydantic import ValidationError

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Region
from controlplane.jobs.broker import send_task
from controlplane.planning.models import CapacityPlan, CapacityState
from controlplane.planning.sizing.question import Question, problems_of
from controlplane.planning.sizing.selectors import classes_of, gpu_types

TASK: Final = "workers.tasks.simulation.plan_capacity"
LIMIT_S: Final = 600
KEPT: Final = 50


def supervise(now: datetime) -> int:
    """Fail plans whose worker was lost, or that none took, within `LIMIT_S`; return how many."""
    late = CapacityPlan.objects.filter(
        state__in=(CapacityState.QUEUED, CapacityState.RUNNING), asked_at__lt=now - timedelta(seconds=LIMIT_S)
    )
    return late.update(state=CapacityState.FAILED, error="No worker answered in time: ask again.", ended_at=now)


class Refused(ActionError):
    """The question cannot be answered; `fields` has a sentence by field."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(" ".join(f"{name}: {text}" for name, text in fields.items()))
        self.fields = fields


def read(given: dict[str, Any]) -> Question:
    """Return the question *given*. Raise Refused naming its invalid fields."""
    try:
        question = Question.model_validate(given)
        gpu_types(question.gpus)
        classes_of(question)
    except ValidationError as error:
        raise Refused(problems_of(error)) from error
    except ValueError as error:
        place, _, what = str(error).partition(": ")
        raise Refused({place: f"{what[:1].upper()}{what[1:]}."}) from error
    if question.survives_loss and Region.objects.filter(active=True).count() < 2:
        raise Refused({"survives_loss": "There is one region: nothing serves its demand without it."})
    return question


@transaction.atomic
def ask(given: dict[str, Any], actor: User) -> CapacityPlan:
    """Have a worker answer the question *given*. Raise Refused."""
    question = read(given)
    row = CapacityPlan.objects.create(question=question.model_dump(mode="json"), requested_by=actor)
    record("capacity.asked", row, actor=actor, inputs=row.question)
    old = CapacityPlan.objects.order_by("-pk").values_list("pk", flat=True)[KEPT:]
    CapacityPlan.objects.filter(pk__in=list(old)).delete()
    transaction.on_commit(lambda: send_task(TASK, row.pk, expires_s=LIMIT_S, queue="simulation"))
    return row
