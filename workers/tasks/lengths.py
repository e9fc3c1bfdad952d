"""The length model's life: trained daily and on demand, judged beside the active version; old samples are deleted."""

import logging

from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.record import describe
from controlplane.lengths import services, training
from workers.celery import app
from workers.tasks.planning import LONG_WORK, only_one

logger = logging.getLogger(__name__)

TRAIN_LIMIT_S = 3000
AGAIN_S = 10
"""After which a training that somebody asked for looks again whether other long work is done."""


@app.task(soft_time_limit=TRAIN_LIMIT_S, time_limit=TRAIN_LIMIT_S + 20)
def train_length_model(actor: str = "", reason: str = "", kind: str = "") -> int:
    """Train what is due, or *kind* (the student) at once for an *actor*; the last number, 0 when none was trained.

    One that somebody asked for and that fails is an event; of one that was due, the job is failing.
    """
    with only_one(LONG_WORK) as free:
        if not free:
            if actor:
                train_length_model.apply_async((actor, reason, kind), countdown=AGAIN_S)
            return 0
        if actor:
            return _asked_for(actor, reason, kind or training.STUDENT)
        now = timezone.now()
        numbers = [training.train(now, how=training.How(due)).number for due in training.due(now)]
        return numbers[-1] if numbers else 0


def _asked_for(actor: str, reason: str, kind: str) -> int:
    try:
        return training.train(timezone.now(), actor, reason, training.How(kind)).number
    except ActionError as error:
        failure = str(error)
    except Exception as error:
        logger.exception("lengths: no version was trained")
        failure = describe(error)
    record("length_version.training_failed", actor=actor, reason=failure, severity=Severity.WARNING)
    return 0


@app.task
def judge_length_versions() -> int:
    """Promote or reject the shadow once enough is known; the number of the version that was judged, or 0."""
    with only_one("judge_length_versions") as free:
        version = services.judge(timezone.now()) if free else None
    return version.number if version else 0


@app.task
def prune_lengths() -> int:
    """Delete samples and measures after their days, and texts whose tenants keep none any more; returns how many."""
    return services.prune(timezone.now())
