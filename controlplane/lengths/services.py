"""Writes of output lengths: versions of the length model, from training to promotion, rejection and rollback.

One version is active, or none: then the student that comes with the package answers, which is called `student 0`. A version
is trained into the shadow, predicts beside the active one and is judged on what they both said; every move is an event.
"""

import logging
import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from controlplane.accounts.models import Tenant, User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.broker import send_task
from controlplane.lengths import selectors
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion, VersionState
from controlplane.tuning.selectors import tuned
from forecasting.lengths import LengthQuery, Sample, Student, bundled, score
from forecasting.lengths.service.subprocess_server import load

logger = logging.getLogger(__name__)

ACTOR = "length service"
TRAIN_TASK = "workers.tasks.lengths.train_length_model"
KIND = Student.name
HELD_OUT = 5
"""Every fifth prompt is held out of training; equal prompts are on the same side."""
MOST_TRAINED = 50_000
JUDGED_OVER = timedelta(days=7)


class InUse(NamedTuple):
    """A version as a gateway takes it up. `file` is a whole path, empty for the bundled student."""

    number: int
    kind: str
    file: str

    @property
    def name(self) -> str:
        """As `LengthMinute.predictor` has it."""
        return f"{self.kind} {self.number}"


BUNDLED = InUse(0, KIND, "")


def in_use() -> tuple[InUse, InUse | None]:
    """The active version and its shadow, if there is one."""
    rows = LengthVersion.objects.filter(state__in=[VersionState.ACTIVE, VersionState.SHADOW]).order_by("-number")
    by_state = {row.state: row for row in reversed(rows)}
    active, shadow = by_state.get(VersionState.ACTIVE), by_state.get(VersionState.SHADOW)
    return used(active) if active else BUNDLED, used(shadow) if shadow else None


def used(version: LengthVersion) -> InUse:
    return InUse(version.number, version.kind, str(path_of(version)) if version.file else "")


def folder() -> Path:
    return Path(settings.STATE_DIR) / "lengths"


def path_of(version: LengthVersion) -> Path:
    """Where the file of *version* lies. Raises ValueError for a name that leads out of the folder of length models."""
    path = (Path(settings.STATE_DIR) / version.file).resolve()
    if not path.is_relative_to(folder().resolve()):
        raise ValueError(f"The file of version {version.number} is not in {folder()}.")
    return path


# Training


def train(now: datetime, actor: User | str = ACTOR, reason: str = "") -> LengthVersion:
    """Train a version from the newest samples, store it and put it into the shadow, in the place of one that was there.

    It goes on from the active version. Raises ActionError when there are too few samples. One that is worse than the active
    version on the samples held out of its training is stored too, but rejected at once.
    """
    rows = list(LengthSample.objects.select_related("tenant").order_by("-pk")[:MOST_TRAINED])
    rows = [row for row in rows if row.max_tokens is None or row.output_tokens < row.max_tokens]
    active, _ = in_use()
    student = _begin(active)
    readable = _readable(student, rows)
    if len(readable) < len(rows) / 2:  # of a version whose vocabulary went with an older release
        student = bundled()
        readable = _readable(student, rows)
    if len(readable) < max(HELD_OUT, tuned().LENGTH_TRAIN_SAMPLES):
        raise ActionError(
            f"There are {len(readable)} samples to learn from; a training needs {tuned().LENGTH_TRAIN_SAMPLES} "
            "(LENGTH_TRAIN_SAMPLES)."
        )
    held_out = [row for row in readable if _held_out(row)]
    learnt = [row for row in readable if not _held_out(row)]
    if not held_out or not learnt:
        raise ActionError("The samples are all of one prompt: there is nothing to learn from them.")
    before = _score(student, held_out)
    student.fit_features([(bytes(row.features), _sample(row)) for row in reversed(learnt)])
    measures: dict[str, Any] = _score(student, held_out)
    measures |= {"held_out": len(held_out), "active": active.name, "active_mae": before["mae"]}
    with transaction.atomic():
        number = (LengthVersion.objects.aggregate(most=Max("number"))["most"] or 0) + 1
        folder().mkdir(parents=True, exist_ok=True)
        path = folder() / f"{KIND}-{number}.npz"
        student.save(path)
        if measures["mae"] <= before["mae"]:
            for other in LengthVersion.objects.filter(state=VersionState.SHADOW):
                _move(other, VersionState.REJECTED, ACTOR, f"version {number} takes its place in the shadow")
        version = LengthVersion.objects.create(
            number=number,
            kind=KIND,
            file=str(path.relative_to(settings.STATE_DIR)),
            trained_at=now,
            samples=len(learnt),
            measures=measures,
            note=reason[:255],
        )
        record(
            "length_version.trained",
            version,
            actor=actor,
            after={"state": version.state, "samples": len(learnt), "measures": measures},
            reason=reason or "the newest samples",
        )
        if measures["mae"] > before["mae"]:
            said = (
                f"worse on {len(held_out):,} held-out samples: mean absolute error of {measures['mae']:.1f} tokens, "
                f"{measures['active']} {before['mae']:.1f}"
            )
            _move(version, VersionState.REJECTED, ACTOR, said)
    return version


