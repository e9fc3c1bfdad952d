"""Nodes: their GPUs, agents, weights and instances; and what is held and cordoned there."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from django.db.models import Count
from django.http import HttpRequest, HttpResponseBase
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.alerts.problems import AGENT_SILENT
from controlplane.console.access.roles import fleet_role
from controlplane.console.lists import list_page
from controlplane.fleet import selectors
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Launcher, Node, Region, Stock, StockState
from controlplane.fleet.places import bounds
from controlplane.resources.inventory import GPUS, NODES, REGIONS, STOCK

BAD = {InstanceState.FAILED, StockState.FAILED}
Counted = dict[int, list[tuple[int, str, bool]]]


def with_contents(nodes: Sequence[Any], opened: str) -> Sequence[Any]:
    """Note on *nodes* what is there, by its state, and all that *opened* has."""
    living = Instance.objects.exclude(state=InstanceState.STOPPED)
    instances, stock = _counts(living, InstanceState), _counts(Stock.objects.all(), StockState)
    launchers = defaultdict(set)
    for node, launcher in living.order_by().values_list("node", "launcher").distinct():
        launchers[node].add(Launcher(launcher).label)
    silent = timezone.now() - AGENT_SILENT
    for node in nodes:
        node.instances_here, node.stock_here = instances[node.pk], stock[node.pk]
        node.launchers = sorted(launchers[node.pk])
        node.silent = bool(node.host and node.reported_at and node.reported_at < silent)
        node.chosen = node.name == opened
    return nodes


def _counts(rows: Any, states: type[InstanceState] | type[StockState]) -> Counted:
    """Return numbers of *rows* by node: (how many, the state in words, whether that is bad), in the order of *states*."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for node, state, count in rows.order_by().values_list("node", "state").annotate(count=Count("pk")):
        counts[node][state] = count
    made: Counted = defaultdict(list)
    for node, by_state in counts.items():
        made[node] = [(by_state[state], state.label.lower(), state in BAD) for state in states if by_state[state]]
    return made


@require_safe
@fleet_role(Role.VIEWER)
def nodes(request: HttpRequest) -> HttpResponseBase:
    """Nodes, one of them open; what is held and cordoned, and which endpoints are below their minimum for that reason."""
    opened = request.GET.get("open", "")
    node = Node.objects.filter(name=opened).first()
    deployments = list(selectors.deployments().filter(active=True, model__active=True, region__active=True))
    allowed = bounds(deployments)
    return list_page(
        request,
        NODES,
        lambda rows: with_contents(rows, opened),
        opened="console/nodes/open.html",
        instances=selectors.instances().filter(node=node).order_by("name") if node else [],
        node_gpus=node.gpus.select_related("node") if node else [],
        node_gpu_columns=GPUS.named("name", *GPUS.page[1:]),
        stock=node.stock.all() if node else [],
        stock_columns=STOCK.named(*STOCK.page),
        held=selectors.instances().exclude(held="").order_by("name"),
        short=[(row, most) for row in deployments if (most := allowed[row.pk][1]) < row.min_instances],
        regions=Region.objects.filter(active=True),
        region_columns=REGIONS.named(*REGIONS.page),
        gpus=selectors.failed_gpus(),
        gpu_columns=GPUS.named(*GPUS.page),
    )
