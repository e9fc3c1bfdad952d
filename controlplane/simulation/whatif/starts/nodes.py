"""What changes name of the fleet's rows: instances that are lost with a node, and recorded graphs of applications."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Node
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.supply import names_by_group
from scheduling.simulation.scenario.fleet import gpus_as_type

RECORDED = "application:"
"""Begins a graph that is named by the key of a recorded application."""
FIRST = (InstanceState.READY, InstanceState.DRAINING)
"""As a fork gives its places out: these before what starts, and what sleeps last."""


@dataclass(slots=True)
class NodeOf:
    """A node: the names in the scenario of its instances and of the empty places on its free GPUs; and how many instances of
    each model it has."""

    name: str
    region: str
    instances: list[str] = field(default_factory=list)
    models: Counter[str] = field(default_factory=Counter)

    @property
    def title(self) -> str:
        return f"{self.name}: {', '.join(f'{count} {model}' for model, count in sorted(self.models.items())) or 'free'}"


def nodes_of(values: dict[str, Any]) -> dict[str, NodeOf]:
    """Return the nodes of the fleet with their parts of the scenario *values*, made of it; by name, in order."""
    here = defaultdict(list)
    rows = Instance.objects.exclude(state__in=(InstanceState.STOPPED, InstanceState.FAILED))
    for row in rows.select_related("node", "deployment__model", "deployment__region", "deployment__gpu_type"):
        own = row.deployment
        gpu = gpus_as_type(own.gpu_type.name, own.tensor_parallel)
        here[own.model.name, own.region.name, gpu, row.swap_group_id is not None].append(row)
    nodes: dict[str, NodeOf] = {}
    free: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for fitted in Node.objects.filter(active=True).select_related("region", "gpu_type"):
        free[fitted.region.name, fitted.gpu_type.name].append((fitted.name, fitted.free_gpus()))
    for group, region, names, empty in names_by_group(values):
        gpu = gpus_as_type(group["gpu"], group.get("tensor_parallel", 1))
        instances = here[group["model"], region, gpu, group.get("sharing") is not None]
        instances.sort(key=_order)
        for name, row in zip(names, instances, strict=False):
            if row.node is not None:
                node = nodes.setdefault(row.node.name, NodeOf(row.node.name, region))
                node.instances.append(name)
                node.models[group["model"]] += 1
        if group.get("sharing") is None:
            left = iter(empty)
            for name, gpus in free[region, group["gpu"]]:
                if spare := list(islice(left, max(0, gpus) // group.get("tensor_parallel", 1))):
                    nodes.setdefault(name, NodeOf(name, region)).instances += spare
    return dict(sorted(nodes.items()))


def resolved(changes: Sequence[Mapping[str, Any]], values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return *changes*, in which a lost node takes down its instances in the scenario *values*, unless they are named, and
    runs of `application:KEY` have its recorded graph. Raise ChangeError without a record."""
    made = [_with_graph(dict(change)) for change in changes]
    lost = [one for one in made if one.get("what") == "node" and one.get("node") and not one.get("instances")]
    nodes = nodes_of(values) if lost and values.get("fleet") else {}
    for change in lost:
        if (node := nodes.get(change["node"])) is not None:
            change |= {"instances": node.instances, "region": node.region}
    return made


def _with_graph(change: dict[str, Any]) -> dict[str, Any]:
    runs = change.get("application")
    named = runs.get("graph") if isinstance(runs, dict) else None
    if not isinstance(runs, dict) or not isinstance(named, str) or not named.startswith(RECORDED):
        return change
    key = named.removeprefix(RECORDED)
    row = Application.objects.filter(pk=int(key) if key.isdecimal() else 0).first()
    graph = graph_of(row) if row is not None else None
    if graph is None or not graph.records:
        raise ChangeError("application.graph", "is not known, or has no records yet")
    return change | {"application": {**runs, "graph": json.loads(graph.to_json())}}


def _order(row: Instance) -> tuple[int, str]:
    state = InstanceState(row.state)
    if state in FIRST:
        return FIRST.index(state), row.name
    return (len(FIRST) + (state == InstanceState.SLEEPING)), row.name
