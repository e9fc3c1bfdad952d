"""Writes rows of the inventory from values with names, each with its event; used by `/api`, the admin and fleet files.

Every function raises ValidationError naming the field at fault.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import ProtectedError

from controlplane.accounts.models import User
from controlplane.events import since
from controlplane.events.audit import record_change, record_creation, record_deletion, snapshot
from controlplane.fleet import places, services, shards
from controlplane.fleet.inventory.kinds import INSTANCE, MODEL, TENANT, WEIGHTED_TARGET, Kind
from controlplane.fleet.inventory.model_source import completed
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Launcher, Model, WeightedTarget


@transaction.atomic
def create(kind: Kind, values: Mapping[str, Any], actor: User | str, reason: str = "", *, alone: bool = True) -> Any:
    """Create a row of *kind*. A new instance is started, or probed if it was started elsewhere. *alone* as in `change`."""
    if kind is INSTANCE:
        places.lock(Deployment.objects.filter(pk=kind.resolve(values)["deployment"].pk))
    row = insert(kind, values)
    kind.guard(row, actor, False)
    record_creation(row, actor, reason=reason)
    if alone:
        check_shards(kind, values, row)
    if isinstance(row, Instance):
        services.start(row, actor, reason or "created")
    transaction.on_commit(services.notify)
    return row


def insert(kind: Kind, values: Mapping[str, Any]) -> Any:
    """Create a row of *kind*, without an event and without starting anything."""
    row = kind.model()
    if isinstance(row, User):
        row.set_unusable_password()
    _save(kind, row, values)
    return row


@transaction.atomic
def change(
    kind: Kind,
    row: Any,
    values: Mapping[str, Any],
    actor: User | str,
    reason: str = "",
    *,
    read_at: str = "",
    alone: bool = True,
) -> Any:
    """Set *values* on *row* and return it; other fields stay. Refused if another changed these after the event *read_at*.

    Where it is not *alone*, the caller calls `check_shards` after the last change of its transaction.
    """
    row = kind.model._default_manager.select_for_update(of=("self",)).get(pk=row.pk)
    since.check(read_at, row, fields=values)
    before, held = snapshot(row), kind.values_of(row)
    for name in kind.fixed:
        if name in values and values[name] not in ("", held[name]):
            raise ValidationError({name: f"This is fixed when the {kind.title} is created: it is {held[name]}."})
    values = {name: value for name, value in values.items() if name in kind.fields}
    if isinstance(row, Instance):
        _check_instance(row, held, values)
    _save(kind, row, values)
    if alone:
        check_shards(kind, values, row)
    if record_change(row, before, actor, reason=reason) is not None:
        kind.guard(row, actor, False)
        transaction.on_commit(services.notify)
    return row


@transaction.atomic
def delete(kind: Kind, row: Any, actor: User | str, reason: str = "", *, read_at: str = "") -> None:
    """Delete *row*. Refused while other rows refer to it, for an instance that is not stopped, and if another changed it
    after the event *read_at*.
    """
    if not kind.deletable:
        instead = ": make it inactive" if "active" in kind.fields else ""
        raise ValidationError(f"{kind.title.capitalize()} {row} is not deleted, because its history stays{instead}.")
    row = kind.model._default_manager.select_for_update(of=("self",)).get(pk=row.pk)
    since.check(read_at, row, fields=(*kind.key, *kind.fixed, *kind.fields))
    if isinstance(row, Instance) and row.state != InstanceState.STOPPED:
        raise ValidationError(f"{row.name} is {row.state}: stop it first.")
    kind.guard(row, actor, True)
    record_deletion(row, actor, reason=reason)
    try:
        row.delete()
    except ProtectedError as error:
        users = sorted({f"{other._meta.verbose_name} {other}" for other in error.protected_objects})
        more = f" and {len(users) - 3} more" if len(users) > 3 else ""
        text = f"{row} is used by {', '.join(users[:3])}{more}."
        raise ValidationError(text) from error
    transaction.on_commit(services.notify)


@transaction.atomic
def share(name: str, weights: Mapping[str, float], actor: User | str, reason: str = "") -> None:
    """Share the requests that ask for *name* among the targets in *weights*, and no other; without any, end that."""
    known = {row.target: row for row in WeightedTarget.objects.filter(name=name)}
    for target in known.keys() - weights.keys():
        delete(WEIGHTED_TARGET, known[target], actor, reason)
    for target, weight in weights.items():
        if (row := known.get(target)) is not None:
            change(WEIGHTED_TARGET, row, {"weight": weight, "active": True}, actor, reason)
        else:
            create(WEIGHTED_TARGET, {"name": name, "target": target, "weight": weight}, actor, reason)


def _save(kind: Kind, row: Any, values: Mapping[str, Any]) -> None:
    """Set *values* on *row*, check it and save it."""
    if kind is MODEL:
        values = completed(row, values)
    many = {}
    for name, value in kind.resolve(values).items():
        if kind.is_many(name):
            many[name] = value
        elif value is None and not kind.model._meta.get_field(name).null:
            raise ValidationError({name: "This field cannot be null."})
        else:
            setattr(row, name, value)
    row.full_clean(exclude=["password"] if isinstance(row, User) else None)
    for field in row._meta.concrete_fields:
        if isinstance(value := getattr(row, field.attname), float) and not isfinite(value):
            raise ValidationError({field.name: "Give a finite number."})
    row.save()
    for name, rows in many.items():
        getattr(row, name).set(rows)
    if kind is TENANT and not row.slo_classes.filter(pk=row.default_slo_class_id).exists():
        text = f"{row.default_slo_class} is not among the classes that this tenant may use."
        raise ValidationError({"default_slo_class": text})


def check_shards(kind: Kind, values: Mapping[str, Any], row: Any) -> None:
    """Raise ValidationError where a model that was given *values* is not in one shard with those that it belongs to."""
    if kind is MODEL and not {"shard", "fallback"}.isdisjoint(values):
        shards.check(row)


@transaction.atomic
def deal(model: Model, shard: int, actor: User | str, reason: str = "") -> list[Model]:
    """Deal *model* to *shard*, with all that are in one shard with it; return these."""
    rows = [change(MODEL, each, {"shard": shard}, actor, reason, alone=False) for each in shards.together(model)]
    shards.check(*rows)
    return rows


def _check_instance(row: Instance, held: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if "url" in values and row.launcher != Launcher.EXTERNAL and values["url"] != held["url"]:
        raise ValidationError({"url": "Its launcher gives the address."})
    if values.get("node", held["node"]) != held["node"] and row.state != InstanceState.STOPPED:
        raise ValidationError({"node": f"{row.name} is {row.state}: stop it before it moves to another node."})
