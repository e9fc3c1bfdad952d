"""Events as lists show them; the steps of one move of an instance are one row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import CharField, Max, Q, QuerySet
from django.db.models import Model as Row
from django.db.models.functions import Cast
from django.urls import reverse

from controlplane.console.formats import duration
from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile
from controlplane.planning.models import ScalingPlan, ScalingPolicy

SIGN_INS = "sign_in"
STEP = "instance.moved"
REQUESTS = tuple(f"instance.{verb}_requested" for verb in ("start", "stop", "sleep", "wake"))
ROUTINE = (STEP, *REQUESTS)
"""Steps that follow from a decision; shown as news only if a person took them, or on failure."""


VERBS = {
    "api_key.created": "API key created",
    "api_key.revoked": "API key revoked",
    "length_version.promoted": "promoted",
    "length_version.rejected": "rejected",
    "length_version.restored": "active again",
    "length_version.rolled_back": "rolled back",
    "length_version.shadow": "in shadow again",
    "length_version.trained": "trained, in shadow",
    "length_version.training_asked": "training of a length model asked for",
    "model.deployed": "deployed",
    "model.bundle_switched": "policy bundle switched",
    "model.parts_switched": "parts of its policy switched",
    "plan.approved": "plan approved",
    "plan.rejected": "plan rejected",
    "plan.goal_out_of_reach": "goal out of reach",
    "plan.in_force": "plan in force",
    "plan.carried_out": "plan carried out",
    "queue.evicted": "requests evicted for a group",
    "queue_group.pinned": "request group pinned",
    "queue_group.unpinned": "request group unpinned",
    "queue_group.bumped": "request group bumped",
    "queue_group.held": "request group held",
    "queue_group.released": "request group released",
    "queue_group.evicted": "request group evicted",
    "queue_group.restored": "request group restored",
    "rollout.started": "rollout of changed settings begins",
    "rollout.succeeded": "rollout done",
    "rollout.failed": "rollout failed",
    "rollout.cancelled": "rollout cancelled",
    "rollout.goes_back": "rollout goes back",
    "rollout.rolled_back": "rolled back",
    "scaling.added": "added by scaling",
    "scaling.removed": "removed by scaling",
    "scaling.refused": "a move could not be made",
    "swap.started": "to have the GPUs that it shares",
    "swap.succeeded": "has the GPUs that it shares",
    "swap.failed": "does not get the GPUs that it shares",
    "swap.group_created": "shares its GPUs",
    "sign_in.failed": "sign-in failed",
    "sign_in.done": "signed in",
    "sign_in_link.created": "sign-in link made",
    "sign_in_link.used": "signed in by link",
}


def event_title(event: Event, with_subject: bool = True) -> str:
    """Return the event in few words: `h100-1: ready to draining`, `CI key (ph_1234…): API key revoked`."""
    if event.kind == STEP:
        words = f"{event.before.get('state', '?')} to {event.after.get('state', '?')}"
    else:
        words = VERBS.get(event.kind) or event.kind.partition(".")[2].replace("_", " ") or event.kind
    return f"{event.subject}: {words}" if event.subject and with_subject else words[:1].upper() + words[1:]


# Kinds of subjects that belong to one model, and how to come from their rows to its name.
SUBJECTS_OF_MODELS: dict[str, tuple[type[Row], str]] = {
    str(row._meta.model_name): (row, path)
    for row, path in (
        (Instance, "deployment__model__name"),
        (Deployment, "model__name"),
        (Model, "name"),
        (PerformanceProfile, "model__name"),
        (ScalingPlan, "model__name"),
        (ScalingPolicy, "model__name"),
    )
}


def events_of_model(events: QuerySet[Event], model: str) -> QuerySet[Event]:
    """*events* about *model*, its instances and plans, and those that concern the whole fleet."""
    concerned = ~Q(subject_type__in=SUBJECTS_OF_MODELS)
    for kind, (row, path) in SUBJECTS_OF_MODELS.items():
        keys = row._default_manager.order_by().filter(**{path: model}).values_list(Cast("pk", CharField()))
        concerned |= Q(subject_type=kind, subject_id__in=keys)
    return events.filter(concerned)


def event_row(event: Event, with_subject: bool = True, model: str = "") -> dict[str, Any]:
    """An event as lists show it; its subject is left out on the subject's page."""
    return {
        "id": event.pk,
        "at": event.at.timestamp(),
        "kind": event.kind,
        "severity": event.severity,
        "actor": event.actor,
        "title": event_title(event, with_subject),
        "reason": event.reason,
        "href": reverse("console:event", args=[event.pk]),
        "model": model,
    }


def newest_event_id() -> int:
    return Event.objects.aggregate(newest=Max("pk"))["newest"] or 0


