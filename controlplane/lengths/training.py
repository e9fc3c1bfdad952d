"""Training of length models of every kind, from the samples of finished requests or from an operator's file.

A student learns from the features that every sample has. Other kinds read text, which a sample has only if its tenant keeps
prompts; those that read none (`TEXTLESS`) learn from all. A fifth of the prompts is held out. Estimate is a version,
in the shadow or, if it is worse on them than the version that it would follow, rejected.
"""

import logging
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db.models import QuerySet

from controlplane.accounts.models import User
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.lengths.files import read_samples
from controlplane.lengths.models import LengthSample, LengthVersion, VersionState
from controlplane.lengths.services import ACTOR, InUse, add, in_use, used
from controlplane.tuning.selectors import tuned
from forecasting.lengths import MODELS, ON_ENCODER, LengthModel, LengthQuery, Sample, Student, bundled, rests, score
from forecasting.lengths.models.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.models.ours import Ours
from forecasting.lengths.models.proxy import Effort, Proxy
from forecasting.lengths.query import Conversation
from forecasting.lengths.service.subprocess_server import load
from forecasting.lengths.text.encoder import MOST_TOKENS, Progress, torch_threads

logger = logging.getLogger(__name__)

STUDENT: Final = Student.name
TEXTLESS: Final = frozenset({STUDENT, ClassMean.name, TenantHistogram.name, PromptBuckets.name})
"""Kinds that learn from samples without text."""
HELD_OUT: Final = 5
"""Every fifth prompt is held out of training; equal prompts are on the same side."""
MOST_TRAINED: Final = 50_000
MOST_JUDGED: Final = 500
"""Held-out samples, the newest, by which kinds other than the student are judged: an encoder reads some dozens a second."""
EFFORT: Final = Effort(most_tokens=MOST_TOKENS)
"""Of a conversation the last 512 tokens by the encoder's own tokenizer are read (SSJF, section 3.1)."""


@dataclass(frozen=True, slots=True)
class How:
    """What is trained, on what, and how thoroughly."""

    kind: str = STUDENT
    file: Path | None = None
    """Samples in the place of the stored ones; None: those."""
    effort: Effort | None = None
    """Of models on an encoder; None: as `effort` has it."""
    progress: Progress | None = None


def train(now: datetime, actor: User | str = ACTOR, reason: str = "", how: How | None = None) -> LengthVersion:
    """Train a version as *how* says, store it and put it into the shadow, or reject it at once.

    Raises ActionError for a kind that rests and when there are too few samples, saying of which sort, EncoderMissing without
    the encoder, and ValueError for a file that cannot be read.
    """
    how = how or How()
    _check_kind(how.kind)
    if how.kind == STUDENT and how.file is None:
        return _train_student(now, actor, reason)
    samples = read_samples(how.file) if how.file else stored(how.kind)
    if len(samples) < _least():
        raise ActionError(_too_few(how.kind, len(samples), how.file))
    held_out = [sample for sample in samples if _held_out(_key(sample))][-MOST_JUDGED:]
    learnt = [sample for sample in samples if not _held_out(_key(sample))]
    if not held_out or not learnt:
        raise ActionError("The samples are all of one prompt: there is nothing to learn from them.")
    active, before = in_use(), incumbent(how.kind)
    on_encoder = not ON_ENCODER.isdisjoint({how.kind, active.kind})
    model = new_model(how)
    with torch_threads(settings.LENGTH_TORCH_THREADS) if on_encoder else nullcontext():
        model.fit(learnt)
        measures: dict[str, Any] = measured(model, held_out)
        measures |= {"held_out": len(held_out), "active": active.name, "active_mae": _mae(active, held_out)}
        mae_before = None if before is None else _mae(before, held_out)
    worse = ""
    if before is not None and mae_before is not None and measures["mae"] > mae_before:
        worse = _worse(len(held_out), measures["mae"], before.name, mae_before)
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
    """Kinds that it is time to train again and that there is enough to learn for: the student, and what models name."""
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


def new_model(how: How) -> LengthModel:
    """A model to be fitted; a student goes on from the active one. Raises EncoderMissing without its encoder."""
    made: Any = MODELS[how.kind]
    if issubclass(made, Proxy):
        model: LengthModel = made(tuned().LENGTH_ENCODER, how.effort or effort(), progress=how.progress)
    elif issubclass(made, Ours):
        model = made(tuned().LENGTH_ENCODER, progress=how.progress)
    elif issubclass(made, Student):
        model = _begin(in_use())
    else:
        model = made()
    return model


def effort() -> Effort:
    """What training a model on an encoder may cost where nothing else is said."""
    samples = tuned().LENGTH_ENCODER_SAMPLES
    return replace(EFFORT, layers=tuned().LENGTH_ENCODER_LAYERS, tuned=samples, read=2 * samples)


def incumbent(kind: str) -> InUse | None:
    """The version that a new one of *kind* would follow: the newest that is not rejected."""
    row = LengthVersion.objects.filter(kind=kind).exclude(state=VersionState.REJECTED).order_by("-number").first()
    return None if row is None else used(row)