def ask_for_training(actor: User, reason: str = "") -> bool:
    """Have a worker train now; False if the broker does not answer. Raises ActionError when there are too few samples."""
    count = LengthSample.objects.count()
    if count < tuned().LENGTH_TRAIN_SAMPLES:
        raise ActionError(f"There are {count} samples to learn from; a training needs {tuned().LENGTH_TRAIN_SAMPLES}.")
    record("length_version.training_asked", actor=actor, reason=reason)
    return send_task(TRAIN_TASK, actor.get_username(), reason, expires_s=3600)


def _begin(active: InUse) -> Student:
    """The student that training goes on from: the active one, or the bundled one where that cannot be."""
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
            student.from_features([bytes(row.features)], [_query(row)])
        except ValueError:
            continue
        readable.append(row)
    return readable


def _held_out(row: LengthSample) -> bool:
    return zlib.crc32(bytes(row.features)) % HELD_OUT == 0


def _query(row: LengthSample) -> LengthQuery:
    return LengthQuery(
        text="",
        prompt_tokens=row.prompt_tokens,
        model=row.model,
        tenant=row.tenant.name,
        slo_class=row.slo_class,
        max_tokens=row.max_tokens,
        turns=row.turns,
    )


def _sample(row: LengthSample) -> Sample:
    return Sample(_query(row), row.output_tokens)


def _score(student: Student, rows: Sequence[LengthSample]) -> dict[str, float]:
    predicted = student.from_features([bytes(row.features) for row in rows], list(map(_query, rows)))
    return {
        name: round(value, 4) for name, value in score([row.output_tokens for row in rows], predicted.tokens).items()
    }


# Moves


@transaction.atomic
def promote(version: LengthVersion, actor: User | str, reason: str = "") -> LengthVersion:
    """Make *version* the active one; gateways take it up within seconds. Raises ActionError unless it is a shadow."""
    row = _locked(version)
    if row.state != VersionState.SHADOW:
        raise ActionError(f"Version {row.number} is {row.state}; only a shadow can be promoted.")
    _check_file(row)
    for active in LengthVersion.objects.filter(state=VersionState.ACTIVE):
        _move(active, VersionState.RETIRED, actor, f"version {row.number} was promoted")
    _move(row, VersionState.ACTIVE, actor, reason, "promoted")
    return _shown(version, row)


@transaction.atomic
def reject(version: LengthVersion, actor: User | str, reason: str = "") -> LengthVersion:
    """Reject a shadow, which then predicts no more. Raises ActionError unless it is one."""
    row = _locked(version)
    if row.state != VersionState.SHADOW:
        raise ActionError(f"Version {row.number} is {row.state}; only a shadow can be rejected.")
    _move(row, VersionState.REJECTED, actor, reason)
    return _shown(version, row)


@transaction.atomic
def rollback(version: LengthVersion | None, actor: User | str, reason: str = "") -> LengthVersion | None:
    """Reject the active version and go back to *version*, a retired one, or to the one that was retired last.

    Without any, the bundled student answers again and None is returned. Raises ActionError when there is nothing to go back
    from, *version* is not retired, or its file is gone.
    """
    active = LengthVersion.objects.select_for_update().filter(state=VersionState.ACTIVE).first()
    if active is None:
        raise ActionError("No trained version is active: there is nothing to go back from.")
    retired = LengthVersion.objects.select_for_update().filter(state=VersionState.RETIRED)
    if version is not None:
        back = retired.filter(pk=version.pk).first()
        if back is None:
            raise ActionError(
                f"Version {version.number} is {version.state}; one can go back only to a retired version."
            )
    else:
        back = retired.order_by("-changed_at", "-number").first()
    if back is not None:
        _check_file(back)
    target = f"version {back.number}" if back else "the bundled student"
    _move(active, VersionState.REJECTED, actor, reason or f"rolled back to {target}", "rolled_back", Severity.WARNING)
    if back is not None:
        _move(back, VersionState.ACTIVE, actor, reason or f"rolled back from version {active.number}", "restored")
        if version is not None:
            _shown(version, back)
    return back


