"""Queues: requests that wait, which will be late, what was reordered and why; and actions on one request group."""

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role, Tenant
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.formats import clock, ordinal
from controlplane.console.live import at_door, history
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import held_panel
from controlplane.console.live.held_work import totals as held_totals
from controlplane.console.live.queues import TILES, worse_than_fcfs
from controlplane.console.live.state import LiveState
from controlplane.console.live.tiles import readings
from controlplane.console.live.views import live_context
from controlplane.console.pages.queues.lanes import GROUPED, lanes_of, legend
from controlplane.dispatch.queues import services
from controlplane.dispatch.queues.commands import ask
from controlplane.dispatch.queues.operations import GroupAction
from controlplane.dispatch.wire import GROUP_COLUMNS, REORDER_COLUMNS
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Region
from controlplane.resources.filters import Filters, Hidden, Select, every, number
from controlplane.resources.tables import Columns, moment, table

AXES = ("1", "5", "15", "60")  # minutes
USUAL_AXIS = "5"
HOLDS = (1, 5, 15)  # minutes
GROUPS: Columns = {name: name for name in GROUP_COLUMNS}
REORDERS: Columns = {"At (UTC)": moment("at"), **{name: name for name in REORDER_COLUMNS[1:-1]}}
WORDS = {
    "pin": ("Pin", "Its place stays, whatever the global scheduler finds."),
    "unpin": ("Unpin", "The global scheduler may move it again."),
    "bump": ("Bump", "It is first after what runs, and stays there."),
    "hold": ("Hold", "It will not be dispatched before then; groups behind it go first."),
    "release": ("Release", "It is no longer held."),
    "evict": ("Evict", "Its requests that run leave their instances, wait again, and it is last in its queue."),
}
"""Of an action: its button, and what it does."""
BUTTONS = {
    name: {"key": key, "icon": icon}
    for name, key, icon in (
        ("pin", "i", "pin"), ("unpin", "i", "pin"), ("bump", "u", "bump"), ("hold", "o", "hold"), ("release", "o", "hold"),
        ("evict", "e", "evict"),
    )
}  # fmt: skip


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
    if request.GET.get("format") == "csv":
        if request.GET.get("table") == "reorders":
            return table(REORDERS, reorders).csv("reorders")
        return table(GROUPS, groups).csv(f"queues-{region}")
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
        "held_total": held_totals(state.tables)["held"],
        **at_door.panel(state, region=region),
        "reorders": reorders,
        "selected": selected(number(filters["group"])),
        "holds": HOLDS,
    }
    return render(request, "console/queues/queues.html", context)


def selected(group: int | None) -> dict[str, Any] | None:
    """The group that the side panel is about: what its gateway says of it, or why it says nothing."""
    if group is None:
        return None
    try:
        detail = ask("detail", number=group)
    except ActionError as refusal:
        return {"number": group, "gone": f"{str(refusal).rstrip('.')}."}
    names = dict(Tenant.objects.filter(pk__in=[pk for pk, _ in detail["tenants"]]).values_list("pk", "name"))
    total = sum(requests for _, requests in detail["tenants"]) or 1
    actions = [
        {"name": name, "title": title, "about": about, "price": detail["prices"][name]} | BUTTONS[name]
        for name, (title, about) in WORDS.items()
        if name in detail["prices"]
    ]
    return detail | {
        "whose": [(names.get(pk, f"tenant {pk}"), requests / total) for pk, requests in detail["tenants"][:4]],
        "actions": actions,
        "ordinal": ordinal(detail["place"]),
        "lateness_s": -detail["slack_s"] if detail["slack_s"] is not None else None,
    }


@action(Role.OPERATOR, among=set(GroupAction), page="console:queues", needs_reason=False)
def act(form: ActionForm, number: int, action: str) -> str:
    """Pin, bump, hold or evict a group, or take that back; its price was shown before."""
    minutes = form.fields.get("minutes", "")
    hold_s = 60.0 * int(minutes) if minutes.isdecimal() and len(minutes) < 4 else 60.0 * HOLDS[0]
    done = services.act(number, GroupAction(action), form.user, form.reason, hold_s)
    return services.sentence(done, GroupAction(action))
