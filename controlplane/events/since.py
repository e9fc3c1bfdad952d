"""What others changed in a row since a form was drawn from it.

A form carries the newest change, and is refused once there is a later one of its fields. Shown again, it carries that one:
saved again, it overwrites it knowingly.
"""

from collections.abc import Collection
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Max, Model, QuerySet
from django.utils import timezone

from controlplane.events.models import Event

FIELD = "drawn_after"
"""Field of the form: key of the newest event about the row, 0 for none."""


def newest(row: Model) -> int:
    """Return what a form drawn from *row* carries."""
    return _about(row).aggregate(newest=Max("pk"))["newest"] or 0


def newest_by_subject(model: type[Model]) -> dict[str, int]:
    """Return the same for all rows of *model* at once, by their names."""
    rows = Event.objects.filter(subject_type=model._meta.model_name).order_by().values_list("subject")
    return dict(rows.annotate(newest=Max("pk")))


def check(row: Model, carried: str, fields: Collection[str], given: str = "") -> None:
    """Raise ValidationError if one of *fields* of *row* changed after *carried*, a form's; *given* is what the form says.

    A form that carries nothing, such as a script's, is not checked. The caller holds the row's lock.
    """
    if not carried.isdecimal():
        return
    changes: dict[str, tuple[Any, Event]] = {}
    for event in _about(row).filter(pk__gt=int(carried)).order_by("pk"):
        for name in event.after:
            if name in fields:
                changes[name] = changes[name][0] if name in changes else event.before.get(name), event
    said = [
        f"{event.actor} changed {name} from {_shown(before)} to {_shown(event.after[name])} at "
        f"{timezone.localtime(event.at):%H:%M:%S %Z}"
        for name, (before, event) in changes.items()
        if event.after[name] != before
    ]
    if said:
        yours = f"; this form says {given}" if given else ""
        raise ValidationError(
            f"Nothing was saved: since this form was opened, {', and '.join(said)}{yours}. Save again to overwrite that."
        )


def _about(row: Model) -> QuerySet[Event]:
    """Return the events about *row*; by its name where it may be stored under another key each time."""
    key = {"subject_id": str(row.pk)} if row.pk else {"subject": str(row)[:160]}
    return Event.objects.filter(subject_type=row._meta.model_name, **key)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "nothing" if value in (None, "", [], {}) else f"{value:,.10g}" if isinstance(value, float) else str(value)
