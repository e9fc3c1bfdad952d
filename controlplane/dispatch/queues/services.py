"""Operators' actions on request groups, from the console or by REST; each is an event with before and after."""

from typing import Any

from controlplane.accounts.models import User
from controlplane.dispatch.queues.commands import ask
from controlplane.dispatch.queues.operations import DONE, GroupAction
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model


def act(number: int, action: GroupAction, user: User, reason: str = "", hold_s: float = 0.0) -> dict[str, Any]:
    """Do *action* on group *number* and record it; return the group's row as it was, and the price.

    Raises ActionError when the gateway objects, GatewaySilent (an ActionError) when none answers; then nothing is recorded.
    """
    if action == GroupAction.EVICT and not reason:
        raise ActionError("Say why it is evicted: requests that run start over")
    operator = user.get_username()
    done = ask("act", number=number, action=action.value, operator=operator, reason=reason, hold_s=hold_s)
    group, price = done["group"], done["price"]
    record(
        f"queue_group.{DONE[action].replace(' ', '_')}",
        Model.objects.filter(name=group["model"]).first(),
        actor=user,
        reason=reason,
        before=price["before"],
        after=price["after"],
        inputs={
            "group": number,
            **{name: group[name] for name in ("region", "instance", "place", "slo_class", "count", "tokens")},
            **({"hold_s": hold_s} if action == GroupAction.HOLD else {}),
            **({"evicted_requests": price["evicted"]} if action == GroupAction.EVICT else {}),
            "later_groups": price["later_groups"],
        },
    )
    return done


def sentence(done: dict[str, Any], action: GroupAction) -> str:
    """Return the action and its price as a sentence."""
    group, price = done["group"], done["price"]
    before, after = price["before"]["attainment_ratio"], price["after"]["attainment_ratio"]
    met = "stays" if before == after else f"{before:.1%} to"
    count = price["later_groups"]
    later = f"{count} group{'s start' if count > 1 else ' starts'} later; " if count else ""
    return f"Group {group['number']} is {DONE[action]}: {later}SLO met {met} {after:.1%}, as predicted."
