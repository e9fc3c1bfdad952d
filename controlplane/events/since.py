"""What others changed in rows since they were read: a form carries the newest event.

It is not saved once there is a later event of what it writes. Shown again, a form carries that one: saved again, it
overwrites it knowingly.
"""

from collections.abc import Collection, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Max, Model, Q, QuerySet
from django.utils import timezone

from controlplane.events.models import Event

FIELD = "drawn_after"
"""Field of a form: key of the newest event when it was drawn, 0 for none."""


class Changed(ValidationError):
    """Another changed the rows since."""


def newest(*rows: Model) -> int:
    """Return the key of the newest event about *rows*; without them, of any rows. Read it before the rows are."""
    about = _about(rows) if rows else Event.objects.all()
    return about.aggregate(newest=Max("pk"))["newest"] or 0


def check(carried: str, *rows: Model, fields: Collection[str], given: str = "") -> None:
    """Raise Changed if one of *fields* of *rows* changed after the event *carried*; *given* is what the form says.

    Without an event, as from a script, nothing is checked. The caller holds the rows' locks.
    """
    if not carried.isdecimal():
        return
    changed: dict[tuple[str, str], tuple[Any, Event]] = {}
    for event in _about(rows).filter(pk__gt=int(carried)).order_by("pk"):
        for name in (event.before | event.after).keys() & set(fields):
            key = event.subject if len(rows) > 1 else "", name
            changed[key] = changed[key][0] if key in changed else event.before.get(name), event
    if who := ", and ".join(
        f"{event.actor} changed {name}{subject and f' of {subject}'} from {_shown(before)} to "
        f"{_shown(event.after.get(name))} at {timezone.localtime(event.at):%H:%M:%S %Z}"
        for (subject, name), (before, event) in sorted(changed.items(), key=lambda each: each[0])
        if event.after.get(name) != before
    ):
        yours = f"; this form says {given}" if given else ""
        raise Changed(f"Nothing was saved: since this was read, {who}{yours}. Save again to overwrite that.")


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
