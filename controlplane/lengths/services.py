"""Writes of output lengths: versions of the length model, from their first row to promotion, rejection and rollback.

One version is active, or none: then the student that comes with the package answers, which is called `student 0`. A
version is trained into the shadow, predicts the same requests as the active one, and is judged on those; every move is
an event.
"""

import uuid
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.accounts.models import Tenant, User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.lengths import selectors
from controlplane.lengths.models import BUNDLED, LengthMinute, LengthSample, LengthVersion, VersionState
from controlplane.tuning.selectors import tuned
from forecasting.lengths import ON_ENCODER, LengthModel, rests
from forecasting.lengths.subprocess_server import check

ACTOR = "length service"
JUDGED_OVER = timedelta(days=7)


class Assigned(NamedTuple):
    """The versions that predict: the one in use, those in shadow, and by model those of the kind that it names."""

    active: LengthVersion
    shadows: tuple[LengthVersion, ...]
    of_model: dict[str, LengthVersion]


def in_use() -> LengthVersion:
    """Return the active version; the bundled student if there is none, or it rests."""
    active = selectors.active_version()
    return active if active and not rests(active.kind) else BUNDLED


def assigned() -> Assigned:
    """Return the versions that predict now.

    A model that names a kind is served by the newest version of it that is not rejected, the active one first. If the
    kind has none, or rests, the version in use predicts. A version that models name answers, and is no shadow; one that
    rests does not predict in shadow either.
    """
    active = in_use()
    named = dict(Model.objects.exclude(length_model="").values_list("name", "length_model"))
    newest = {active.kind: active}
    for row in LengthVersion.objects.exclude(state=VersionState.REJECTED).order_by("-number"):
        if not rests(row.kind):
            newest.setdefault(row.kind, row)
    newest.setdefault(BUNDLED.kind, BUNDLED)
    of_model = {model: newest[kind] for model, kind in named.items() if kind in newest}
    answering = set(of_model.values())
    shadows = (row for row in selectors.shadow_versions() if not rests(row.kind) and row not in answering)
    return Assigned(active, tuple(shadows), of_model)


def add(
    model: LengthModel,
    now: datetime,
    samples: int,
    measures: dict[str, Any],
    actor: User | str,
    reason: str,
    worse: str,
) -> LengthVersion:
    """Store *model*, trained on *samples*, and put it into the shadow in place of another of its kind.

    If *worse* says what it is worse than, it is stored and rejected at once.
    """
    folder = LengthVersion.folder()
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{model.name}-{uuid.uuid4().hex}.npz"
    try:
        # Before the transaction: an encoder's weights take seconds, which blocks other writers.
        model.save(written)
        with transaction.atomic():
            number = (LengthVersion.objects.aggregate(most=Max("number"))["most"] or 0) + 1
            path = folder / f"{model.name}-{number}.npz"
            written.rename(path)
            if not worse:
                _make_room(model.name, number)
            version = LengthVersion.objects.create(
                number=number,
                kind=model.name,
                file=str(path.relative_to(settings.STATE_DIR)),
                trained_at=now,
                samples=samples,
                measures=measures,
                note=reason[:255],
            )
            record(
                "length_version.trained",
                version,
                actor=actor,
                after={"state": version.state, "samples": samples, "measures": measures},
                reason=reason or "the newest samples",
            )
            if worse:
                _move(version, VersionState.REJECTED, ACTOR, worse)
        return version
    finally:
        written.unlink(missing_ok=True)


# Moves. Files are read before the transaction, which blocks other writers: those of encoders take a while.


def promote(version: LengthVersion, actor: User | str, reason: str = "") -> LengthVersion:
    """Make *version* the active one; gateways start it within seconds. Raises ActionError unless it is a shadow."""
    obstacle = _obstacle(version)
    with transaction.atomic():
        _lock(version, VersionState.SHADOW, "only a shadow can be promoted")
        _refuse(obstacle)
        for active in LengthVersion.objects.filter(state=VersionState.ACTIVE):
            _move(active, VersionState.RETIRED, actor, f"version {version.number} was promoted")
        _move(version, VersionState.ACTIVE, actor, reason, "promoted")
    return version


@transaction.atomic
def reject(version: LengthVersion, actor: User | str, reason: str = "") -> LengthVersion:
    """Reject a shadow, which then stops predicting. Raises ActionError unless it is one."""
    _lock(version, VersionState.SHADOW, "only a shadow can be rejected")
    _move(version, VersionState.REJECTED, actor, reason)
    return version


def put_in_shadow(version: LengthVersion, actor: User | str, reason: str = "") -> LengthVersion:
    """Let a rejected version predict in shadow again, in place of one of its kind; earlier predictions do not count.

    Raises ActionError unless it was rejected, or where its file is gone.
    """
    obstacle = _obstacle(version)
    with transaction.atomic():
        _lock(version, VersionState.REJECTED, "only a rejected one can be put into the shadow again")
        _refuse(obstacle)
        _make_room(version.kind, version.number)
        version.shadow_since = timezone.now()
        version.save(update_fields=["shadow_since"])
        _move(version, VersionState.SHADOW, actor, reason, "shadow")
    return version


