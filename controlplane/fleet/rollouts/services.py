"""Rollout of a changed deployment: its instances restart with the current settings, one by one.

As in Kubernetes, one instance more is started first where the bounds and the GPUs allow it (maxSurge 1): when it is ready,
one with other settings drains, is stopped when nothing runs on it, and makes room for the next. Where nothing more can be
started, one drains and starts again in its place (maxUnavailable 1): not below the deployment's minimum of ready
instances, unless there is no other way, which the message says.

`advance` makes the next move of one rollout and is called every few seconds; it reads what is there and keeps two
instances in the row, the one that starts and the one that drains, so it may be cut off or repeated at any point. Each
call locks what every other move locks (`places`). What drains is stopped by the task that stops what scaling drains.

A new instance that is ready *bakes*: it serves for a while before the next old one is drained, and is judged by the requests
that it failed. A bad version so costs one old instance at most: the rollout goes back, with the settings from before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle.states import COMING, PRESENT, ActionError, InstanceState
from controlplane.fleet.models import Deployment, Instance, Launcher, Rollout, RolloutState
from controlplane.fleet.rollouts import revisions
from workers.vllm.launcher import LaunchError

ACTOR = "rollout"
PROGRESS_DEADLINE = timedelta(minutes=30)
"""An instance that is not ready by then has failed."""
S = InstanceState
FEWEST_FAILURES = 3
"""Failed requests that are judged however few there were."""
WANTED, OK = "wanted", "ok"
Outcomes = Mapping[str, Sequence[int]]
"""(answered, failed) requests by instance."""


@dataclass(slots=True)
class Fleet:
    """Instances of a deployment, as a rollout sees them."""

    deployment: Deployment
    present: list[Instance]
    """Those that Pilothouse started and that serve or soon will."""
    stale: list[Instance]
    """Those of them, or asleep, whose servers have other settings or settings that are not known."""
    everywhere: int
    """Present instances, with those that were started elsewhere."""
    ready: int
    differ: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def up_to_date(self) -> int:
        stale = {row.pk for row in self.stale}
        return sum(row.state == S.READY and row.pk not in stale for row in self.present)


def read_fleet(deployment: Deployment) -> Fleet:
    """Read the instances. Raises LaunchError if the deployment's settings cannot be started."""
    rows = list(deployment.instances.select_related("deployment__model", "deployment__gpu_type", "node").order_by("pk"))
    own = [row for row in rows if row.launcher != Launcher.EXTERNAL]
    differ, stale = {}, []
    for row in own:
        if row.state not in revisions.RUNNING:
            continue
        names = revisions.difference(row)
        if names:
            differ[row.pk] = names
        if names != () and row.state != S.DRAINING:
            stale.append(row)
    return Fleet(
        deployment=deployment,
        present=[row for row in own if row.state in PRESENT],
        stale=stale,
        everywhere=sum(row.state in PRESENT for row in rows),
        ready=sum(row.state == S.READY for row in rows),
        differ=differ,
    )


@transaction.atomic
def start(deployment: Deployment, actor: User | str, reason: str, **values: Any) -> Rollout:
    """Start a rollout of *deployment*. Raises ActionError if it is up to date or a rollout runs.

    *values*: `bake_s`, `failure_budget`, `min_requests` and `auto_back` of `Rollout`.
    """
    (deployment,) = places.lock(Deployment.objects.filter(pk=deployment.pk))
    if running := deployment.rollouts.filter(state=RolloutState.IN_PROGRESS).first():
        raise ActionError(
            f"A rollout of {deployment} is in progress since {running.started_at:%H:%M} UTC: cancel it first"
        )
    try:
        seen = read_fleet(deployment)
    except LaunchError as error:
        raise ActionError(f"{deployment} cannot be started with its present settings: {error}") from error
    if not seen.stale:
        if not seen.present:
            raise ActionError(f"Nothing to roll out: Pilothouse runs no instance of {deployment}")
        raise ActionError(f"Nothing to roll out: all {len(seen.present)} instances of {deployment} are up to date")
    rollout = Rollout.objects.create(
        deployment=deployment,
        actor=actor.get_username() if isinstance(actor, User) else actor,
        reason=reason[:255],
        total=len(seen.present),
        up_to_date=seen.up_to_date,
        message="Begins within seconds.",
        before=next((row.launched_with for row in seen.stale if row.launched_with), {}),
        **values,
    )
    settings = sorted({name for names in seen.differ.values() for name in names})
    after = {"rollout": rollout.pk, "instances": [row.name for row in seen.stale], "settings": settings}
    record("rollout.started", deployment, actor=actor, after=after, reason=reason)
    return rollout


