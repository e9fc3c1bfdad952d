"""Reads of events, limited to what a user may see."""

from django.contrib.auth.models import AnonymousUser
from django.db.models import Model, QuerySet

from controlplane.accounts.models import Role, User
from controlplane.accounts.selectors import visible_api_keys
from controlplane.events.models import Event


def visible_events(user: User | AnonymousUser) -> QuerySet[Event]:
    """Return all events for fleet users; for others, those about API keys of their tenants."""
    if not user.is_authenticated or not user.is_active:
        return Event.objects.none()
    if user.has_fleet_role(Role.VIEWER):
        return Event.objects.all()
    keys = [str(pk) for pk in visible_api_keys(user).values_list("pk", flat=True)]
    return Event.objects.filter(subject_type="apikey", subject_id__in=keys)


def kind_in_words(kind: str) -> str:
    """Return `Api key revoked` for `api_key.revoked`."""
    return kind.replace(".", " ").replace("_", " ").capitalize()


def event_kinds() -> list[str]:
    """Return every kind that has occurred, for a filter's choices."""
    return list(Event.objects.order_by("kind").values_list("kind", flat=True).distinct())


def events_about(subject: Model, limit: int = 20) -> list[Event]:
    """Return the newest events about one row, such as an instance's moves."""
    return list(
        Event.objects.filter(subject_type=subject._meta.model_name, subject_id=str(subject.pk)).order_by("-pk")[:limit]
    )
