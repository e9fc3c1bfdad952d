"""Events: every decision and action, with its reason."""

from typing import Any

from django.db.models import QuerySet

from controlplane.accounts.models import Role
from controlplane.events.models import Event, Severity
from controlplane.events.selectors import event_kinds, kind_in_words, visible_events
from controlplane.resources.filters import Control, Hidden, Search, Select, every
from controlplane.resources.resource import Column, Filter, Resource, Viewer, in_range, of_choice, search_in


def rows(viewer: Viewer) -> QuerySet[Event]:
    return Event.objects.all() if viewer.sees_fleet else visible_events(viewer.person)


def by_kind(rows: QuerySet[Event], kind: str) -> QuerySet[Event]:
    """Narrow to a kind (`instance.moved`), or to a family ending in a dot (`instance.`)."""
    return rows.filter(**{"kind__startswith" if kind.endswith(".") else "kind": kind})


def kind_control(_viewer: Viewer) -> Control:
    return Select("kind", "Kind", every("kinds", [(kind, kind_in_words(kind)) for kind in event_kinds()]))


EVENTS = Resource(
    name="events",
    noun="event",
    model=Event,
    rows=rows,
    least=Role.VIEWER,
    columns=(
        Column("id", "Event"),
        Column("at", "At (UTC)"),
        Column("kind", "Kind"),
        Column("severity", "Severity", type=Severity),
        Column("actor", "Actor", label="By"),
        Column("subject_type", "Subject type"),
        Column("subject_id", "Subject id"),
        Column("subject", "Subject", label="Event"),
        Column("reason", "Reason"),
        Column("before", "Before (JSON)", type=dict[str, Any]),
        Column("after", "After (JSON)", type=dict[str, Any]),
        Column("inputs", "Inputs (JSON)", type=dict[str, Any]),
    ),
    filters=(
        search_in(
            *("subject", "reason", "kind", "actor"),
            control=Search("q", "Search in subject, reason, kind and actor", length=120),
        ),
        Filter("kind", by_kind, control=kind_control),
        of_choice("severity", Severity, "severities"),
        *in_range("at", "When", 1, 24, 168),
        Filter("actor", control=Hidden("actor")),
        Filter("subject_type"),
        Filter("subject_id"),
    ),
    page=("at", "subject", "reason", "actor", "kind"),
    empty="Every operator's action and every automatic decision is kept here with its reason. The first come when "
    "instances start.",
    row_template="console/events/event_row.html",
    live="events",
)
