"""What others changed in rows since a form was drawn from them, or since REST answered with their ETag.

A form carries the newest event, and is refused once there is a later one of its fields. Shown again, it carries that one:
saved again, it overwrites it knowingly.
"""

from collections.abc import Collection, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Max, Model, Q, QuerySet
from django.utils import timezone

from controlplane.events.models import Event

FIELD = "drawn_after"
"""Field of the form: key of the newest event when it was drawn, 0 for none."""


def newest(*rows: Model) -> int:
    """Return what a form drawn from *rows* carries; without them, what a page with forms of any rows does. Read it before
    the rows are.
    """
    about = _about(rows) if rows else Event.objects.all()
    return about.aggregate(newest=Max("pk"))["newest"] or 0


def check(carried: str, *rows: Model, fields: Collection[str], given: str = "") -> None:
    """Raise ValidationError if one of *fields* of *rows* changed after *carried*, a form's; *given* is what the form says.

    A form that carries nothing, such as a script's, is not checked. The caller holds the rows' locks.
    """
    if carried.isdecimal() and (said := changes(int(carried), *rows, fields=fields)):
        yours = f"; this form says {given}" if given else ""
        raise ValidationError(
            f"Nothing was saved: since this form was opened, {said}{yours}. Save again to overwrite that."
        )


def changes(carried: int, *rows: Model, fields: Collection[str] | None = None) -> str:
    """Say who changed what in *fields* of *rows*, by default in any, after the event *carried*; empty if none was."""
    changed: dict[tuple[str, str], tuple[Any, Event]] = {}
    for event in _about(rows).filter(pk__gt=carried).order_by("pk"):
        for name in event.before | event.after:
            if fields is None or name in fields:
                key = event.subject if len(rows) > 1 else "", name
                changed[key] = changed[key][0] if key in changed else event.before.get(name), event
    return ", and ".join(
        f"{event.actor} changed {name}{subject and f' of {subject}'} from {_shown(before)} to "
        f"{_shown(event.after.get(name))} at {timezone.localtime(event.at):%H:%M:%S %Z}"
        for (subject, name), (before, event) in changed.items()
        if event.after.get(name) != before
    )


def _about(rows: Sequence[Model]) -> QuerySet[Event]:
    """Return the events about *rows*, and those that switched the policy of their models.

    A row without a key is looked for by its name: it may be stored under another key each time.
    """
    keys: dict[tuple[str | None, str], list[str]] = {}
    for row in rows:
        by, key = ("subject_id__in", str(row.pk)) if row.pk else ("subject__in", str(row)[:160])
        keys.setdefault((row._meta.model_name, by), []).append(key)
    models = [str(known) for row in rows if (known := getattr(row, "model_id", None))]
    concerned = Q(subject_type="model", subject_id__in=models, kind__endswith="_switched")
    for (kind, lookup), named in keys.items():
        concerned |= Q(subject_type=kind, **{lookup: named})
    return Event.objects.filter(concerned)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "nothing" if value in (None, "", [], {}) else f"{value:,.10g}" if isinstance(value, float) else str(value)