def rollback(version: LengthVersion | None, actor: User | str, reason: str = "") -> LengthVersion | None:
    """Reject the active version and go back to *version*, a retired one, or to the one that was retired last.

    Without any, the bundled student answers again and None is returned. Raises ActionError when there is nothing to go
    back from, *version* is not retired, or its file is gone.
    """
    retired = LengthVersion.objects.filter(state=VersionState.RETIRED)
    back = version or retired.order_by("-changed_at", "-number").first()
    obstacle = _obstacle(back) if back else ""
    with transaction.atomic():
        active = LengthVersion.objects.select_for_update().filter(state=VersionState.ACTIVE).first()
        if active is None:
            raise ActionError("No trained version is active: there is nothing to go back from.")
        if back is not None:
            _lock(back, VersionState.RETIRED, "one can go back only to a retired version")
            _refuse(obstacle)
        why = reason or f"rolled back to {f'version {back.number}' if back else 'the bundled student'}"
        _move(active, VersionState.REJECTED, actor, why, "rolled_back", Severity.WARNING)
        if back is not None:
            _move(back, VersionState.ACTIVE, actor, reason or f"rolled back from version {active.number}", "restored")
    return back


def judge(now: datetime) -> LengthVersion | None:
    """Promote or reject one shadow by its errors against the active version's; return it, None if none can be judged
    yet.

    The errors are those of `LengthMinute` in the minutes in which both predicted, once the shadow has
    `PILOTHOUSE_LENGTH_PROMOTE_REQUESTS` requests.
    """
    if not tuned().LENGTH_PROMOTE:
        return None
    answering = assigned()
    judged = (_judge(shadow, answering.active, now) for shadow in selectors.shadow_versions()
              if shadow in answering.shadows)  # fmt: skip
    return next(filter(None, judged), None)


def _judge(shadow: LengthVersion, active: LengthVersion, now: datetime) -> LengthVersion | None:
    since = max(shadow.shadow_since or shadow.trained_at, now - JUDGED_OVER)
    duel = selectors.duel(str(active), f"{selectors.SHADOW} {shadow}", selectors.Scope(since))
    if duel is None or duel.gain is None or duel.shadow.requests < tuned().LENGTH_PROMOTE_REQUESTS:
        return None
    late, most_late = duel.shadow.late_ratio or 0.0, tuned().LENGTH_PROMOTE_LATE
    if late > most_late:
        budget = "LENGTH_ENCODER_BUDGET_MS" if shadow.kind in ON_ENCODER else "LENGTH_BUDGET_MS"
        return reject(
            shadow,
            ACTOR,
            f"{100 * late:.1f}% of {duel.shadow.requests:,} answers came later than requests wait"
            f" (PILOTHOUSE_{budget}), at most {100 * most_late:g}% may",
        )
    least = tuned().LENGTH_PROMOTE_GAIN
    said = (
        f"mean absolute error of {duel.shadow.mae:.1f} tokens over {duel.shadow.requests:,} requests, "
        f"{active} {duel.active.mae:.1f} over {duel.active.requests:,}: "
        f"{100 * abs(duel.gain):.1f}% {'better' if duel.gain >= 0 else 'worse'}"
    )
    if duel.gain >= least:
        return promote(shadow, ACTOR, f"{said}, at least {100 * least:g}% is wanted")
    if duel.gain >= 0:
        said = f"{said}, less than the {100 * least:g}% wanted (PILOTHOUSE_LENGTH_PROMOTE_GAIN)"
    return reject(shadow, ACTOR, said)


def prune(now: datetime) -> int:
    """Delete expired samples and measures, and texts whose tenants stopped keeping prompts; return how many."""
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


def _make_room(kind: str, number: int) -> None:
    """Reject the shadow of *kind*, for version *number*."""
    for other in LengthVersion.objects.filter(state=VersionState.SHADOW, kind=kind):
        _move(other, VersionState.REJECTED, ACTOR, f"version {number} takes its place in the shadow")


def _lock(version: LengthVersion, wanted: VersionState, refusal: str) -> None:
    """Lock the row of *version* and read it again. Raises ActionError with *refusal* unless its state is *wanted*."""
    version.refresh_from_db(from_queryset=LengthVersion.objects.select_for_update())
    if version.state != wanted:
        raise ActionError(f"Version {version.number} is {version.state}; {refusal}.")


def _obstacle(row: LengthVersion) -> str:
    """Return why the file of *row* cannot be used; empty if it can."""
    try:
        check(row.kind, row.path)
    except (OSError, ValueError, KeyError) as error:
        return f"The file of version {row.number} cannot be used: {error}"
    return ""


def _refuse(obstacle: str) -> None:
    if obstacle:
        raise ActionError(obstacle)


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
