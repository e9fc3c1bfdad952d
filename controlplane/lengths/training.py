"""Training of length models: their samples, the training itself, and its row with progress and result.

Models that read no text (`TEXTLESS`, the student among them) learn from every sample; the others need text, which a
sample has only if its tenant keeps prompts. A fifth of the prompts is held out. The result is a version in shadow, or a
rejected one if it does worse than its predecessor on them.
"""

import contextlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

from django.conf import settings
from django.db import DatabaseError
from django.db.models import QuerySet
from django.utils import timezone
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.jobs.broker import send_task
from controlplane.jobs.record import describe
from controlplane.lengths.models import (
    BUNDLED,
    LengthSample,
    LengthTraining,
    LengthVersion,
    TrainingState,
    VersionState,
)
from controlplane.lengths.services import ACTOR, add, in_use
from controlplane.tuning.selectors import tuned
from forecasting.lengths import (
    MODELS,
    ON_ENCODER,
    TEXTLESS,
    Fitting,
    LengthModel,
    LengthQuery,
    Sample,
    Student,
    rests,
    score,
)
from forecasting.lengths.datasets import count_tokens
from forecasting.lengths.encoder import MOST_TOKENS, torch_threads
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

STUDENT: Final = Student.name
MOST_TRAINED: Final = 50_000
HELD_OUT: Final = 5
"""Every fifth prompt is held out of training; equal prompts are on the same side."""
MOST_JUDGED: Final = 500
"""Newest held-out samples by which encoders are judged: they read some dozens a second."""
FITTING: Final = Fitting(most_tokens=MOST_TOKENS)
"""Of a conversation the last 512 tokens by the encoder's own tokenizer are read (SSJF, section 3.1)."""

TASK: Final = "workers.tasks.lengths.train_length_model"
LIMIT_S: Final = 3000
"""Time limit of one training in a worker."""
WAITS_S: Final = 3600
"""Timeout of a requested training that no worker starts."""
AGAIN_AFTER: Final = timedelta(minutes=1)
"""Delay after which a pending training that no worker has seen is sent again: its message was lost with the broker."""
SILENT: Final = timedelta(minutes=15)
"""Time without progress after which a training counts as lost, as after a restart of its worker."""
REPORT_S: Final = 1.0
"""Least interval between two writes of the progress."""
MOST_KEPT: Final = 100
"""Rows kept; older ones are deleted when another is added."""
OPEN: Final = (TrainingState.QUEUED, TrainingState.RUNNING)
STEPS: Final = {
    "tune": "the encoder is fine-tuned, batch",
    "read prompts": "the encoder reads prompts, for the head that is fitted on it",
    "encode": "the encoder reads prompts",
    "predict": "measured on prompts held out",
}
"""Descriptions of the phases that models report."""

# Samples


def rows_for(kind: str) -> QuerySet[LengthSample]:
    """Return the samples that a model of *kind* can learn from, newest first."""
    rows = LengthSample.objects.select_related("tenant").order_by("-pk")
    return rows if kind in TEXTLESS else rows.filter(tenant__keep_prompts=True).exclude(text="")


def stored(kind: str) -> list[Sample]:
    """Return samples for *kind*, oldest first, without those that `max_tokens` cut."""
    samples = []
    for row in reversed(rows_for(kind)[:MOST_TRAINED]):
        if not row.tenant.keep_prompts:
            row.text = ""  # it may not be deleted yet
        if row.max_tokens is None or row.output_tokens < row.max_tokens:
            samples.append(Sample(row.query, row.output_tokens))
    return samples


