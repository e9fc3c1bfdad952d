"""Changing settings while Pilothouse runs; each change is an event with the value before and after."""

from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.tuning import selectors
from controlplane.tuning.models import Setting

IGNORED = "setting.ignored"


@transaction.atomic
def change(name: str, value: Any, actor: User | str, reason: str = "", model: Any = None) -> Setting:
    """Set the setting *name* to *value*, for all models or for *model*, a row of fleet's.

    Raises ValidationError that says what is wrong with it. Writes no row and no event if the value is unchanged.
    """
    before = selectors.read().given(model.name if model else "").get(name)
    first = not Setting.objects.filter(name=name, model=model).exists()
    row, changed = put(name, value, actor, model)
    if changed:
        _record(row, actor, reason, before=before, after=row.value, first=first)
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
    values = {"value": row.value, "changed_at": row.changed_at, "changed_by": row.changed_by}
    row, _ = Setting.objects.update_or_create(name=name, model=model, defaults=values)
    _forget()
    return row, True


@transaction.atomic
def reset(row: Setting, actor: User | str, reason: str = "") -> None:
    """Reset the setting of *row* to its default, or for one model to the value of all models. Raises ValidationError."""
    before, key, known = row.value, row.pk, selectors.read()
    row.delete()
    row.pk = key
    values = selectors.read()
    for (model, name), why in values.ignored.items():
        if (model, name) not in known.ignored:  # a row that was in force cannot be any longer
            of = f" with the values of {model}" if model else ""
            raise ValidationError({"value": f"{row.name} cannot be reset{of}. {why}."})
    model = row.model.name if row.model else ""
    after = values.given(model)[row.name]
    selectors.checked(row.name, after, model)
    _record(row, actor, reason, before=before, after=after)


def report_ignored(values: selectors.Values) -> None:
    """Record an event for each row of *values* that is ignored, once for each value."""
    for (model, name), reason in values.ignored.items():
        row = Setting.objects.select_related("model").filter(name=name, model__name=model or None).first()
        earlier = Event.objects.filter(kind=IGNORED, subject_type="setting", subject=str(row or name)[:160])
        if row is not None and not earlier.filter(before={name: row.value}).exists():
            in_force = values.given(model)[name]
            text = f"{row.value!r} cannot be: {reason}."
            record(
                IGNORED,
                row,
                actor="gateway",
                before={name: row.value},
                after={name: in_force},
                reason=text,
                severity=Severity.WARNING,
            )


def _record(row: Setting, actor: User | str, reason: str, *, before: Any, after: Any, first: bool = False) -> None:
    was, now, inputs = {row.name: before}, {row.name: after}, {"first_value": True} if first else {}
    record("setting.changed", row, actor=actor, before=was, after=now, reason=reason, inputs=inputs)
    _forget()


def _forget() -> None:
    """Drop the cached values of this process, now and on commit."""
    selectors.latest.forget()
    transaction.on_commit(selectors.latest.forget)


def _name(actor: User | str) -> str:
    return actor if isinstance(actor, str) else actor.get_username()
