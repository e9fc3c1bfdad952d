"""Changing settings while Pilothouse runs; each change is an event with the value before and after."""

from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.tuning import selectors
from controlplane.tuning.models import Setting


@transaction.atomic
def change(name: str, value: Any, actor: User | str, reason: str = "", model: Any = None) -> Setting:
    """Set the setting *name* to *value*, for all models or for *model*, a row of fleet's.

    Raises ValidationError that says what is wrong with it. Writes no row and no event if the value is unchanged.
    """
    before = selectors.read().given(model.name if model else "").get(name)
    row, changed = put(name, value, actor, model)
    if changed:
        _record(row, actor, reason, before=before, after=row.value)
    return row


def put(name: str, value: Any, actor: User | str, model: Any = None) -> tuple[Setting, bool]:
    """Like `change`, but the caller writes the event. Return whether anything was written."""
    row = Setting.objects.filter(name=name, model=model).first() or Setting(name=name, model=model)
    old, was_there = row.value, row.pk is not None
    row.value, row.changed_at, row.changed_by = value, timezone.now(), _name(actor)
    # An empty text is a value, such as that of the best forecaster, and no field that was left out.
    row.full_clean(exclude=["value"] if value == "" else None, validate_unique=False, validate_constraints=False)
    if was_there and row.value == old:
        return row, False
    row.save()
    _forget()
    return row, True


@transaction.atomic
def reset(row: Setting, actor: User | str, reason: str = "") -> None:
    """Reset the setting of *row* to its default, or for one model to the value of all models. Raises ValidationError."""
    before, key = row.value, row.pk
    row.delete()
    row.pk = key
    after = selectors.read().given(row.model.name if row.model else "")[row.name]
    selectors.checked(row.name, after, row.model.name if row.model else "")
    _record(row, actor, reason, before=before, after=after)


def _record(row: Setting, actor: User | str, reason: str, *, before: Any, after: Any) -> None:
    record("setting.changed", row, actor=actor, before={row.name: before}, after={row.name: after}, reason=reason)
    _forget()


def _forget() -> None:
    """Drop the cached values of this process, now and on commit."""
    selectors.latest.forget()
    transaction.on_commit(selectors.latest.forget)


def _name(actor: User | str) -> str:
    return actor if isinstance(actor, str) else actor.get_username()