@transaction.atomic
def cancel(deployment: Deployment, actor: User | str, reason: str) -> Rollout:
    """Cancel the rollout of *deployment*; draining instances serve again. Raises ActionError without one."""
    (deployment,) = places.lock(Deployment.objects.filter(pk=deployment.pk))
    rollout = _locked(deployment.rollouts.filter(state=RolloutState.IN_PROGRESS))
    if rollout is None:
        raise ActionError(f"No rollout of {deployment} is in progress")
    name = actor.get_username() if isinstance(actor, User) else actor
    _end(rollout, RolloutState.CANCELLED, f"Cancelled by {name}{': ' + reason if reason else ''}", actor=actor)
    extra = rollout.starting
    if extra is not None and extra.state in COMING and _present(deployment) > rollout.total:
        services.stop(extra, ACTOR, f"{rollout} is cancelled")
    _settle(rollout)
    rollout.save()
    return rollout


@transaction.atomic
def go_back(deployment: Deployment, actor: User | str, reason: str) -> Rollout:
    """Have the rollout of *deployment*, in progress or failed, go back to the settings before. Raises ActionError."""
    (deployment,) = places.lock(Deployment.objects.filter(pk=deployment.pk))
    rollout = _locked(deployment.rollouts.all())
    if rollout is None or rollout.going_back or rollout.state not in (RolloutState.IN_PROGRESS, RolloutState.FAILED):
        raise ActionError(f"No rollout of {deployment} is in progress or has failed")
    name = actor.get_username() if isinstance(actor, User) else actor
    try:
        _revert(rollout, f"{rollout.cause + '. ' if rollout.cause else ''}Asked by {name}: {reason}", actor)
    except LaunchError as error:
        raise ActionError(f"It cannot go back: {error}") from error
    rollout.save()
    return rollout


@transaction.atomic
def advance(rollout: Rollout, outcomes: Outcomes | None = None) -> Rollout:
    """Make the next move of *rollout* if possible; its row says what it waits for. *outcomes*: None where not known."""
    places.lock(Deployment.objects.filter(pk=rollout.deployment_id))
    row = _locked(Rollout.objects.filter(pk=rollout.pk))
    if row is None:
        return rollout
    if row.state != RolloutState.IN_PROGRESS:
        _settle(row)
    else:
        try:
            _step(row, outcomes)
        except LaunchError as error:
            _end(row, RolloutState.FAILED, f"The present settings cannot be started: {error}")
        except ActionError as error:  # moved meanwhile: retried at the next call
            row.message = f"Waits: {error}."
    row.save()
    return row


def _step(rollout: Rollout, outcomes: Outcomes | None) -> None:
    seen, back = read_fleet(rollout.deployment), rollout.going_back
    waits = _starting(rollout, seen, outcomes)
    if rollout.going_back != back:  # its settings are others now
        seen = read_fleet(rollout.deployment)
    if not waits and rollout.state == RolloutState.IN_PROGRESS:
        waits = _draining(rollout, seen)
    if rollout.state != RolloutState.IN_PROGRESS:
        return
    if not waits:
        waits = (_next_back if rollout.going_back else _next)(rollout, seen)
    rollout.up_to_date = min(seen.up_to_date, rollout.total)
    if waits:
        rollout.message = waits
        return
    left = rollout.deployment.instances.launched().filter(state=S.DRAINING)
    rollout.total = len(seen.present)
    rollout.up_to_date = seen.up_to_date
    words = f"All {rollout.total} instances have the {'settings from before' if rollout.going_back else 'present settings'}."
    if rollout.going_back:
        words += f" {rollout.cause}"
    if names := ", ".join(left.values_list("name", flat=True)):
        words += f" {names}: drained by others and left as it is."
    _end(rollout, RolloutState.ROLLED_BACK if rollout.going_back else RolloutState.SUCCEEDED, words)


