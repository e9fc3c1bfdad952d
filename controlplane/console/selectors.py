"""What pages read of the database."""

from datetime import datetime
from typing import Any

from django.db.models import Max, QuerySet, Sum
from django.urls import reverse

from controlplane.accounts.models import User
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.state import INSTANCE_FIELDS, LiveState, status_of
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, GpuType, Instance, Model, Region
from controlplane.fleet.selectors import instances
from controlplane.gateway.models import LedgerRow

STATUS_ORDER = (
    "failed",
    "unreachable",
    "saturated",
    "draining",
    "loading",
    "provisioning",
    "ready",
    "sleeping",
    "stopped",
)


def queue_bounds() -> dict[tuple[str, str], int]:
    """Requests that each endpoint (model, region) holds at most: the sum over its active deployments."""
    rows = Deployment.objects.filter(active=True).values_list("model__name", "region__name")
    return {(model, region): bound for model, region, bound in rows.annotate(Sum("queue_bound")).order_by()}


def model_names() -> list[str]:
    return list(Model.objects.filter(active=True).values_list("name", flat=True))


def region_names() -> list[tuple[str, str]]:
    return list(Region.objects.filter(active=True).values_list("name", "title"))


def place_titles() -> dict[str, str]:
    """Titles of regions and GPU types by their names, those not in use too: plans and moves of the past name them."""
    return {**dict(Region.objects.values_list("name", "title")), **dict(GpuType.objects.values_list("name", "title"))}


# Instances


def instance_row(instance: Instance, live: dict[str, Any] | None) -> dict[str, Any]:
    """An instance as tables show it: its row, with the gateway's live numbers (*live*, or None) laid over it.

    The database is newer on the state itself (an action shows at once), the gateway on how the instance answers.
    """
    known = live is not None
    live = dict.fromkeys(INSTANCE_FIELDS) | (live or {})
    state = str(instance.state)
    status = status_of(state, live["reachable"], live["kv_ratio"], live["waiting"])
    return {
        **live,
        "id": instance.pk,
        "name": instance.name,
        "model": instance.deployment.model.name,
        "region": instance.deployment.region.name,
        "gpu_type": instance.deployment.gpu_type.name,
        "state": state,
        "status": status if known else state,
        "state_since": instance.state_changed_at.timestamp(),
        "max_num_seqs": instance.deployment.max_num_seqs,
    }


def instance_rows(state: LiveState, *, model: str = "", region: str = "", text: str = "") -> list[dict[str, Any]]:
    """Every instance that fits, by name, with live numbers where there are some."""
    live = state.instance_rows()
    return [instance_row(row, live.get(row.pk)) for row in instances(model=model, region=region, text=text)]


def worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What needs an eye first; among equals the fullest, then by name. Stopped ones are last."""
    rank = {status: at for at, status in enumerate(STATUS_ORDER)}
    return sorted(rows, key=lambda row: (rank.get(row["status"], len(rank)), -(row["kv_ratio"] or 0), row["name"]))


# Requests


def visible_requests(user: User) -> QuerySet[LedgerRow]:
    """Requests of the tenants that *user* may see: every one for the fleet's people."""
    return LedgerRow.objects.filter(tenant__in=visible_tenants(user)).select_related("tenant", "api_key")


def filter_requests(
    rows: QuerySet[LedgerRow],
    *,
    model: str = "",
    outcome: str = "",
    tenant: str = "",
    instance: str = "",
    slo_class: str = "",
    request_id: str = "",
    since: datetime | None = None,
) -> QuerySet[LedgerRow]:
    """Narrow *rows*; an empty value does not narrow. *request_id* is looked for as a beginning."""
    exact = {"model": model, "outcome": outcome, "tenant__name": tenant, "instance": instance, "slo_class": slo_class}
    rows = rows.filter(**{name: value for name, value in exact.items() if value})
    if request_id:
        rows = rows.filter(request_id__startswith=request_id)
    if since:
        rows = rows.filter(arrived_at__gte=since)
    return rows


# Events

SIGN_INS = "sign_in"
VERBS = {
    "api_key.created": "API key created",
    "api_key.revoked": "API key revoked",
    "length_version.promoted": "promoted",
    "length_version.rejected": "rejected",
    "length_version.restored": "active again",
    "length_version.rolled_back": "rolled back",
    "length_version.trained": "trained, in shadow",
    "length.drift": "lengths drift",
    "length_version.training_asked": "training of a length model asked for",
    "plan.approved": "plan approved",
    "plan.rejected": "plan rejected",
    "plan.applied": "plan applied",
    "scaling.added": "added by scaling",
    "scaling.removed": "taken away by scaling",
    "scaling.refused": "a move could not be made",
    "sign_in.failed": "sign-in failed",
    "sign_in.done": "signed in",
    "sign_in_link.created": "sign-in link made",
    "sign_in_link.used": "signed in by link",
}


def event_title(event: Event, with_subject: bool = True) -> str:
    """What happened, in few words: `h100-1: ready to draining`, `CI key (ph_1234…): API key revoked`."""
    if event.kind == "instance.moved":
        words = f"{event.before.get('state', '?')} to {event.after.get('state', '?')}"
    else:
        words = VERBS.get(event.kind) or event.kind.partition(".")[2].replace("_", " ") or event.kind
    return f"{event.subject}: {words}" if event.subject and with_subject else words[:1].upper() + words[1:]


def event_row(event: Event, with_subject: bool = True) -> dict[str, Any]:
    """An event as lists show it and as the live connection carries it; its subject is left out on the subject's page."""
    return {
        "id": event.pk,
        "at": event.at.timestamp(),
        "kind": event.kind,
        "severity": event.severity,
        "actor": event.actor,
        "title": event_title(event, with_subject),
        "reason": event.reason,
        "href": reverse("console:event", args=[event.pk]),
    }


def newest_event_id() -> int:
    return Event.objects.aggregate(newest=Max("pk"))["newest"] or 0


def events_after(event_id: int, limit: int) -> list[dict[str, Any]]:
    """Events newer than *event_id*, oldest first, at most *limit* of the newest."""
    newest = Event.objects.filter(pk__gt=event_id).order_by("-pk")[:limit]
    return [event_row(event) for event in reversed(newest)]


def latest_events(limit: int) -> list[dict[str, Any]]:
    """The newest events of the fleet and its tenants; who signed in is left to the page of events."""
    events = Event.objects.exclude(kind__startswith=SIGN_INS).order_by("-pk")
    return [event_row(event) for event in events[:limit]]


def subject_href(event: Event) -> str | None:
    """The page of what *event* is about, if there is one."""
    match event.subject_type:
        case "instance":
            return instance_href(event.subject_id)
        case "scalingplan":
            return reverse("console:plan", args=[event.subject_id])
        case "lengthversion":
            return f"{reverse('console:lengths')}#versions"
    return None


def instance_href(instance_id: str) -> str | None:
    """The page of the instance that an event is about, if there still is one."""
    name = (
        Instance.objects.filter(pk=instance_id).values_list("name", flat=True).first()
        if instance_id.isdecimal()
        else None
    )
    return reverse("console:instance", args=[name]) if name else None
