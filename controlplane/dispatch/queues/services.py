"""Operators' actions on request groups, from the console or by REST; each is an event."""

from typing import Any

from controlplane.accounts.models import User
from controlplane.dispatch.queues.commands import ask
from controlplane.dispatch.queues.operations import DONE, GroupAction
from controlplane.events.services import record
from controlplane.fleet.models import Model


def act(number: int, action: GroupAction, user: User, reason: str = "") -> dict[str, Any]:
    """Do *action* on group *number* and record it; return the group's row as it was.

    Raises ActionError when the gateway objects, GatewaySilent (an ActionError) when none answers; then nothing is recorded.
    """
    group = ask("act", number=number, action=action.value, operator=user.get_username(), reason=reason)
    record(
        f"queue_group.{DONE[action]}",
        Model.objects.filter(name=group["model"]).first(),
        actor=user,
        reason=reason,
        before={"place": group["place"], "pinned": group["pinned"]},
        after={
            "place": 1 if action == GroupAction.BUMP else group["place"],
            "pinned": action != GroupAction.UNPIN,
        },
        inputs={
            "group": number,
            **{name: group[name] for name in ("region", "instance", "slo_class", "count", "tokens")},
        },
    )
    return group


def sentence(group: dict[str, Any], action: GroupAction) -> str:
    return f"Group {group['number']} is {DONE[action]}."
