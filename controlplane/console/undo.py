"""The way back of an event: the operation that reverses it, or the values before it. Only what can be undone is offered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest

from controlplane.accounts.models import Role, User
from controlplane.alerts.services import ALERT_RULE
from controlplane.console.access.roles import may
from controlplane.console.operations import OFFERS, label_of, sentence_of
from controlplane.events import since
from controlplane.events.audit import kind_of
from controlplane.events.models import Event
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import BUDGET, KINDS, MEMBERSHIP, USER, Kind
from controlplane.fleet.models import Model
from controlplane.tunable import Tunable
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting

PLACES = ("node", "region", "gpu")
REVERSED: Final = {
    **{f"{place}.cordoned": (f"{place}s", "uncordon") for place in PLACES},
    **{f"{place}.uncordoned": (f"{place}s", "cordon") for place in PLACES},
    **{f"{row}.activated": (f"{row}s", verb) for row, verb in (("deployment", "undeploy"), ("model", "retire"))},
    "deployment.created": ("deployments", "undeploy"),
    "deployment.undeployed": ("deployments", "activate"),
    "model.retired": ("models", "activate"),
    "instance.start_requested": ("instances", "stop"),
    "instance.stop_requested": ("instances", "start"),
    "instance.sleep_requested": ("instances", "wake"),
    "instance.wake_requested": ("instances", "sleep"),
    "api_key.created": ("keys", "revoke"),
}
"""Name and verb of the operation that reverses an event, by the event's kind."""
WRITTEN: Final[dict[str, Kind]] = {
    f"{kind_of(kind.model())}.changed": kind for kind in (*KINDS, ALERT_RULE, BUDGET, USER, MEMBERSHIP)
}
"""Rows whose values can be set back, by the kind of the event of a change."""
SETTING: Final = "setting.changed"


@dataclass(frozen=True, slots=True)
class Undo:
    label: str
    about: str
    carry_out: Callable[[User, str], str]


def can_be_undone(kind: str) -> bool:
    """Whether events of *kind* have a way back; `undo_of` says whether it is still open."""
    return kind in REVERSED or kind in WRITTEN or kind == SETTING


def undo_of(event: Event, request: HttpRequest) -> Undo | None:
    """Return the way back of *event*; None without one, once it was taken, or without the role."""
    later = Event.objects.filter(subject_type=event.subject_type, subject=event.subject, pk__gt=event.pk)
    if event.kind == SETTING:
        return _setting(event) if may(request, Role.OPERATOR) and len(event.before) == 1 else None
    if event.kind in WRITTEN:
        return _row(WRITTEN[event.kind], event) if may(request, Role.ADMIN) else None
    if event.kind not in REVERSED or later.filter(kind__in=REVERSED).exists():
        return None
    name, verb = REVERSED[event.kind]
    offer = OFFERS[name]
    operation = offer.operation(verb)
    row = offer.rows(request).filter(pk=event.subject_id).first() if event.subject_id.isdecimal() else None
    if operation is None or row is None or not (offer.of_tenants or may(request, operation.least)):
        return None

    def carry_out(user: User, reason: str) -> str:
        return sentence_of(verb, operation.carry_out(row, user, reason))

    return Undo(label_of(name, verb), operation.about, carry_out)


def _row(kind: Kind, event: Event) -> Undo | None:
    """Set the fields of a row back; without secrets and other rows, which events do not name."""
    row: Any = kind.model._default_manager.filter(pk=event.subject_id).first()
    plain = set(kind.fields) - kind.secret - kind.named.keys()
    if row is None or not event.before or not event.before.keys() <= plain:
        return None

    def carry_out(user: User, reason: str) -> str:
        services.change(kind, row, event.before, user, reason, read_at=str(event.pk))
        return f"{row} is set back: {_values(event)}."

    return Undo("Set back", f"{_values(event)}.", carry_out)


def _setting(event: Event) -> Undo | None:
    ((name, value),) = event.before.items()
    _, _, of = event.subject.partition(" of ")
    model = Model.objects.filter(name=of).first() if of else None
    if name not in Tunable.model_fields or (of and model is None):
        return None

    def carry_out(user: User, reason: str) -> str:
        since.check(str(event.pk), Setting(name=name, model=model), fields=[name])
        tuning.change(name, value, user, reason, model)
        return f"{event.subject} is set back: {_values(event)}."

    return Undo("Set back", f"{_values(event)}, within seconds.", carry_out)


def _values(event: Event) -> str:
    shown = ((name, event.after.get(name), value) for name, value in event.before.items())
    return ", ".join(f"{name} from {now!r} to {value!r}" for name, now, value in shown)