def _starting(rollout: Rollout, seen: Fleet, outcomes: Outcomes | None) -> str:
    """Return what the starting instance waits for; "" when it has proved itself or left the rollout."""
    row = rollout.starting
    if row is None:
        return ""
    other_settings = bool(revisions.difference(row))  # they have changed again: it is replaced again later
    if (row.state == S.FAILED or row.failures) and not other_settings:
        what = "failed" if rollout.baking_since else "did not come up with the present settings"
        return _bad(rollout, f"{row.name} {what}: {_error_of(row)}")
    if row.state in COMING and not other_settings:
        if _overdue(row):
            minutes = PROGRESS_DEADLINE.seconds // 60
            return _bad(rollout, f"{row.name} is not ready after {minutes} minutes: {row.state_reason}")
        return f"{row.name} starts{': ' + row.startup if row.startup else ''}."
    if row.state == S.READY and not other_settings and rollout.bake_s and not rollout.going_back:
        if waits := _bakes(rollout, seen, row, outcomes):
            return waits
        if rollout.going_back or rollout.state != RolloutState.IN_PROGRESS:
            return ""
    rollout.starting, rollout.baking_since, rollout.baseline, rollout.probe = None, None, {}, ""
    return ""


def _bakes(rollout: Rollout, seen: Fleet, row: Instance, outcomes: Outcomes | None) -> str:
    """Return what the ready instance *row* waits for before the next is replaced; "" when its time is over, or it is bad."""
    now = timezone.now()
    if outcomes is None:
        rollout.baking_since = None
        return f"{row.name} is ready. Waits: what became of its requests is not known, Redis or the gateway is away."
    counts = {each.name: outcomes.get(each.name, (0, 0)) for each in seen.present}
    begun = {name: rollout.baseline.get(name, (0, 0)) for name in counts}
    restarted = any(count[0] < begun[name][0] or count[1] < begun[name][1] for name, count in counts.items())
    if rollout.baking_since is None or restarted:  # the gateway was restarted
        rollout.baking_since, rollout.baseline, rollout.probe, begun = now, counts, "", counts
    stale = {each.name for each in seen.stale}
    answered, failed, old_answered, old_failed = (
        sum(counts[name][at] - begun[name][at] for name in counts if (name in stale) is old)
        for old in (False, True)
        for at in (0, 1)
    )
    if old_answered + old_failed:
        rollout.others_ratio = old_failed / (old_answered + old_failed)
    requests, others = answered + failed, rollout.others_ratio
    judged = requests >= rollout.min_requests or failed >= FEWEST_FAILURES
    if judged and failed / requests > others + rollout.failure_budget:
        share = f"{failed / requests:.0%} against {others:.0%} elsewhere"
        return _bad(rollout, f"{failed} of {requests} requests failed with the new settings, {share}")
    left_s = rollout.bake_s - (now - rollout.baking_since).total_seconds()
    if left_s > 0:
        return (
            f"{row.name} is ready and serves {left_s:.0f} s more before the next: {requests} requests, {failed} failed."
        )
    if requests < rollout.min_requests:
        if rollout.probe not in (OK, "", WANTED):
            return _bad(rollout, f"{row.name} had {requests} requests, and a probe failed: {rollout.probe}")
        if rollout.probe != OK:
            rollout.probe = WANTED
            return f"{row.name} had {requests} requests in {rollout.bake_s} s, too few to judge it: it is probed."
    return ""


def _bad(rollout: Rollout, cause: str) -> str:
    """Go back because of *cause*, or fail. Return what is done; "" if it failed."""
    rollout.cause = cause
    if rollout.going_back or not rollout.auto_back:
        _end(rollout, RolloutState.FAILED, cause)
        return ""
    try:
        with transaction.atomic():
            _revert(rollout, cause)
    except LaunchError as error:
        _end(rollout, RolloutState.FAILED, f"{cause}. It does not go back by itself: {error}")
    return rollout.message if rollout.going_back else ""


