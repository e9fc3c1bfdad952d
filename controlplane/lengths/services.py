"""Writes of output lengths: versions of the length model, from their first row to promotion, rejection and rollback.

One version is active, or none: then the trees that come with the package answer, which are called `trees 0`. A version
is trained into the shadow, in place of another, predicts the same requests as the active one, and is judged on those;
every move is an event.
"""

import uuid
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Max

from controlplane.accounts.models import Tenant, User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import selectors
from controlplane.lengths.models import BUNDLED, LengthMinute, LengthSample, LengthVersion, VersionState
from controlplane.tuning.selectors import tuned
from forecasting.lengths import LengthModel, unavailable_reason
from forecasting.lengths.subprocess_server import check

ACTOR = "length service"
JUDGED_OVER = timedelta(days=7)


PROMOTE_REQUESTS: Final = 2_000
"""Requests over which a shadow is judged."""
PROMOTE_GAIN: Final = 0.02
"""Least improvement of a shadow, as a share of the active version's mean absolute error."""
MAX_LATE: Final = 0.05
"""Largest share of a shadow's answers that requests would not have waited for."""
SAMPLE_DAYS, MEASURE_DAYS = 14.0, 30.0


class Assigned(NamedTuple):
    """The versions that predict: the active one, and the one in shadow."""

    active: LengthVersion
    shadow: LengthVersion | None


def assigned() -> Assigned:
    """Return the versions that predict now; one that rests does not."""
    shadow = selectors.shadow_version()
    return Assigned(in_use(), shadow if shadow and not unavailable_reason(shadow.kind) else None)


def in_use() -> LengthVersion:
    """Return the active version; the bundled one if there is none, or it rests."""
    active = selectors.active_version()
    return active if active and not unavailable_reason(active.kind) else BUNDLED


def add(
    model: LengthModel,
    now: datetime,
    samples: int,
    measures: dict[str, Any],
    actor: User | str,
    reason: str,
    worse: str,
) -> LengthVersion:
    """Store *model*, trained on *samples*, and put it into the shadow in place of another.

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
                _make_room(number)
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


def rollback(version: LengthVersion | None, actor: User | str, reason: str = "") -> LengthVersion | None:
    """Reject the active version and go back to *version*, a retired one, or to the one that was retired last.

    Without any, the bundled one answers again and None is returned. Raises ActionError when there is nothing to go
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
        why = reason or f"rolled back to {f'version {back.number}' if back else 'the bundled one'}"
        _move(active, VersionState.REJECTED, actor, why, "rolled_back", Severity.WARNING)
        if back is not None:
            _move(back, VersionState.ACTIVE, actor, reason or f"rolled back from version {active.number}", "restored")
    return back


def judge(now: datetime) -> LengthVersion | None:
    """Promote or reject the shadow by its errors against the active version's; None if it cannot be judged yet.

    The errors are those of `LengthMinute` in the minutes in which both predicted, once the shadow has
    `PROMOTE_REQUESTS` requests.
    """
    active, version = assigned()
    if not tuned().LENGTH_PROMOTE or version is None:
        return None
    since = max(version.trained_at, now - JUDGED_OVER)
    both = selectors.compared(str(active), f"{selectors.SHADOW} {version}", selectors.Scope(since))
    gain = selectors.gain(*both) if both else None
    if both is None or gain is None or both[1].requests < PROMOTE_REQUESTS:
        return None
    before, measures = both
    late = measures.late_ratio or 0.0
    if late > MAX_LATE:
        return reject(
            version,
            ACTOR,
            f"{100 * late:.1f}% of {measures.requests:,} answers came later than requests wait"
            f" (PILOTHOUSE_LENGTH_BUDGET_MS), at most {100 * MAX_LATE:g}% may",
        )
    reason = (
        f"mean absolute error of {measures.mae:.1f} tokens over {measures.requests:,} requests, {active} {before.mae:.1f}"
        f" over {before.requests:,}: {100 * abs(gain):.1f}% {'better' if gain >= 0 else 'worse'}"
    )
    if gain >= PROMOTE_GAIN:
        return promote(version, ACTOR, f"{reason}, at least {100 * PROMOTE_GAIN:g}% is wanted")
    if gain >= 0:
        reason = f"{reason}, less than the {100 * PROMOTE_GAIN:g}% wanted"
    return reject(version, ACTOR, reason)


def prune(now: datetime) -> int:
    """Delete expired samples and measures, and texts whose tenants stopped keeping prompts; return how many."""
    gone, _ = LengthSample.objects.filter(at__lt=now - timedelta(days=SAMPLE_DAYS)).delete()
    for model in LengthSample.objects.order_by().values_list("model", flat=True).distinct():
        of_model = LengthSample.objects.filter(model=model).order_by("-pk")
        first_gone = of_model.values_list("pk", flat=True)[tuned().LENGTH_SAMPLES :].first()
        if first_gone is not None:
            gone += of_model.filter(pk__lte=first_gone).delete()[0]
    forgetful = Tenant.objects.filter(keep_prompts=False)
    gone += LengthSample.objects.filter(tenant__in=forgetful).exclude(text="").update(text="")
    oldest = now - timedelta(days=MEASURE_DAYS)
    return gone + LengthMinute.objects.filter(minute__lt=oldest).delete()[0]


def _make_room(number: int) -> None:
    """Reject the shadow, for version *number*."""
    for other in LengthVersion.objects.filter(state=VersionState.SHADOW):
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
