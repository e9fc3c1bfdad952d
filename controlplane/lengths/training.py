"""Training of length models: their samples, the training itself, and requests for it.

Models that read no text (`TEXTLESS`, the trees among them) learn from every sample; the others need text, which a
sample has only if its tenant keeps prompts. A fifth of the prompts is held out. The result is a version in shadow, or a
rejected one if it does worse than its predecessor on them.
"""

import logging
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.broker import send_task
from controlplane.jobs.record import describe
from controlplane.lengths.models import BUNDLED, LengthSample, LengthVersion, VersionState
from controlplane.lengths.notes import reader
from controlplane.lengths.services import ACTOR, add, in_use
from controlplane.tuning.selectors import tuned
from forecasting.lengths import (
    MODELS,
    ON_ENCODER,
    TEXTLESS,
    Fitting,
    LengthModel,
    Sample,
    Trees,
    score,
    unavailable_reason,
)
from forecasting.lengths.encoder import MOST_TOKENS, torch_threads
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

USUAL: Final = Trees.name
"""The kind that is trained by schedule."""
MOST_TRAINED: Final = 50_000
HELD_OUT: Final = 5
"""Every fifth prompt is held out of training; equal prompts are on the same side."""
MOST_JUDGED: Final = 500
"""Newest held-out samples by which encoders are judged: they read some dozens a second."""
FITTING: Final = Fitting(most_tokens=MOST_TOKENS, layers=2)
"""Of a conversation the last 512 tokens by the encoder's own tokenizer are read (SSJF, section 3.1), by its first two
layers: as exact as all of them, in half the time (docs/papers/length-models.md)."""

TASK: Final = "workers.tasks.lengths.train_length_model"
LIMIT_S: Final = 3000
"""Time limit of one training in a worker."""
WAITS_S: Final = 3600
"""Timeout of a requested training that no worker starts."""
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


# The training


def train(
    now: datetime,
    actor: User | str = ACTOR,
    reason: str = "",
    kind: str = USUAL,
) -> LengthVersion:
    """Train a version of *kind* on the stored samples; store it, in the shadow or rejected.

    Raises ActionError for a kind that rests and for too few samples, naming the needed sort, and EncoderMissing without
    the encoder.
    """
    _check_kind(kind)
    samples, predecessor = stored(kind), _predecessor(kind)
    fitting = replace(FITTING, encoder=tuned().LENGTH_ENCODER)
    if kind == USUAL:
        bundled = reader()
        model: LengthModel = Trees(fitting, bundled.text)
        samples = [sample for sample in samples if bundled.can_read(sample.query)]
    else:
        model = MODELS[kind](fitting)
    if len(samples) < _least():
        raise ActionError(_too_few(kind, len(samples)))
    held_out = [sample for sample in samples if _held_out(sample)]
    learnt = [sample for sample in samples if not _held_out(sample)]
    if not held_out or not learnt:
        raise ActionError("The samples are all of one prompt: there is nothing to learn from them.")
    active = in_use()
    on_encoder = not ON_ENCODER.isdisjoint({kind, active.kind})
    if on_encoder:
        held_out = held_out[-MOST_JUDGED:]
    with torch_threads(1) if on_encoder else nullcontext():
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
        raise ActionError(_too_few(kind, count))


def _check_kind(kind: str) -> None:
    if kind not in MODELS:
        raise ActionError(f"There is no length model {kind!r}; there are: {', '.join(MODELS)}.")
    if reason := unavailable_reason(kind):
        raise ActionError(reason)


def is_due(now: datetime) -> bool:
    """Return whether the usual kind is due for training and has enough samples."""
    every_s = tuned().LENGTH_TRAIN_EVERY_S
    newest = LengthVersion.objects.filter(kind=USUAL).order_by("-number").first()
    if not every_s or (newest is not None and (now - newest.trained_at).total_seconds() < 0.9 * every_s):
        return False
    return rows_for(USUAL).count() >= tuned().LENGTH_TRAIN_SAMPLES


def _predecessor(kind: str) -> LengthVersion | None:
    """Return the version that a new one of *kind* follows: the newest that is not rejected, or the bundled one."""
    row = LengthVersion.objects.filter(kind=kind).exclude(state=VersionState.REJECTED).order_by("-number").first()
    return row or (BUNDLED if kind == BUNDLED.kind else None)


def _loaded(version: LengthVersion) -> LengthModel | None:
    try:
        return load(version.kind, version.path)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("lengths: %s cannot be read: %s", version, error)
        return None


def _least() -> int:
    enough: int = tuned().LENGTH_TRAIN_SAMPLES
    return max(HELD_OUT, enough)


def _too_few(kind: str, count: int) -> str:
    text = "" if kind in TEXTLESS else "with text "
    reason = (
        f"There are {count} samples {text}to learn from; a training needs {_least()} (PILOTHOUSE_LENGTH_TRAIN_SAMPLES)."
    )
    if text:
        reason += f" {kind} reads prompts, and only those of tenants that keep prompts are stored: ask tenants."
    return reason


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
    if isinstance(model, Trees):
        held_out = [sample for sample in held_out if model.can_read(sample.query)]
    elif version.kind not in TEXTLESS:
        held_out = [sample for sample in held_out if sample.query.text]
    return _measured(model, held_out)["mae"] if model is not None and held_out else None


# Trainings by a worker


def ask(actor: User, reason: str = "", kind: str = USUAL) -> None:
    """Have a worker train a version of *kind*. Raises ActionError for too few samples, and without a broker."""
    check_samples(kind)
    if not send_task(TASK, kind, actor.get_username(), reason, expires_s=WAITS_S):
        raise ActionError("No worker could be asked to train: Celery's broker does not answer. Try again later.")
    record("length_version.training_asked", actor=actor, reason=reason, inputs={"kind": kind})


def run_requested(kind: str, actor: str, reason: str) -> int:
    """Train a version of *kind* and return its number; 0, with an event that says why, if that failed."""
    try:
        return train(timezone.now(), actor, reason, kind).number
    except BaseException as error:
        why = str(error) if isinstance(error, ActionError | ValueError) else describe(error)
        inputs = {"kind": kind}
        record("length_version.training_failed", actor=actor, reason=why, inputs=inputs, severity=Severity.WARNING)
        if not isinstance(error, Exception):
            raise
        logger.warning("lengths: no version was trained", exc_info=not isinstance(error, ActionError))
        return 0


def run_due(now: datetime) -> int:
    """Train the usual kind if it is due; return the version's number, 0 without any."""
    return train(now, reason="it is due").number if is_due(now) else 0


def ready() -> list[tuple[str, int, int]]:
    """Return, for each kind, the number of samples that it can learn from now, and the number that it needs."""
    with_text, textless = (rows_for(next(iter(kinds))).count() for kinds in (MODELS.keys() - TEXTLESS, TEXTLESS))
    return [(kind, textless if kind in TEXTLESS else with_text, tuned().LENGTH_TRAIN_SAMPLES) for kind in MODELS]
