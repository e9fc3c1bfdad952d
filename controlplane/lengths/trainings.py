"""Trainings of length models as rows: asked for, taken up by a worker or a command, watched on the way, ended.

What a training does is `training`. A row says in words how far it has come, and in the end its version or why there is none.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from django.db import DatabaseError
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.broker import send_task
from controlplane.jobs.record import describe
from controlplane.lengths import samples, training
from controlplane.lengths.models import LengthTraining, TrainingState
from controlplane.lengths.services import ACTOR
from controlplane.tuning.selectors import tuned
from forecasting.lengths import MODELS, TEXTLESS, Fitting

logger = logging.getLogger(__name__)

TASK: Final = "workers.tasks.lengths.train_length_model"
LIMIT_S: Final = 3000
"""Of one training, in a worker."""
WAITS_S: Final = 3600
"""How long one that was asked for waits for a worker."""
AGAIN_AFTER: Final = timedelta(minutes=1)
"""After which one that waits and that no worker looked at is asked for again: its message was lost with the broker."""
SILENT: Final = timedelta(minutes=15)
"""After which a training that says nothing is taken for lost, as after a restart of its worker."""
LOOK_S: Final = 1.0
"""Between two writes of how far it has come."""
MOST_KEPT: Final = 100
"""Rows; older ones are deleted when another is asked for."""
OPEN: Final = (TrainingState.QUEUED, TrainingState.RUNNING)
STEPS: Final = {
    "tune": "the encoder is fine-tuned, batch",
    "read prompts": "the encoder reads prompts, for the head that is fitted on it",
    "encode": "the encoder reads prompts",
    "predict": "measured on prompts held out",
}
"""What models report, in words."""


def ask(actor: User, reason: str = "", kind: str = training.STUDENT) -> LengthTraining:
    """Have a worker train a version of *kind* now. ActionError for too few samples, or where one is asked for."""
    training.check_samples(kind)
    if LengthTraining.objects.filter(kind=kind, state__in=OPEN).exists():
        raise ActionError(f"A training of {kind} waits or runs already; the Lengths page shows how far it has come.")
    row = begun(kind, actor.get_username(), reason)
    record("length_version.training_asked", actor=actor, reason=reason, inputs={"kind": kind})
    if not send_task(TASK, row.pk, expires_s=WAITS_S):
        reason = "No worker could be asked to train: Celery's broker does not answer. Try again later."
        _end(row, TrainingState.FAILED, error=reason)
        raise ActionError(reason)
    return row


def begun(kind: str, actor: str, reason: str) -> LengthTraining:
    """A row that waits to be run."""
    row = LengthTraining.objects.create(kind=kind, asked_by=actor, reason=reason[:255])
    old = LengthTraining.objects.exclude(state__in=OPEN).values_list("pk", flat=True)[MOST_KEPT:]
    LengthTraining.objects.filter(pk__in=list(old)).delete()
    return row


def run(row: LengthTraining, file: Path | None = None, fitting: Fitting | None = None) -> LengthTraining:
    """Train what *row* asks for, if it still waits, and report progress in it. Raises what `training.train` raises."""
    now = timezone.now()
    values = {"state": TrainingState.RUNNING, "started_at": now, "seen_at": now, "step": "samples are read"}
    if not LengthTraining.objects.filter(pk=row.pk, state=TrainingState.QUEUED).update(**values):
        row.refresh_from_db()
        return row
    fitting = fitting or training.usual_fitting()
    fitting = replace(fitting, progress=_report(row, fitting.progress))
    try:
        version = training.train(timezone.now(), row.asked_by or ACTOR, row.reason, row.kind, file, fitting)
    except BaseException as error:
        said = str(error) if isinstance(error, ActionError | ValueError) else describe(error)
        _end(row, TrainingState.FAILED, error=said)
        raise
    _end(row, TrainingState.DONE, version=version)
    return row


def run_asked(pk: int) -> int:
    """Run the training *pk* that somebody asked for; the number of its version, or 0, and an event, when it failed."""
    row = LengthTraining.objects.filter(pk=pk).first()
    if row is None:
        return 0
    try:
        row = run(row)
    except ActionError:
        pass  # the row says why
    except Exception:
        logger.exception("lengths: no version was trained")
    row.refresh_from_db()
    return row.version.number if row.version else 0


def run_due(now: datetime) -> int:
    """Train every kind that it is time for, until somebody waits for another; the last number, 0 when there was none.

    Raises what the first to fail raises.
    """
    numbers = [0]
    for kind in training.due(now):
        if somebody_waits():
            break
        row = run(begun(kind, "", "it is due"))
        numbers.append(row.version.number if row.version else 0)
    return numbers[-1]


def note_waiting(pk: int) -> None:
    """A worker looked at the training *pk*, and left it waiting for other long work."""
    LengthTraining.objects.filter(pk=pk, state=TrainingState.QUEUED).update(seen_at=timezone.now())


def look_after(now: datetime) -> int:
    """Fail what no worker took up in time, or a worker left behind; how many. Ask again for what waits unseen."""
    waited = LengthTraining.objects.filter(
        state=TrainingState.QUEUED, asked_at__lt=now - timedelta(seconds=WAITS_S + 60)
    )
    lost = LengthTraining.objects.filter(state=TrainingState.RUNNING, seen_at__lt=now - SILENT)
    count = 0
    for rows, error in (
        (waited, "No worker took it up within an hour."),
        (lost, "The worker that ran it is gone, or it took too long for a step."),
    ):
        for row in rows:
            _end(row, TrainingState.FAILED, error=error)
            count += 1
    for row in LengthTraining.objects.filter(state=TrainingState.QUEUED).exclude(asked_by=""):
        if max(row.asked_at, row.seen_at or row.asked_at) < now - AGAIN_AFTER:
            send_task(TASK, row.pk, expires_s=WAITS_S)
    return count


def somebody_waits() -> bool:
    """Whether a training that somebody asked for waits for a worker."""
    return LengthTraining.objects.filter(state=TrainingState.QUEUED).exclude(asked_by="").exists()


def ready() -> list[tuple[str, int, int]]:
    """Of each kind how many samples it can learn from now, and how many it needs."""
    with_text, textless = (
        samples.rows_for(next(iter(kinds))).count() for kinds in (MODELS.keys() - TEXTLESS, TEXTLESS)
    )
    return [(kind, textless if kind in TEXTLESS else with_text, tuned().LENGTH_TRAIN_SAMPLES) for kind in MODELS]


def _report(row: LengthTraining, also: Callable[[str, int, int], None] | None) -> Callable[[str, int, int], None]:
    """Write what a model reports into *row*, once a second at most, and give it to *also*."""
    written_s = 0.0

    def report(what: str, done: int, steps: int) -> None:
        nonlocal written_s
        if also is not None:
            also(what, done, steps)
        if time.monotonic() - written_s < LOOK_S:
            return
        written_s = time.monotonic()
        step = what.rpartition(": ")[2]
        values = {"step": STEPS.get(step, step), "done": done, "steps": steps, "seen_at": timezone.now()}
        with contextlib.suppress(DatabaseError):  # a busy database costs a figure, not the training
            LengthTraining.objects.filter(pk=row.pk).update(**values)

    return report


def _end(row: LengthTraining, state: TrainingState, **values: Any) -> None:
    LengthTraining.objects.filter(pk=row.pk, state__in=OPEN).update(state=state, ended_at=timezone.now(), **values)
    row.refresh_from_db()
    if state == TrainingState.FAILED and row.asked_by:  # of one that was due, the job is failing
        record(
            "length_version.training_failed",
            actor=row.asked_by,
            reason=row.error,
            inputs={"kind": row.kind},
            severity=Severity.WARNING,
        )
