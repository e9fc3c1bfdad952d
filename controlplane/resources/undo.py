"""The way back of an event: the operation that reverses it, or the values before it. Only what can be undone is offered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from controlplane.accounts.models import Role, User
from controlplane.accounts.services import revoke_api_key
from controlplane.alerts.services import ALERT_RULE
from controlplane.events import since
from controlplane.events.audit import kind_of
from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import BUDGET, KINDS, MEMBERSHIP, USER, Kind
from controlplane.fleet.models import Model
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import DEPLOYMENTS, GPUS, MODELS, NODES, REGIONS
from controlplane.resources.keys import KEYS
from controlplane.resources.resource import Operation, Resource
from controlplane.tunable import Tunable
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting

ACTIVATE: Final = Operation(
    "activate",
    fleet.activate,
    "It is offered again with the values that it had. Its instances are started one by one, or by the safety autoscaler.",
    Role.ADMIN,
)
REVOKE: Final = Operation("revoke", revoke_api_key, "Its requests are refused within seconds. This cannot be undone.")
Way = tuple[Resource, Operation]


def _of(resource: Resource, **verbs: str) -> Mapping[str, Way]:
    """Return, by kinds of events of *resource*, its operation that is named by its verb."""
    named = {each.verb: each for each in (*resource.operations, ACTIVATE, REVOKE)}
    row = kind_of(resource.model()) if resource.model else ""
    return {f"{row}.{kind}": (resource, named[verb]) for kind, verb in verbs.items()}


REVERSED: Final[dict[str, Way]] = {
    **_of(NODES, cordoned="uncordon", uncordoned="cordon"),
    **_of(REGIONS, cordoned="uncordon", uncordoned="cordon"),
    **_of(GPUS, cordoned="uncordon", uncordoned="cordon"),
    **_of(DEPLOYMENTS, created="undeploy", undeployed="activate", activated="undeploy"),
    **_of(MODELS, retired="activate", activated="retire"),
    **_of(INSTANCES, start_requested="stop", stop_requested="start", sleep_requested="wake", wake_requested="sleep"),
    **_of(KEYS, created="revoke"),
}
"""What reverses an event, by the event's kind."""
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


def undo_of(event: Event, may: Callable[[Role], bool]) -> Undo | None:
    """Return the way back of *event*; None without one, once it was taken, or without the role."""
    if event.kind == SETTING:
        return _setting(event) if may(Role.OPERATOR) and len(event.before) == 1 else None
    if event.kind in WRITTEN:
        return _row(WRITTEN[event.kind], event) if may(Role.ADMIN) else None
    later = Event.objects.filter(subject_type=event.subject_type, subject_id=event.subject_id, pk__gt=event.pk)
    if event.kind not in REVERSED or later.filter(kind__in=REVERSED).exists():
        return None
    resource, operation = REVERSED[event.kind]
    row: Any = resource.model and resource.model._default_manager.filter(pk=event.subject_id).first()
    if row is None or not may(operation.least):
        return None

    def carry_out(user: User, reason: str) -> str:
        done = operation.carry_out(row, user, reason)
        return done if isinstance(done, str) else f"{row}: {operation.verb} is done."

    return Undo(operation.verb.capitalize(), operation.about, carry_out)


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
        row = Setting.objects.filter(name=name, model=model).first() if event.inputs.get("first_value") else None
        if row is None:
            tuning.change(name, value, user, reason, model)
        else:  # it had no value of its own before
            tuning.reset(row, user, reason)
        return f"{event.subject} is set back: {_values(event)}."

    return Undo("Set back", f"{_values(event)}, within seconds.", carry_out)


def _values(event: Event) -> str:
    shown = ((name, event.after.get(name), value) for name, value in event.before.items())
    return ", ".join(f"{name} from {now!r} to {value!r}" for name, now, value in shown)
