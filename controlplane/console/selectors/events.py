"""Events as lists show them."""

from typing import Any
from urllib.parse import urlencode

from django.db.models import Max
from django.urls import reverse

from controlplane.events.models import Event, Severity
from controlplane.events.selectors import kind_in_words
from controlplane.fleet.models import Deployment, Instance

SIGN_INS = "sign_in"
STEP = "instance.moved"
REQUESTS = tuple(f"instance.{verb}_requested" for verb in ("start", "stop", "sleep", "wake"))
ROUTINE = (STEP, "plan.in_force", *REQUESTS)
"""Steps that follow from a decision; shown as news only if a person took them, or on failure."""


def event_title(event: Event, with_subject: bool = True) -> str:
    """Return the event in few words: `h100-1: ready to draining`, `CI key (ph_1234…): api key revoked`."""
    words = kind_in_words(event.kind)
    words = words[0].lower() + words[1:]
    if event.kind == STEP:
        words = f"{event.before.get('state', '?')} to {event.after.get('state', '?')}"
    return f"{event.subject}: {words}" if event.subject and with_subject else words[:1].upper() + words[1:]


def event_row(event: Event, with_subject: bool = True) -> dict[str, Any]:
    """An event as lists show it; its subject is left out on the subject's page."""
    return {
        "id": event.pk,
        "at": event.at.timestamp(),
        "kind": kind_in_words(event.kind),
        "of_kind": event.kind,
        "severity": event.severity,
        "actor": event.actor,
        "title": event_title(event, with_subject),
        "reason": event.reason,
        "href": reverse("console:event", args=[event.pk]),
    }


def newest_event_id() -> int:
    return Event.objects.aggregate(newest=Max("pk"))["newest"] or 0


def latest_events(limit: int) -> list[dict[str, Any]]:
    """The newest decisions and faults of the fleet and its tenants; steps that follow from a decision, and who signed in,
    are left to the events' own page."""
    events = Event.objects.exclude(kind__startswith=SIGN_INS).order_by("-pk")
    events = events.exclude(kind__in=ROUTINE, severity=Severity.INFO, user__isnull=True)
    return [event_row(event) for event in events[:limit]]


def subject_href(event: Event) -> str | None:
    """The page of what *event* is about, if there is one."""
    match event.subject_type:
        case "instance":
            return instance_href(event.subject_id)
        case "scalingplan":
            return f"{reverse('console:scaling')}?plan={event.subject_id}"
        case "deployment":
            return deployment_href(event.subject_id)
        case "jobrow":
            return reverse("console:system")
        case "setting":
            return reverse("console:settings")
        case "lengthversion":
            return f"{reverse('console:models')}#versions"
    return None


def deployment_href(deployment_id: str) -> str | None:
    """The instances of the deployment that an event is about, if there still is one."""
    rows = Deployment.objects.filter(pk=deployment_id) if deployment_id.isdecimal() else Deployment.objects.none()
    row = rows.values("model__name", "region__name").first()
    query = row and urlencode({"model": row["model__name"], "region": row["region__name"]})
    return f"{reverse('console:fleet')}?{query}" if query else None


def instance_href(instance_id: str) -> str | None:
    """The page of the instance that an event is about, if there still is one."""
    name = (
        Instance.objects.filter(pk=instance_id).values_list("name", flat=True).first()
        if instance_id.isdecimal()
        else None
    )
    return reverse("console:instance", args=[name]) if name else None
