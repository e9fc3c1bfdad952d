"""Training of length models, daily and on demand, their judgement, and deletion of old samples."""

from django.utils import timezone

from controlplane.lengths import services, training
from workers.celery import app
from workers.tasks.planning import LONG_WORK, only_one

AGAIN_S = 10
"""Interval at which a requested training checks whether other long work is done."""


@app.task(soft_time_limit=training.LIMIT_S, time_limit=training.LIMIT_S + 20)
def train_length_model(kind: str = "", actor: str = "", reason: str = "") -> int:
    """Train a version of *kind* for *actor*, or what is due; return its number, 0 without any."""
    with only_one(LONG_WORK) as free:
        if not free:
            if kind:
                train_length_model.apply_async((kind, actor, reason), countdown=AGAIN_S)
            return 0
        return training.run_requested(kind, actor, reason) if kind else training.run_due(timezone.now())


@app.task
def judge_length_versions() -> int:
    """Promote or reject the shadow once enough is known; return the number of the judged version, or 0."""
    with only_one("judge_length_versions") as free:
        version = services.judge(timezone.now()) if free else None
    return version.number if version else 0
