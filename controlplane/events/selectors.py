"""Reads of the event record: filters, and who may see what."""

from datetime import datetime

from django.contrib.auth.models import AnonymousUser
from django.db.models import Model, QuerySet

from controlplane.accounts.models import Role, User
from controlplane.accounts.selectors import visible_api_keys
from controlplane.events.models import Event
from controlplane.rows import containing, narrowed


def visible_events(user: User | AnonymousUser) -> QuerySet[Event]:
    """Everything for the fleet's people; for others, what happened to the API keys of their tenants."""
    if not user.is_authenticated or not user.is_active:
        return Event.objects.none()
    if user.has_fleet_role(Role.VIEWER):
        return Event.objects.all()
    keys = [str(pk) for pk in visible_api_keys(user).values_list("pk", flat=True)]
    return Event.objects.filter(subject_type="apikey", subject_id__in=keys)


def filter_events(
    events: QuerySet[Event],
    *,
    kind: str = "",
    severity: str = "",
    subject_type: str = "",
    subject_id: str = "",
    actor: str = "",
    text: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
) -> QuerySet[Event]:
    """Narrow *events*; an empty value does not narrow.

    *kind* is a whole kind (`instance.moved`) or a family ending in a dot (`instance.`); each word of *text* is looked
    for in subject, reason, kind and actor; *since* is included, *until* is not.
    """
    family = "kind__startswith" if kind.endswith(".") else "kind"
    exact = {"severity": severity, "subject_type": subject_type, "subject_id": subject_id, "actor": actor}
    events = narrowed(events, **exact, **{family: kind}, at__gte=since, at__lt=until)
    return containing(events, text, "subject", "reason", "kind", "actor")


def event_kinds() -> list[str]:
    """Every kind that has occurred, for a filter's choices."""
    return list(Event.objects.order_by("kind").values_list("kind", flat=True).distinct())


def events_about(subject: Model, limit: int = 20) -> list[Event]:
    """The newest events about one row, such as an instance's moves."""
    return list(
        Event.objects.filter(subject_type=subject._meta.model_name, subject_id=str(subject.pk)).order_by("-pk")[:limit]
    )