def _revert(rollout: Rollout, cause: str, actor: User | str = ACTOR) -> None:
    """Set the deployment's settings back to those from before, and have the instances follow. Raises LaunchError."""
    deployment = rollout.deployment
    now = revisions.restore(deployment, rollout.before)
    deployment.save(update_fields=list(now))
    rollout.state, rollout.ended_at, rollout.going_back, rollout.cause = RolloutState.IN_PROGRESS, None, True, cause
    rollout.starting, rollout.baking_since, rollout.baseline, rollout.probe = None, None, {}, ""
    rollout.message = f"Goes back: {cause}"
    record(
        "rollout.goes_back",
        deployment,
        actor=actor,
        before=now,
        after={name: getattr(deployment, name) for name in now} | {"rollout": rollout.pk},
        reason=cause,
        severity=Severity.CRITICAL,
    )


def _next_back(rollout: Rollout, seen: Fleet) -> str:
    """Take the next instance with the new settings out, or start one with those from before. "" when none is left."""
    for row in seen.stale:
        if services.open_command(row) is not None:
            return f"{row.name} is waited for."
        if row.state == S.READY:
            return f"Goes back: {_drain(rollout, row)}"
        services.stop(row, ACTOR, f"{rollout} goes back")
        return f"Goes back: {row.name} stops."
    if len(seen.present) < rollout.total:
        try:
            with transaction.atomic():
                _start(rollout, row := _startable(seen.deployment))
        except (ActionError, ValidationError) as error:
            return f"Goes back. Waits: {' '.join(error.messages) if isinstance(error, ValidationError) else error}."
        return f"Goes back: {row.name} starts."
    return ""


def _draining(rollout: Rollout, seen: Fleet) -> str:
    """Return what the draining instance waits for, until it is stopped and, if needed, started again."""
    row = rollout.draining
    if row is None:
        return ""
    command = services.open_command(row)
    if command is not None and command.verb == "stop":
        return f"{row.name} stops."
    match row.state:
        case S.DRAINING:
            if revisions.difference(row) == ():  # the settings were changed back
                services.resume(row, ACTOR, f"{rollout}: its settings are the present ones again")
                rollout.draining = None
                return f"{row.name} serves again."
            return f"{row.name} drains."
        case S.STOPPED if row.held:
            return f"Waits: {places.obstacle(row)}."
        case S.STOPPED | S.FAILED if len(seen.present) < rollout.total:
            if _overdue(row):
                _end(rollout, RolloutState.FAILED, f"{row.name} could not be started again: {rollout.message}")
                return ""
            _start(rollout, row)
        case S.FAILED:
            services.stop(row, ACTOR, f"{rollout}: replaced")
        case S.PROVISIONING | S.LOADING:  # the floor or a strategy was first
            rollout.starting = row
    rollout.draining = None
    return f"{rollout.starting.name} starts." if rollout.starting else ""


def _next(rollout: Rollout, seen: Fleet) -> str:
    """Take the next outdated instance. Return what is done or waited for; "" when none is left."""
    serves_nobody = next((row for row in seen.stale if row.state in (S.SLEEPING, S.LOADING)), None)
    if serves_nobody is not None:
        asleep = serves_nobody.state == S.SLEEPING
        if services.open_command(serves_nobody) is None:
            services.stop(serves_nobody, ACTOR, f"{rollout}: started with other settings")
            if not asleep:
                rollout.draining, rollout.total = serves_nobody, len(seen.present)
        return f"{serves_nobody.name} stops{', for it sleeps with other settings' if asleep else ''}."
    free = [row for row in seen.stale if services.open_command(row) is None and not places.obstacle(row)]
    if not free and (blocked := next(filter(None, map(places.obstacle, seen.stale)), "")):
        return f"Waits: {blocked}."
    if not free:
        return f"{seen.stale[0].name} is waited for." if seen.stale else ""
    row, least = free[0], seen.deployment.min_instances
    waits = f"Waits for ready instances: {seen.ready}, and {least} is the minimum."
    if len(seen.present) > rollout.total:  # one more is there for the moment
        return _drain(rollout, row) if seen.ready > least else waits
    rollout.total = len(seen.present)
    (_, most), *_ = places.bounds([seen.deployment]).values()
    obstacle = f"at most {most} instances are allowed"
    if seen.everywhere < most:
        try:
            with transaction.atomic():
                extra = _startable(seen.deployment)
                _start(rollout, extra)
        except (ActionError, ValidationError) as error:
            obstacle = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
        else:
            return f"{extra.name} starts, one more for the moment."
    if seen.ready < least or (seen.ready == least and len(seen.present) > seen.ready):
        return waits
    below = ", one below the minimum for the moment" if seen.ready == least else ""
    return f"{_drain(rollout, row)} No other can start before ({obstacle}), so it starts again in its place{below}."