def judge(now: datetime) -> LengthVersion | None:
    """Promote the shadow if it proved better than the active version, reject it if it did not; None while neither is known.

    It is judged by `LengthMinute`, over the minutes in which both predicted, once there are
    `PILOTHOUSE_LENGTH_PROMOTE_REQUESTS` requests of it.
    """
    shadow = selectors.shadow_version()
    if shadow is None or not tuned().LENGTH_PROMOTE:
        return None
    active, _ = in_use()
    since = max(shadow.trained_at, now - JUDGED_OVER)
    duel = selectors.duel(active.name, f"{selectors.SHADOW} {shadow}", selectors.Scope(since))
    if duel is None or duel.gain is None or duel.shadow.requests < tuned().LENGTH_PROMOTE_REQUESTS:
        return None
    least = tuned().LENGTH_PROMOTE_GAIN
    said = (
        f"mean absolute error of {duel.shadow.mae:.1f} tokens over {duel.shadow.requests:,} requests, "
        f"{active.name} {duel.active.mae:.1f} over {duel.active.requests:,}: "
        f"{100 * abs(duel.gain):.1f} % {'better' if duel.gain >= 0 else 'worse'}"
    )
    if duel.gain >= least:
        return promote(shadow, ACTOR, f"{said}, at least {100 * least:g} % is wanted")
    if duel.gain >= 0:
        said = f"{said}, less than the {100 * least:g} % wanted (PILOTHOUSE_LENGTH_PROMOTE_GAIN)"
    return reject(shadow, ACTOR, said)


def prune(now: datetime) -> int:
    """Delete samples and measures that have had their time, and texts that their tenants want kept no more; how many."""
    gone, _ = LengthSample.objects.filter(at__lt=now - timedelta(days=tuned().LENGTH_SAMPLE_DAYS)).delete()
    for model in LengthSample.objects.order_by().values_list("model", flat=True).distinct():
        of_model = LengthSample.objects.filter(model=model).order_by("-pk")
        first_gone = of_model.values_list("pk", flat=True)[tuned().LENGTH_SAMPLES :].first()
        if first_gone is not None:
            gone += of_model.filter(pk__lte=first_gone).delete()[0]
    forgetful = Tenant.objects.filter(keep_prompts=False)
    gone += LengthSample.objects.filter(tenant__in=forgetful).exclude(text="").update(text="")
    oldest = now - timedelta(days=tuned().LENGTH_MEASURE_DAYS)
    return gone + LengthMinute.objects.filter(minute__lt=oldest).delete()[0]


def _locked(version: LengthVersion) -> LengthVersion:
    return LengthVersion.objects.select_for_update().get(pk=version.pk)


def _check_file(row: LengthVersion) -> None:
    try:
        load(row.kind, str(path_of(row)) if row.file else "")
    except (OSError, ValueError, KeyError) as error:
        raise ActionError(f"The file of version {row.number} cannot be used: {error}") from error


def _move(
    row: LengthVersion,
    state: VersionState,
    actor: User | str,
    reason: str,
    verb: str = "",
    severity: Severity = Severity.INFO,
) -> None:
    before = row.state
    row.state, row.note = state, reason[:255] or row.note
    row.save(update_fields=["state", "note", "changed_at"])
    record(
        f"length_version.{verb or state}",
        row,
        actor=actor,
        before={"state": before},
        after={"state": state},
        reason=reason,
        inputs={"measures": row.measures},
        severity=severity,
    )


def _shown(version: LengthVersion, row: LengthVersion) -> LengthVersion:
    """Let the caller's *version* show what is now in the database."""
    version.state, version.note, version.changed_at = row.state, row.note, row.changed_at
    return version


def due(now: datetime) -> bool:
    """Whether it is time to train again and there is enough to learn from."""
    if not tuned().LENGTH_TRAIN_EVERY_S:
        return False
    newest = LengthVersion.objects.order_by("-number").values_list("trained_at", flat=True).first()
    if newest is not None and (now - newest).total_seconds() < 0.9 * tuned().LENGTH_TRAIN_EVERY_S:
        return False
    enough: int = tuned().LENGTH_TRAIN_SAMPLES
    return LengthSample.objects.count() >= enough