# Samples


def rows_for(kind: str) -> QuerySet[LengthSample]:
    """Samples that a model of *kind* can learn from, the newest first."""
    rows = LengthSample.objects.select_related("tenant").order_by("-pk")
    return rows if kind in TEXTLESS else rows.filter(tenant__keep_prompts=True).exclude(text="")


def stored(kind: str) -> list[Sample]:
    """Samples for *kind*, oldest first, less those that `max_tokens` cut."""
    rows = [row for row in rows_for(kind)[:MOST_TRAINED] if _whole(row)]
    return [Sample(query_of(row), row.output_tokens) for row in reversed(rows)]


def query_of(row: LengthSample) -> LengthQuery:
    return LengthQuery(
        text=row.text,
        prompt_tokens=row.prompt_tokens,
        model=row.model,
        tenant=row.tenant.name,
        slo_class=row.slo_class,
        max_tokens=row.max_tokens,
        turns=row.turns,
        conversation=Conversation(*row.conversation) if row.conversation else None,
        tools=row.tools,
    )


def _whole(row: LengthSample) -> bool:
    return row.max_tokens is None or row.output_tokens < row.max_tokens


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


def _held_out(key: bytes) -> bool:
    return zlib.crc32(key) % HELD_OUT == 0


def _key(sample: Sample) -> bytes:
    """What two samples are the same by: their text, or their sizes."""
    query = sample.query
    return (query.text or f"{query.prompt_tokens} {sample.output_tokens}").encode(errors="replace")


def measured(model: LengthModel, held_out: Sequence[Sample]) -> dict[str, float]:
    predicted = model.predict([sample.query for sample in held_out]).tokens
    return _rounded(score([sample.output_tokens for sample in held_out], predicted))


def _mae(version: InUse, held_out: Sequence[Sample]) -> float | None:
    """Mean absolute error of *version* on *held_out*; None where it cannot be loaded, or needs text that is not there."""
    if version.kind not in TEXTLESS or version.kind == STUDENT:
        held_out = [sample for sample in held_out if sample.query.text]
    if not held_out:
        return None
    try:
        return measured(load(version.kind, version.file), held_out)["mae"]
    except (OSError, ValueError, KeyError) as error:
        logger.warning("lengths: %s cannot be compared with: %s", version.name, error)
        return None


def _rounded(measures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in measures.items()}


def _worse(held_out: int, mae: float, other: str, mae_of_other: float) -> str:
    return (
        f"worse on {held_out:,} held-out samples: mean absolute error of {mae:.1f} tokens, {other} {mae_of_other:.1f}"
    )


# The student, from features


def _train_student(now: datetime, actor: User | str, reason: str) -> LengthVersion:
    """It goes on from the active student, and is rejected where it is worse than that."""
    rows = [row for row in rows_for(STUDENT)[:MOST_TRAINED] if _whole(row)]
    active = in_use()
    student = _begin(active)
    readable = _readable(student, rows)
    if len(readable) < len(rows) / 2:  # of a version whose vocabulary went with an older release
        student = bundled()
        readable = _readable(student, rows)
    if len(readable) < _least():
        raise ActionError(_too_few(STUDENT, len(readable), None))
    held_out = [row for row in readable if _held_out(bytes(row.features))]
    learnt = [row for row in readable if not _held_out(bytes(row.features))]
    if not held_out or not learnt:
        raise ActionError("The samples are all of one prompt: there is nothing to learn from them.")
    before = _score(student, held_out)
    student.fit_features([(bytes(row.features), Sample(query_of(row), row.output_tokens)) for row in reversed(learnt)])
    measures: dict[str, Any] = _score(student, held_out)
    measures |= {"held_out": len(held_out), "active": active.name, "active_mae": before["mae"]}
    worse = "" if measures["mae"] <= before["mae"] else _worse(
        len(held_out), measures["mae"], measures["active"], before["mae"]
    )  # fmt: skip
    return add(student, now, len(learnt), measures, actor, reason, worse)


def _begin(active: InUse) -> Student:
    """The student that training goes on from: the active one, or the bundled one where that cannot be."""
    if active.kind != STUDENT:
        return bundled()
    try:
        model = load(active.kind, active.file)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("lengths: %s cannot be read, training goes on from the bundled student: %s", active.name, error)
        return bundled()
    return model if isinstance(model, Student) else bundled()


def _readable(student: Student, rows: Sequence[LengthSample]) -> list[LengthSample]:
    """Those of *rows* whose features were made by the vocabulary of *student*."""
    readable = []
    for row in rows:
        try:
            student.from_features([bytes(row.features)], [query_of(row)])
        except ValueError:
            continue
        readable.append(row)
    return readable


def _score(student: Student, rows: Sequence[LengthSample]) -> dict[str, float]:
    predicted = student.from_features([bytes(row.features) for row in rows], list(map(query_of, rows)))
    return _rounded(score([row.output_tokens for row in rows], predicted.tokens))