def latest_events(limit: int, model: str = "") -> list[dict[str, Any]]:
    """The newest decisions and faults of the fleet and its tenants, or of *model* and the fleet; steps that follow from a
    decision, and who signed in, are left to the events' own page."""
    events = Event.objects.exclude(kind__startswith=SIGN_INS).order_by("-pk")
    events = events.exclude(kind__in=ROUTINE, severity=Severity.INFO, user__isnull=True)
    if not model:
        return [event_row(event) for event in events[:limit]]
    rows = events_of_model(events, model)[:limit]
    return [event_row(event, model=model if event.subject_type in SUBJECTS_OF_MODELS else "") for event in rows]


def subject_href(event: Event) -> str | None:
    """The page of what *event* is about, if there is one."""
    match event.subject_type:
        case "instance":
            return instance_href(event.subject_id)
        case "scalingplan":
            return reverse("console:plan", args=[event.subject_id])
        case "deployment":
            return deployment_href(event.subject_id)
        case "jobrow":
            return reverse("console:system")
        case "setting":
            return reverse("console:settings")
        case "lengthversion":
            return f"{reverse('console:lengths')}#versions"
    return None


def deployment_href(deployment_id: str) -> str | None:
    """The instances of the deployment that an event is about, if there still is one."""
    rows = Deployment.objects.filter(pk=deployment_id) if deployment_id.isdecimal() else Deployment.objects.none()
    row = rows.values("model__name", "region__name").first()
    query = row and urlencode({"model": row["model__name"], "region": row["region__name"]})
    return f"{reverse('console:instances')}?{query}" if query else None


def instance_href(instance_id: str) -> str | None:
    """The page of the instance that an event is about, if there still is one."""
    name = (
        Instance.objects.filter(pk=instance_id).values_list("name", flat=True).first()
        if instance_id.isdecimal()
        else None
    )
    return reverse("console:instance", args=[name]) if name else None


PASSING = frozenset({InstanceState.PROVISIONING, InstanceState.LOADING, InstanceState.DRAINING})
"""States that an instance is on its way through."""
DECISIONS = ("scaling.added", "scaling.removed")
KINDS = frozenset({*ROUTINE, *DECISIONS})
SAME_MOVE = timedelta(seconds=60)  # between a decision or request and the step that carries it out
WORST_FIRST = (Severity.CRITICAL, Severity.WARNING)


@dataclass(slots=True)
class Move:
    """Events of one move of one instance, newest first."""

    events: list[Event] = field(default_factory=list)

    def takes(self, older: Event) -> bool:
        """Whether *older*, of the same instance, is a step of this move before those that it has."""
        soon = self.events[-1].at - older.at <= SAME_MOVE
        if older.kind in DECISIONS:
            return soon and not any(event.kind in DECISIONS for event in self.events)
        if older.kind in REQUESTS:
            return soon
        state = older.after.get("state")
        first = next((event for event in reversed(self.events) if event.kind == STEP), None)
        if first is None:  # the decision was written down after the step that begins to carry it out
            return soon and state in PASSING
        return state in PASSING and first.before.get("state") == state

    def row(self) -> dict[str, Any]:
        """As `event_row`; the decision or first step, with what came of it, and *steps*, oldest first."""
        newest, oldest = self.events[0], self.events[-1]
        head = next((event for event in self.events if event.kind in DECISIONS), oldest)
        row = event_row(head) | {"at": newest.at.timestamp(), "actor": head.actor, "steps": []}
        if len(self.events) == 1:
            return row
        steps = [event for event in reversed(self.events) if event is not head or head.kind == STEP]
        moved = [step for step in steps if step.kind == STEP]
        if moved:
            state = moved[-1].after.get("state", "?")
            row["title"] = f"{head.subject}: {moved[0].before.get('state', '?')} to {state}"
            if head.kind in DECISIONS:
                row["title"] = f"{event_title(head)}, {'still' if state in PASSING else 'now'} {state}"
            if state not in PASSING:
                row["took"] = duration((newest.at - oldest.at).total_seconds())
        row["severity"] = next(
            (worst for worst in WORST_FIRST if worst in {e.severity for e in self.events}), head.severity
        )
        if newest.severity == Severity.CRITICAL:
            row["reason"] = newest.reason  # what went wrong matters more than why it began
        row["steps"] = [event_row(step, with_subject=False) for step in steps]
        return row


def folded(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Rows for *events*, newest first, with the steps of each move folded into one, at the place of its newest event."""
    moves: list[Move] = []
    of_instance: dict[str, Move] = {}
    for event in events:
        steps = event.subject_type == "instance" and event.kind in KINDS
        move = of_instance.get(event.subject_id) if steps else None
        if move is None or not move.takes(event):
            move = Move()
            moves.append(move)
            if steps:
                of_instance[event.subject_id] = move
        move.events.append(event)
    return [move.row() for move in moves]
