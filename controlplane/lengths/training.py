"""Training of length models of every kind, from the samples of finished requests or from an operator's file.

A student, and other kinds that read no text (`TEXTLESS`), learn from every sample. The others need text, which a sample has
only if its tenant keeps prompts. A fifth of the prompts is held out. The result is a version, in the shadow or, if it is
worse on them than its predecessor, rejected.
"""

import logging
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from django.conf import settings

from controlplane.accounts.models import User
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.lengths.models import BUNDLED, LengthVersion, VersionState
from controlplane.lengths.samples import read_samples, rows_for, stored
from controlplane.lengths.services import ACTOR, add, in_use
from controlplane.tuning.selectors import tuned
from forecasting.lengths import MODELS, ON_ENCODER, TEXTLESS, Fitting, LengthModel, Sample, Student, rests, score
from forecasting.lengths.encoder import MOST_TOKENS, torch_threads
from forecasting.lengths.subprocess_server import load

logger = logging.getLogger(__name__)

STUDENT: Final = Student.name
HELD_OUT: Final = 5
"""Every fifth prompt is held out of training; equal prompts are on the same side."""
MOST_JUDGED: Final = 500
"""Held-out samples, the newest, by which encoders are judged: they read some dozens a second."""
FITTING: Final = Fitting(most_tokens=MOST_TOKENS)
"""Of a conversation the last 512 tokens by the encoder's own tokenizer are read (SSJF, section 3.1)."""


def train(
    now: datetime,
    actor: User | str = ACTOR,
    reason: str = "",
    kind: str = STUDENT,
    file: Path | None = None,
    fitting: Fitting | None = None,
) -> LengthVersion:
    """Train a version of *kind* on the stored samples, or those in *file*; store it, in the shadow or rejected.

    Raises ActionError for a kind that rests and when there are too few samples, naming the sort that is wanted,
    EncoderMissing without the encoder, and ValueError for a file that cannot be read.
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
    """Raise ActionError where there is no such kind, it rests, or there are too few samples that it can learn from."""
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
    """Kinds that are due to be trained again and have enough samples: the student, and those that models name."""
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
    """The fitting by the settings."""
    samples, layers = tuned().LENGTH_ENCODER_SAMPLES, tuned().LENGTH_ENCODER_LAYERS
    return replace(FITTING, encoder=tuned().LENGTH_ENCODER, layers=layers, tuned=samples, read=2 * samples)


# Predecessors


def _predecessor(kind: str) -> LengthVersion | None:
    """The version that a new one of *kind* follows: the newest that is not rejected."""
    return LengthVersion.objects.filter(kind=kind).exclude(state=VersionState.REJECTED).order_by("-number").first()


def _student(samples: list[Sample]) -> tuple[Student, LengthVersion, list[Sample]]:
    """The student that training continues from, its version, and those of *samples* that it can read.

    The active one, or the bundled one where that is no student, cannot be loaded, or has the vocabulary of an older release.
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


# Samples


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
    """Two samples are of the same prompt by their text, their features, or their sizes."""
    query = sample.query
    sizes = f"{query.prompt_tokens} {sample.output_tokens}"
    key = query.text.encode(errors="replace") or query.features or sizes.encode()
    return zlib.crc32(key) % HELD_OUT == 0


def _measured(model: LengthModel, held_out: Sequence[Sample]) -> dict[str, float]:
    predicted = model.predict([sample.query for sample in held_out]).tokens
    measures = score([sample.output_tokens for sample in held_out], predicted)
    return {name: round(value, 4) for name, value in measures.items()}


def _mae(version: LengthVersion, held_out: Sequence[Sample]) -> float | None:
    """Mean absolute error of *version* on *held_out*; None where it cannot be loaded, or needs text that is not there."""
    model = _loaded(version)
    if isinstance(model, Student):
        held_out = [sample for sample in held_out if model.can_read(sample.query)]
    elif version.kind not in TEXTLESS:
        held_out = [sample for sample in held_out if sample.query.text]
    return _measured(model, held_out)["mae"] if model is not None and held_out else None
