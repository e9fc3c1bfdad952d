"""Maintenance of nodes and regions: the place is cordoned and its instances are emptied until the window ends.

A window is a cordon with an end, so everything that starts or plans instances honours it as it does any cordon. What runs
there finishes its requests and stops (`executor.drained`), and capacity moves elsewhere as after any drain. At the end the
place is uncordoned, and what the window stopped starts again.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import (
    CommandVerb,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Maintenance,
    Node,
    Region,
)

logger = logging.getLogger(__name__)

ACTOR = "maintenance"
LONGEST = timedelta(days=30)
S = InstanceState
DONE = (S.DRAINING, S.STOPPED, S.FAILED, S.RECLAIMING)
"""States of instances that a window does not move, or not yet."""


@transaction.atomic
def plan(
    place: Node | Region, actor: User, reason: str, until: datetime, from_at: datetime | None = None
) -> Maintenance:
    """Plan maintenance of *place* until *until*, and begin it unless *from_at* is to come."""
    now, until = timezone.now(), until.astimezone(UTC)
    from_at = max(from_at or now, now).astimezone(UTC)
    if until <= from_at:
        raise ActionError(f"Maintenance of {place} ends before it begins: {until:%d %b %H:%M} UTC")
    if until - from_at > LONGEST:
        raise ActionError(f"Maintenance lasts {LONGEST.days} days at most: cordon {place} for longer")
    kind = place._meta.model_name or ""
    type(place).objects.select_for_update(no_key=True).get(pk=place.pk)
    other = place.maintenance.open().filter(from_at__lt=until, until__gt=from_at).first()
    if other is not None:
        raise ActionError(f"{place} has maintenance from {other.from_at:%d %b %H:%M} to {other.until:%d %b %H:%M} UTC")
    row = Maintenance(from_at=from_at, until=until, reason=reason[:255], created_by=actor.get_username())
    setattr(row, kind, place)
    row.save()
    after = {"from": from_at.isoformat(timespec="seconds"), "until": until.isoformat(timespec="seconds")}
    record(f"{kind}.maintenance_planned", place, actor=actor, after=after, reason=reason)
    if from_at <= now:
        _begin(row, now)
    return row


def planned(row: Maintenance) -> str:
    """Say what *row*, just planned, does."""
    if row.begun_at is None:
        return f"Maintenance of {row.place} begins on {row.from_at:%d %b} at {row.from_at:%H:%M} UTC."
    drains = instances_of(row).filter(state=S.DRAINING).count()
    drained = f"{drains} instance{'s' if drains != 1 else ''} drain{'s' if drains == 1 else ''}"
    return f"{row.place} is in maintenance until {row.until:%d %b %H:%M} UTC: {drained}, and nothing starts there."


@transaction.atomic
def end(row: Maintenance, actor: User | str, reason: str) -> str:
    """End maintenance, or cancel what is to come: uncordon its place, and return what still drains to service."""
    row = Maintenance.objects.select_for_update(of=("self",)).select_related("node", "region").get(pk=row.pk)
    if row.ended_at is not None:
        raise ActionError(f"{row} has ended")
    begun, row.ended_at = row.begun_at is not None, timezone.now()
    row.save(update_fields=["ended_at"])
    if not begun:
        record(f"{row.place._meta.model_name}.maintenance_cancelled", row.place, actor=actor, reason=reason)
        return f"{row} is cancelled"
    row.place.refresh_from_db(fields=["cordoned"])
    if row.cordon and row.place.cordoned == row.cordon:
        services.uncordon(row.place, actor, reason)
    for instance in instances_of(row).filter(state=S.DRAINING, restart=str(row)).order_by("pk"):
        with _refusals("it stays drained"):
            services.resume(instance, ACTOR, f"{row} ended")
    return f"{row} has ended; what it stopped starts again"


def advance(now: datetime | None = None) -> int:
    """Begin and end what is due, empty places under maintenance, and start again what stopped to restart.

    Return how many instances were moved. A refusal is of one instance, which is tried again at the next call.
    """
    now = now or timezone.now()
    moved = 0
    for row in Maintenance.objects.open().select_related("node", "region"):
        if row.until <= now:
            with _refusals("ended already"):
                end(row, ACTOR, f"maintenance is over: {row.reason}"[:255])
        elif row.begun_at is not None:
            moved += _empty(row)
        elif row.from_at <= now:
            with transaction.atomic():
                moved += _begin(row, now)
    return moved + _restart_stopped()


def instances_of(row: Maintenance) -> QuerySet[Instance]:
    """Return the instances at its place."""
    return (
        Instance.objects.filter(node=row.node) if row.node else Instance.objects.filter(deployment__region=row.region)
    )


def leaving() -> set[int]:
    """Return the keys of draining instances that stop once idle: to restart, or because their place is in maintenance."""
    places_of = Maintenance.objects.under_way()
    there = Q(node__in=places_of.values("node")) | Q(deployment__region__in=places_of.values("region"))
    rows = Instance.objects.filter(~Q(restart="") | there, state=S.DRAINING)
    return set(rows.values_list("pk", flat=True))


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Do what follows in a transaction; a refusal takes back that alone, and is logged."""
    try:
        with transaction.atomic():
            yield
    except ActionError as refusal:
        logger.info("maintenance: %s: %s", what, refusal)


def _begin(row: Maintenance, now: datetime) -> int:
    if Maintenance.objects.select_for_update().get(pk=row.pk).begun_at is not None:
        return 0
    place = row.place
    place.refresh_from_db(fields=["cordoned"])
    if not place.cordoned:
        services.cordon(place, row.created_by, f"maintenance until {row.until:%d %b %H:%M} UTC: {row.reason}")
        row.cordon = place.cordoned
    row.begun_at = now
    row.save(update_fields=["cordon", "begun_at"])
    return _empty(row)


def _empty(row: Maintenance) -> int:
    """Drain what serves at its place, and stop what does not; return how many. Held instances stay as they are."""
    from controlplane.fleet.spot import services as spot

    moved = 0
    stops = InstanceCommand.objects.open().filter(verb=CommandVerb.STOP).values("instance")
    for instance in instances_of(row).exclude(state__in=DONE).exclude(pk__in=stops).order_by("pk"):
        reason, spares = f"{row}: {row.reason}"[:255], instance.state in (S.DONATED, S.SLEEPING)
        with _refusals("not moved"):
            Instance.objects.filter(pk=instance.pk).update(restart="" if spares else str(row))
            if instance.state == S.READY:
                services.drain(instance, ACTOR, reason)
            elif instance.state == S.DONATED:
                spot.leave(instance, ACTOR, reason)
            elif instance.launcher != Launcher.EXTERNAL:  # nothing runs on it
                services.stop(instance, ACTOR, reason)
            moved += 1
    return moved


def _restart_stopped() -> int:
    """Start what stopped to restart, where nothing is in its way any more and it has room; return how many."""
    started = 0
    rows = Instance.objects.filter(state=S.STOPPED, held="").exclude(restart="")
    for instance in rows.select_related("node", "deployment__region").order_by("pk"):
        if places.obstacle(instance):
            continue
        with _refusals("not started again"):
            (of,) = places.lock(Deployment.objects.filter(pk=instance.deployment_id))
            if not of.active or of.instances.present().count() >= of.max_instances or not places.keeps(instance):
                Instance.objects.filter(pk=instance.pk).update(restart="")  # others have taken its place
                continue
            services.start(instance, ACTOR, f"again: {instance.restart}"[:255])
            started += 1
    return started
