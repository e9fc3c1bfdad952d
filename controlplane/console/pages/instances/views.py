"""Instances: the list, one instance, and its actions."""

from datetime import timedelta

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.instances.charts import instance_charts
from controlplane.console.selectors.events import event_row
from controlplane.console.selectors.instances import instance_row, instance_rows, worst_first
from controlplane.events.selectors import events_about
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import Action
from controlplane.fleet.models import Instance
from controlplane.fleet.models.instances import OF_VLLM
from controlplane.fleet.places import cordon_of
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.rollouts.selectors import statuses
from controlplane.fleet.selectors import instances as instances_with_all
from controlplane.fleet.selectors import possible_actions, recent_commands
from controlplane.fleet.swaps.selectors import statuses as swap_statuses
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.selectors import prefix_hits
from controlplane.resources.filters import CHART_RANGE, Filters
from controlplane.resources.instances import INSTANCES

REQUESTS_SHOWN = 10
HITS_OVER = timedelta(hours=1)
LOG_LINES_SHOWN = 100


@require_safe
@fleet_role(Role.VIEWER)
def instances(request: HttpRequest) -> HttpResponseBase:
    query, state = request.GET, feed.state()
    place = query.get("model", ""), query.get("region", "")
    return list_page(
        request,
        INSTANCES,
        lambda rows: worst_first(instance_rows(state, rows)),
        rollouts=[status for status in statuses(*place) if status.needs_attention],
        swap_groups=swap_statuses(*place),
    )


@require_safe
@fleet_role(Role.VIEWER)
def instance(request: HttpRequest, name: str) -> HttpResponseBase:
    row = get_object_or_404(instances_with_all(), name=name)
    state = feed.state()
    filters = Filters(request.GET, CHART_RANGE)
    charts = instance_charts(state, filters["range"], row)
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
        "charts": charts,
        "events": [event_row(event, with_subject=False) for event in events_about(row, limit=8)],
        "requests": LedgerRow.objects.select_related("tenant").filter(instance=row.name)[:REQUESTS_SHOWN],
        "actions": _actions(row) if may(request, Role.OPERATOR) else [],
        "cordoned": cordon_of(row),
        "commands": [
            command for command in recent_commands(row, 3) if command.state in ("pending", "running", "failed")
        ],
    }
    return render(request, "console/instances/instance.html", context)


def _actions(row: Instance) -> list[Action]:
    """Return the actions allowed now; drain and resume first, stop last."""
    return sorted(possible_actions(row), key=lambda action: (action == Action.STOP, list(Action).index(action)))