def _drain(rollout: Rollout, row: Instance) -> str:
    services.drain(row, ACTOR, f"{rollout}: {rollout.reason}"[:255])  # `total` stays, unlike when others drain one
    rollout.draining = row
    return f"{row.name} drains."


def _start(rollout: Rollout, row: Instance) -> None:
    Instance.objects.filter(pk=row.pk).update(failures=0)  # one from now on is the new settings' fault
    services.start(row, ACTOR, f"{rollout}: {rollout.reason}"[:255])
    rollout.starting = row


def _startable(deployment: Deployment) -> Instance:
    """Return a stopped instance of *deployment* with a place, else a new one, else a failed one. Raises NoRoom."""
    rows = deployment.instances.launched().select_related("node", "deployment").order_by("pk")
    idle = [
        row
        for row in rows.filter(state__in=[S.STOPPED, S.FAILED])
        if services.open_command(row) is None and not places.obstacle(row)
    ]
    for row in idle:
        if row.state == S.STOPPED and places.keeps(row):
            return row
    try:
        return places.new_instance(deployment)
    except places.NoRoom:
        for row in idle:
            if places.keeps(row):
                return row
        raise


def _settle(rollout: Rollout) -> None:
    """An ended rollout leaves no instance drained for it: it serves again, or is started if it has stopped already."""
    row = rollout.draining
    if row is None or services.open_command(row) is not None:
        return
    try:
        if row.state == S.DRAINING:
            services.resume(row, ACTOR, f"{rollout} has ended")
        elif row.state in (S.STOPPED, S.FAILED) and _present(rollout.deployment) < rollout.total:
            services.start(row, ACTOR, f"{rollout} has ended")
    except ActionError:  # its GPUs may be taken for the moment
        if not _overdue(row):
            return
    rollout.draining = None


def _end(rollout: Rollout, state: RolloutState, message: str, actor: User | str = ACTOR) -> None:
    rollout.state, rollout.message, rollout.ended_at = state, message, timezone.now()
    record(
        f"rollout.{state}",
        rollout.deployment,
        actor=actor,
        before={"state": RolloutState.IN_PROGRESS},
        after={"rollout": rollout.pk, "state": state, "up_to_date": rollout.up_to_date, "total": rollout.total},
        reason=message,
        severity={RolloutState.FAILED: Severity.CRITICAL, RolloutState.ROLLED_BACK: Severity.WARNING}.get(
            state, Severity.INFO
        ),
    )


def _locked(rows: QuerySet[Rollout]) -> Rollout | None:
    related = ("deployment", "starting", "draining")
    row = rows.select_for_update(of=("self",)).first()
    return row and Rollout.objects.select_related(*related).get(pk=row.pk)


def _present(deployment: Deployment) -> int:
    return deployment.instances.launched().filter(state__in=PRESENT).count()


def _overdue(row: Instance) -> bool:
    return timezone.now() - row.state_changed_at > PROGRESS_DEADLINE


def _error_of(row: Instance) -> str:
    """Return the reason of the last failure of *row*, even if it has restarted."""
    moves = Event.objects.filter(subject_type="instance", subject_id=str(row.pk), kind="instance.moved")
    failed = moves.filter(after__state=S.FAILED).order_by("-pk").values_list("reason", flat=True).first()
    return failed or row.state_reason
