"""The fleet: regions, nodes, GPUs and instances; one node, one instance; and what is done with several of these."""

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import ActionForm, action, carried_out
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.operations import given
from controlplane.console.pages.fleet.charts import instance_charts
from controlplane.console.pages.fleet.tree import is_silent, tree
from controlplane.console.selectors.events import event_row
from controlplane.console.selectors.instances import instance_row, instance_rows, worst_first
from controlplane.events.selectors import events_about
from controlplane.fleet import selectors
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import Action, ActionError, InstanceState
from controlplane.fleet.minimums import minimums
from controlplane.fleet.models import Instance, Launcher, Node
from controlplane.fleet.models.instances import OF_VLLM
from controlplane.fleet.places import cordon_of
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.rollouts.selectors import statuses
from controlplane.fleet.selectors import instances as instances_with_all
from controlplane.fleet.selectors import possible_actions, recent_commands
from controlplane.fleet.spot import selectors as spot
from controlplane.fleet.spot.services import stop_donating as stop_spare_work
from controlplane.fleet.swaps.selectors import statuses as swap_statuses
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.selectors import prefix_hits
from controlplane.resources.filters import CHART_RANGE, Filters
from controlplane.resources.instances import IN_TREE, INSTANCES
from controlplane.resources.inventory import GPUS, NODES, STOCK

REQUESTS_SHOWN = 10
HITS_OVER = timedelta(hours=1)
LOG_LINES_SHOWN = 100
MAINTENANCE = "maintenance"
BULK = {
    each.verb: each
    for each in (*INSTANCES.operations, *NODES.operations)
    if each.verb in (Action.DRAIN, Action.STOP, Action.START, Action.RESTART, MAINTENANCE)
}
"""What is done with several instances at once, or with several nodes."""
AT_ONCE = 500


@require_safe
@fleet_role(Role.VIEWER)
def fleet(request: HttpRequest) -> HttpResponseBase:
    query, state = request.GET, feed.state()
    place = query.get("model", ""), query.get("region", "")
    live = {(row["model"], row["region"]): row["instances_ready"] for row in state.tables["endpoints"]}
    spare = list(spot.open_donations())
    return list_page(
        request,
        INSTANCES,
        lambda rows: worst_first(instance_rows(state, rows)),
        fold=(tree, IN_TREE),
        rollouts=[status for status in statuses(*place) if status.needs_attention],
        swap_groups=swap_statuses(*place),
        short=[(said, each.why) for key, each in minimums().items() if (said := each.short(live.get(key)))],
        spare=spare,
        spare_usd_per_hour=spot.offered_per_hour(spare),
        selects=may(request, Role.OPERATOR),
        bulk_actions=BULK.values(),
    )


@require_safe
@fleet_role(Role.VIEWER)
def node(request: HttpRequest, name: str) -> HttpResponseBase:
    row = get_object_or_404(selectors.nodes(), name=name)
    state, here = feed.state(), instances_with_all().filter(node=row)
    launchers = here.order_by().exclude(state=InstanceState.STOPPED).values_list("launcher", flat=True).distinct()
    context = {
        **live_context(state, "instances,events"),
        "node": row,
        "gpus": selectors.gpus_of(row),
        "silent": is_silent(row),
        "window": row.maintenance.under_way().first(),
        "launchers": sorted(Launcher(each).label for each in launchers),
        "rows": worst_first(instance_rows(state, here)),
        "columns": INSTANCES.named(*IN_TREE),
        "node_gpus": row.gpus.select_related("node"),
        "gpu_columns": GPUS.named("name", *GPUS.page[1:]),
        "stock": row.stock.all(),
        "stock_columns": STOCK.named(*STOCK.page),
    }
    return render(request, "console/fleet/node.html", context)


@require_safe
@fleet_role(Role.VIEWER)
def instance(request: HttpRequest, name: str) -> HttpResponseBase:
    row = get_object_or_404(instances_with_all(), name=name)
    state = feed.state()
    filters = Filters(request.GET, CHART_RANGE)
    charts = instance_charts(state, filters["range"], row)
    down = row.state in (InstanceState.STOPPED, InstanceState.FAILED)
    if (answer := of_charts(request, charts, f"{row.name}-{{}}")) is not None:
        return answer
    context = {
        **live_context(state, f"instance:{row.pk},events"),
        "filters": filters,
        "instance": row,
        "sharing": swap_statuses(name=row.swap_group.name)[0] if row.swap_group else None,
        "row": instance_row(row, state.instance_rows().get(row.pk)),
        "engine": row.engine,
        "profile": row.deployment.profile(),
        "prefix_hits": prefix_hits(timezone.now() - HITS_OVER, instance=row.name),
        "outdated": revisions.outdated([row]).get(row.pk, ()),
        # It may contain prompts.
        "log": engine_logs.read(row, LOG_LINES_SHOWN)
        if row.launcher in OF_VLLM and may(request, Role.OPERATOR)
        else None,
        "up": not down,
        "charts": [one for one in charts if not (down and one.empty)],
        "donation": spot.open_donations().filter(instance=row).first(),
        "reclaims": spot.reclaim_times(timezone.now()),
        "events": [event_row(event, with_subject=False) for event in events_about(row, limit=8)],
        "requests": LedgerRow.objects.select_related("tenant").filter(instance=row.name)[:REQUESTS_SHOWN],
        "actions": _actions(row) if may(request, Role.OPERATOR) else [],
        "cordoned": cordon_of(row),
        "commands": [
            command for command in recent_commands(row, 3) if command.state in ("pending", "running", "failed")
        ],
    }
    return render(request, "console/fleet/instance.html", context)


def _actions(row: Instance) -> list[Action]:
    """Return the actions allowed now; drain and resume first, stop last."""
    return sorted(possible_actions(row), key=lambda action: (action == Action.STOP, list(Action).index(action)))


@require_POST
@fleet_role(Role.OPERATOR)
def bulk(request: HttpRequest) -> HttpResponse:
    """Do one thing with each selected instance or node. Say what was done, and what was refused and why."""

    def carry_out(form: ActionForm) -> str:
        keys = [int(key) for key in form.fields.getlist("instance") if key.isdecimal()]
        nodes = Node.objects.filter(name__in=form.fields.getlist("node"))
        act = BULK.get(form.fields.get("verb", ""))
        of: QuerySet[Any] = nodes if act and act.verb == MAINTENANCE else Instance.objects.filter(pk__in=keys)
        if act is None or not (rows := of.order_by("name")[:AT_ONCE]):
            raise ActionError("Select instances, or nodes for maintenance, and what to do with them")
        done, refused, label, needed = [], [], act.verb.capitalize(), given(act, form.fields)
        for row in rows:
            try:
                act.carry_out(row, form.user, form.reason, **needed)
                done.append(row.name)
            except ActionError as refusal:
                refused.append(str(refusal))
        if refused:
            messages.error(request, f"{len(refused)} of {len(rows)} refused: {'; '.join(refused)}.")
        if not done:
            raise ActionError(f"{label}: nothing is done")
        return f"{label}: {len(done)} of {len(rows)} in progress or done: {', '.join(done)}."

    return carried_out(request, carry_out, lambda: "console:fleet", "The instances are unchanged")


@action(Role.OPERATOR, page="console:fleet", unchanged="Instances are donated as before")
def stop_donating(form: ActionForm) -> str:
    """Donate nothing more, and stop what is donated."""
    return stop_spare_work(form.user, form.reason)