class SampleLine(BaseModel):
    """One finished request, a line of a file."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: counted from the text (`count_tokens`)."""
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    def sample(self) -> Sample:
        prompt_tokens = self.prompt_tokens or max(1, count_tokens(self.text))
        query = LengthQuery(self.text, prompt_tokens, self.model, self.tenant, self.slo_class, self.max_tokens)
        return Sample(query, self.output_tokens)


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in *path* without those that `max_tokens` cut. Raises ValueError naming an unreadable line."""
    samples = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                try:
                    line = SampleLine.model_validate(json.loads(text))
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(map(str, first["loc"]))
                    raise ValueError(f"{path}, line {number}: {where}: {first['msg']}") from error
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: no JSON object") from error
                if line.max_tokens is None or line.output_tokens < line.max_tokens:
                    samples.append(line.sample())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return samples


# The training


def train(
    now: datetime,
    actor: User | str = ACTOR,
    reason: str = "",
    kind: str = STUDENT,
    file: Path | None = None,
    fitting: Fitting | None = None,
) -> LengthVersion:
    """Train a version of *kind* on the stored samples, or those in *file*; store it, in the shadow or rejected.

    Raises ActionError for a kind that rests and for too few samples, naming the needed sort, EncoderMissing without the
    encoder, and ValueError for a file that cannot be read.
    """
    _check_kind(kind)
    samples = read_samples(file) if file else stored(kind)
    model, predecessor = MODELS[kind](fitting or usual_fitting()), _predecessor(kind)
    if isinstance(model, Student):  # it continues from its predecessor
        model, predecessor, samples = _student(samples)
    if len(samples) < _least():
        raise ActionError(_too_few(kind, len(samples), file))
    held_out = [sample for sample in samples if _held_out(sample)]
    learnt = [sample for sample in samples if not _held_out(sample)]
    if not held_out or not learnt:
        raise ActionError("The samples are all of one prompt: there is nothing to learn from them.")
    active = in_use()
    on_encoder = not ON_ENCODER.isdisjoint({kind, active.kind})
    if on_encoder:
        held_out = held_out[-MOST_JUDGED:]
    with torch_threads(settings.LENGTH_TORCH_THREADS) if on_encoder else nullcontext():
        mae_before = None if predecessor is None else _mae(predecessor, held_out)
        active_mae = mae_before if active == predecessor else _mae(active, held_out)
        measures: dict[str, Any] = _measured(model.fit(learnt), held_out)
    measures |= {"held_out": len(held_out), "active": str(active), "active_mae": active_mae}
    worse = ""
    if mae_before is not None and measures["mae"] > mae_before:
        worse = (
            f"worse on {len(held_out):,} held-out samples: mean absolute error of {measures['mae']:.1f} tokens,"
            f" {predecessor} {mae_before:.1f}"
        )
    return add(model, now, len(learnt), measures, actor, reason, worse)


def check_samples(kind: str) -> None:
    """Raise ActionError if there is no such kind, it rests, or too few samples suit it."""
    _check_kind(kind)
    count = rows_for(kind).count()
    if count < tuned().LENGTH_TRAIN_SAMPLES:
        raise ActionError(_too_few(kind, count, None))


def _check_kind(kind: str) -> None:
    if kind not in MODELS:
        raise ActionError(f"There is no length model {kind!r}; there are: {', '.join(MODELS)}.")
    if reason := rests(kind):
        raise ActionError(reason)


def due(now: datetime) -> list[str]:
    """Return the kinds that are due for training and have enough samples, of the student and those that models name."""
    if not tuned().LENGTH_TRAIN_EVERY_S:
        return []
    named = Model.objects.exclude(length_model="").order_by("length_model").values_list("length_model", flat=True)
    return [kind for kind in dict.fromkeys((STUDENT, *named)) if _due(kind, now)]


def _due(kind: str, now: datetime) -> bool:
    newest = LengthVersion.objects.filter(kind=kind).order_by("-number").first()
    if rests(kind):
        return False
    if newest is not None and (now - newest.trained_at).total_seconds() < 0.9 * tuned().LENGTH_TRAIN_EVERY_S:
        return False
    enough: int = tuned().LENGTH_TRAIN_SAMPLES
    return rows_for(kind).count() >= enough


def usual_fitting() -> Fitting:
    """Return the fitting by the settings."""
    samples, layers = tuned().LENGTH_ENCODER_SAMPLES, tuned().LENGTH_ENCODER_LAYERS
    return replace(FITTING, encoder=tuned().LENGTH_ENCODER, layers=layers, tuned=samples, read=2 * samples)


def _predecessor(kind: str) -> LengthVersion | None:
    """Return the version that a new one of *kind* follows: the newest that is not rejected."""
    return LengthVersion.objects.filter(kind=kind).exclude(state=VersionState.REJECTED).order_by("-number").first()


def _student(samples: list[Sample]) -> tuple[Student, LengthVersion, list[Sample]]:
    """Return the student that training continues from, its version, and those of *samples* that it can read.

    The active one; or the bundled one if that is no student, cannot be loaded, or has the vocabulary of an older release.
    """
    active = in_use()
    if active.kind == STUDENT:
        model = _loaded(active)
        readable = [sample for sample in samples if isinstance(model, Student) and model.can_read(sample.query)]
        if isinstance(model, Student) and len(readable) >= len(samples) / 2:
            return model, active, readable
    student = load(BUNDLED.kind, BUNDLED.path)
    assert isinstance(student, Student)
    return student, BUNDLED, [sample for sample in samples if student.can_read(sample.query)]


def _loaded(version: LengthVersion) -> LengthModel | None:
    try:
        return load(version.kind, version.path)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("lengths: %s cannot be read: %s", version, error)
        return None


def _least() -> int:
    enough: int = tuned().LENGTH_TRAIN_SAMPLES
    return max(HELD_OUT, enough)


def _too_few(kind: str, count: int, file: Path | None) -> str:
    where = f"{file} has" if file else "There are"
    said = (
        f"{where} {count} samples {'' if kind in TEXTLESS else 'with text '}to learn from; a training needs {_least()} "
    )
    said += "(PILOTHOUSE_LENGTH_TRAIN_SAMPLES)."
    if kind not in TEXTLESS and file is None:
        said += (
            f" {kind} reads prompts, and only those of tenants that keep prompts are stored: ask tenants, or give a file"
            " (manage.py train_lengths --file)."
        )
    return said


def _held_out(sample: Sample) -> bool:
    """Return whether the prompt of *sample* is held out. Equal prompts are recognised by text, features, or sizes."""
    query = sample.query
    sizes = f"{query.prompt_tokens} {sample.output_tokens}"
    key = query.text.encode(errors="replace") or query.features or sizes.encode()
    return zlib.crc32(key) % HELD_OUT == 0


def _measured(model: LengthModel, held_out: Sequence[Sample]) -> dict[str, float]:
    predicted = model.predict([sample.query for sample in held_out]).tokens
    measures = score([sample.output_tokens for sample in held_out], predicted)
    return {name: round(value, 4) for name, value in measures.items()}


def _mae(version: LengthVersion, held_out: Sequence[Sample]) -> float | None:
    """Return the mean absolute error of *version*; None if it cannot be loaded, or needs text that is missing."""
    model = _loaded(version)
    if isinstance(model, Student):
        held_out = [sample for sample in held_out if model.can_read(sample.query)]
    elif version.kind not in TEXTLESS:
        held_out = [sample for sample in held_out if sample.query.text]
    return _measured(model, held_out)["mae"] if model is not None and held_out else None


# Rows of trainings


def ask(actor: User, reason: str = "", kind: str = STUDENT) -> LengthTraining:
    """Have a worker train a version of *kind*. Raises ActionError for too few samples, or while another one trains."""
    check_samples(kind)
    if LengthTraining.objects.filter(kind=kind, state__in=OPEN).exists():
        raise ActionError(f"A training of {kind} waits or runs already; the Lengths page shows its progress.")
    row = queue(kind, actor.get_username(), reason)
    record("length_version.training_asked", actor=actor, reason=reason, inputs={"kind": kind})
    if not send_task(TASK, row.pk, expires_s=WAITS_S):
        reason = "No worker could be asked to train: Celery's broker does not answer. Try again later."
        _end(row, TrainingState.FAILED, error=reason)
        raise ActionError(reason)
    return row


def queue(kind: str, actor: str, reason: str) -> LengthTraining:
    """Return a new row of a pending training."""
    row = LengthTraining.objects.create(kind=kind, asked_by=actor, reason=reason[:255])
    old = LengthTraining.objects.exclude(state__in=OPEN).values_list("pk", flat=True)[MOST_KEPT:]
    LengthTraining.objects.filter(pk__in=list(old)).delete()
    return row


def run(row: LengthTraining, file: Path | None = None, fitting: Fitting | None = None) -> LengthTraining:
    """Train as *row* requests, if it is still pending, and report progress in it. Raises as `train` does."""
    now = timezone.now()
    values = {"state": TrainingState.RUNNING, "started_at": now, "seen_at": now, "step": "samples are read"}
    if not LengthTraining.objects.filter(pk=row.pk, state=TrainingState.QUEUED).update(**values):
        row.refresh_from_db()
        return row
    fitting = fitting or usual_fitting()
    fitting = replace(fitting, progress=_report(row, fitting.progress))
    try:
        version = train(timezone.now(), row.asked_by or ACTOR, row.reason, row.kind, file, fitting)
    except BaseException as error:
        said = str(error) if isinstance(error, ActionError | ValueError) else describe(error)
        _end(row, TrainingState.FAILED, error=said)
        raise
    _end(row, TrainingState.DONE, version=version)
    return row


def run_requested(pk: int) -> int:
    """Run the requested training *pk*; return the number of its version, or 0, with an event, if it failed."""
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
    """Train every kind that is due, until a requested training is pending; return the last number, 0 without any.

    Raises the first failure.
    """
    numbers = [0]
    for kind in due(now):
        if has_requested():
            break
        row = run(queue(kind, "", "it is due"))
        numbers.append(row.version.number if row.version else 0)
    return numbers[-1]


def note_waiting(pk: int) -> None:
    """Record that a worker has seen the training *pk*, and left it pending for other long work."""
    LengthTraining.objects.filter(pk=pk, state=TrainingState.QUEUED).update(seen_at=timezone.now())


def end_lost(now: datetime) -> int:
    """Fail trainings not started in time or whose worker is gone, and resend unseen ones; return how many failed."""
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


def has_requested() -> bool:
    """Return whether a requested training is pending."""
    return LengthTraining.objects.filter(state=TrainingState.QUEUED).exclude(asked_by="").exists()


def ready() -> list[tuple[str, int, int]]:
    """Return, for each kind, the number of samples that it can learn from now, and the number that it needs."""
    with_text, textless = (rows_for(next(iter(kinds))).count() for kinds in (MODELS.keys() - TEXTLESS, TEXTLESS))
    return [(kind, textless if kind in TEXTLESS else with_text, tuned().LENGTH_TRAIN_SAMPLES) for kind in MODELS]


def _report(row: LengthTraining, also: Callable[[str, int, int], None] | None) -> Callable[[str, int, int], None]:
    """Return a callback that writes progress into *row*, once a second at most, and passes it to *also*."""
    written_s = 0.0

    def report(what: str, done: int, steps: int) -> None:
        nonlocal written_s
        if also is not None:
            also(what, done, steps)
        if time.monotonic() - written_s < REPORT_S:
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
