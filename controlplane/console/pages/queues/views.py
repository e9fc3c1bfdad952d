"""Queues: requests that wait, which will be late, what was reordered and why; and actions on one request group."""

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.formats import clock
from controlplane.console.live import history
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import held_panel
from controlplane.console.live.queues import TILES, worse_than_fcfs
from controlplane.console.live.state import LiveState
from controlplane.console.live.tiles import readings
from controlplane.console.live.views import live_context
from controlplane.console.pages.queues.lanes import GROUPED, lanes_of, legend
from controlplane.dispatch.queues import services
from controlplane.dispatch.queues.operations import GroupAction
from controlplane.fleet.models import Region
from controlplane.resources.filters import Filters, Hidden, Select, every, number

AXES = ("1", "5", "15", "60")  # minutes
USUAL_AXIS = "5"
ACTIONS = (
    ("pin", "Pin", "i", "pin", "Its place stays, whatever the global scheduler finds."),
    ("unpin", "Unpin", "i", "pin", "The global scheduler may move it again."),
    ("bump", "Bump", "u", "bump", "It is first after what runs, and stays there."),
)
"""Name, title, key and icon of each action on a group, and what it does."""


def filters_of(request: HttpRequest, state: LiveState) -> Filters:
    """Of the region asked for; else of the first one with request groups: a page that is redrawn stays with its region."""
    rows = state.tables["queues"]
    titles = dict(Region.objects.order_by("name").values_list("name", "title"))
    names = [row["region"] for row in rows] or list(titles)
    grouped = (row["region"] for row in state.tables["lanes"] if row["order"] == GROUPED and row["region"] in names)
    usual = min(grouped, key=names.index, default=next(iter(names), ""))
    region = Select("region", "Region", [(name, titles.get(name) or name) for name in names], usual)
    chosen = region.read(request.GET)
    groups, lanes = state.of_region("groups", chosen), state.of_region("lanes", chosen)
    return Filters(
        request.GET,
        region,
        Select("model", "Model", every("models", sorted({row["model"] for row in lanes}))),
        Select("class", "SLO class", every("classes", sorted({row["slo_class"] for row in groups})), free=80),
        Hidden("group", length=18),
        Hidden("colour", ("class", "model"), "class"),
        Hidden("minutes", AXES, USUAL_AXIS),
    )


@require_safe
@fleet_role(Role.VIEWER)
def queues(request: HttpRequest) -> HttpResponseBase:
    state = feed.state()
    filters = filters_of(request, state)
    region = filters["region"]
    reorders = state.tables["reorders"]
    groups = state.of_region("groups", region)
    row = next(iter(state.of_region("queues", region)), None)
    lanes = lanes_of(state, region, filters["model"], filters["class"], filters["colour"])
    context = {
        **live_context(state, f"queues:{region}" if region else ""),
        "filters": filters,
        "region": region,
        "row": row,
        "worse_than_fcfs": bool(
            row and row["attainment_ratio"] is not None and worse_than_fcfs(row["attainment_ratio"], row)
        ),
        "tiles": readings(TILES, row, f"queue/{region}"),
        "models": lanes,
        "legend": legend(groups, filters["colour"]),
        "peak": max((value or 0 for value in history.tile_series(state.history, "waiting")), default=0),
        "axes": AXES,
        "ticks": [f"+{clock(12.0 * int(filters['minutes']) * at)}" for at in range(1, 5)],
        "held": held_panel(state),
        "held_total": sum(held["count"] for held in state.tables["held"]),
        "reorders": reorders,
        "selected": selected(number(filters["group"]), groups),
    }
    return render(request, "console/queues/queues.html", context)


def selected(group: int | None, groups: list[Any]) -> dict[str, Any] | None:
    """Return the group of the side panel; only its number if it has left the queue."""
    if group is None:
        return None
    row: dict[str, Any] | None = next((row for row in groups if row["number"] == group), None)
    if row is None:
        return {"number": group, "gone": True}
    return row | {
        "of": sum(other["instance"] == row["instance"] for other in groups),
        "actions": [each for each in ACTIONS if each[0] != ("pin" if row["pinned"] else "unpin")],
        "lateness_s": -row["slack_s"] if row["slack_s"] is not None else None,
    }


@action(Role.OPERATOR, among=set(GroupAction), page="console:queues", needs_reason=False)
def act(form: ActionForm, number: int, action: str) -> str:
    """Pin, unpin or bump a group."""
    taken = GroupAction(action)
    return services.sentence(services.act(number, taken, form.user, form.reason), taken)
