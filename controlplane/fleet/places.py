"""Placement of instances: deployments and nodes are locked, then their GPUs counted. Every start comes through here.

Free GPUs of a node are counted from its instances, so a count holds only under the lock. Locks are always taken in the same
order: deployments, nodes, swap groups, finally (in `services`) instances, and by key within each. Code that moves several
instances in one transaction locks all places of their model before the first move: locking one by one would deadlock.
"""

import re
from collections import Counter
from collections.abc import Iterable

from django.db.models import Q, QuerySet, Sum

from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Deployment, Instance, Node, Region
from controlplane.fleet.models.instances import gpus_of


def obstacle(instance: Instance) -> str:
    """Return why automation, or even an operator, may not start *instance* where it is; empty if it may.

    Everything that starts instances asks here: `services.start` and `wake`, and before them the code that chooses what to
    start.
    """
    if instance.held:
        return f"{instance.name} is held by {instance.held}: an operator's start lifts that"
    return _dark(instance.deployment.region) or cordon_of(instance)


def _dark(region: Region) -> str:
    if region.dark_since is None:
        return ""
    return f"{region} is dark since {region.dark_since:%H:%M} UTC: nothing is started there until it answers"


def cordon_of(instance: Instance) -> str:
    """Return the obstacle to a start by an operator; empty for none."""
    for place in (instance.node, instance.deployment.region):
        if place is not None and place.cordoned:
            return f"{place} is cordoned by {place.cordoned}: uncordon it first"
    return ""


def bounds(deployments: Iterable[Deployment]) -> dict[int, tuple[int, int]]:
    """Return (minimum, maximum) instances that automation may plan for each of *deployments*, by key.

    A held instance keeps its place, and where it is cordoned or dark nothing is added: floor, strategies, plans, rollouts
    and simulations of what comes go by these, not by the deployment's own bounds.
    """
    rows = list(deployments)
    held = _counts(Instance.objects.exclude(held="").filter(state=InstanceState.STOPPED), rows)
    cordoned = set(Node.objects.exclude(cordoned="").filter(active=True).values_list("region_id", "gpu_type_id"))
    shut = {row.pk for row in rows if row.region.cordoned or row.region.dark_since}
    narrow = [row for row in rows if row.pk in shut or (row.region_id, row.gpu_type_id) in cordoned]
    present = _counts(Instance.objects.present(), narrow) if narrow else Counter()
    made = {row.pk: max(0, row.max_instances - held[row.pk]) for row in rows}
    for row in narrow:
        room = 0 if row.pk in shut else _room(row)
        made[row.pk] = min(made[row.pk], present[row.pk] + room)
    return {row.pk: (min(row.min_instances, made[row.pk]), made[row.pk]) for row in rows}


def _room(deployment: Deployment) -> int:
    """Instances of *deployment* that nodes which are not cordoned have free GPUs for."""
    free = (node.free_gpus() - _held_gpus(node) for node in _nodes(deployment) if not node.cordoned)
    return sum(max(0, gpus) // deployment.tensor_parallel for gpus in free)


def _counts(instances: QuerySet[Instance], deployments: list[Deployment]) -> Counter[int]:
    return Counter(instances.filter(deployment__in=deployments).order_by().values_list("deployment_id", flat=True))


class NoRoom(ActionError):
    """Error when no node has the GPUs; the text says what is free."""


def lock(deployments: QuerySet[Deployment]) -> list[Deployment]:
    """Lock *deployments* and every node that one of them could use, until the transaction ends.

    Keys never change, so rows that refer to a locked one may still be written by others (`FOR NO KEY UPDATE`).
    """
    rows = deployments.select_for_update(of=("self",), no_key=True).select_related("model", "region", "gpu_type")
    locked = list(rows.order_by("pk"))
    of_them = Q(pk__in=())
    for region, gpu_type in {(row.region_id, row.gpu_type_id) for row in locked}:
        of_them |= Q(region=region, gpu_type=gpu_type)
    nodes = Node.objects.select_for_update(no_key=True).filter(of_them).order_by("pk")
    list(nodes.values_list("pk", flat=True))
    return locked


def pick(deployment: Deployment, *, by_operator: bool = False) -> Node | None:
    """Return the fullest node with enough GPUs, to avoid fragmentation; None without nodes.

    Held instances keep theirs, but for what an operator adds. *deployment* is locked. Raises NoRoom when no node has the
    GPUs.
    """
    if not by_operator and (why := _dark(deployment.region)):
        raise NoRoom(why)
    if deployment.region.cordoned:
        raise NoRoom(f"{deployment.region} is cordoned by {deployment.region.cordoned}")
    nodes = list(_nodes(deployment))
    if not nodes:
        return None
    free = [
        (node.free_gpus() - (0 if by_operator else _held_gpus(node)), node.pk, node)
        for node in nodes
        if not node.cordoned
    ]
    if not free:
        raise NoRoom("every node is cordoned")
    fitting = [candidate for candidate in free if candidate[0] >= deployment.tensor_parallel]
    if not fitting:
        largest = max(count for count, _, _ in free)
        raise NoRoom(f"no node has {deployment.tensor_parallel} free GPUs, {largest} at most")
    return min(fitting)[2]


def keeps(instance: Instance) -> bool:
    """Return whether *instance*, whose deployment is locked, can start on its node."""
    node, deployment = instance.node, instance.deployment
    if node is None:
        return True
    if node.cordoned:
        return False
    return node in _nodes(deployment) and node.free_gpus(without=instance) >= deployment.tensor_parallel


def new_instance(deployment: Deployment) -> Instance:
    """Create a further instance of *deployment*, which is locked, to be started.

    Raises NoRoom without free GPUs, ActionError without a sibling to copy, ValidationError when there can be none.
    """
    siblings = Instance.objects.launched().filter(deployment__model=deployment.model)
    here = siblings.filter(deployment=deployment)
    launchers = Counter((here if here.exists() else siblings).values_list("launcher", flat=True))
    if not launchers:
        raise ActionError("Pilothouse has started none of its instances, so it does not know how to start one")
    node, usual = pick(deployment), launchers.most_common(1)[0][0]
    row = Instance(
        name=free_name(deployment),
        deployment=deployment,
        launcher=node.launcher(usual) if node else usual,
        node=node,
    )
    row.full_clean()
    row.save()
    return row


def free_name(deployment: Deployment) -> str:
    """Return `<model>-<region>-<number>` with the first free number."""
    model = re.sub(r"[^A-Za-z0-9_-]+", "-", deployment.model.name).strip("-")[:40]
    return first_free(Instance, f"{model}-{deployment.region.name}"[:70])


def first_free(kind: type[Instance] | type[Node], base: str) -> str:
    """Return *base* with the first number that no row of *kind* has."""
    taken = set(kind.objects.filter(name__startswith=f"{base}-").values_list("name", flat=True))
    number = 1
    while f"{base}-{number}" in taken:
        number += 1
    return f"{base}-{number}"


def plannable_gpus(node: Node) -> int:
    """Return the GPUs of *node* for instances: those in use if it is cordoned, else all but held and cordoned ones.

    None in a dark region.
    """
    if node.region.dark_since:
        return 0
    usable = node.gpu_count - len(node.cordoned_gpus())
    if node.cordoned or node.region.cordoned:
        return usable - max(0, node.free_gpus())
    return usable - _held_gpus(node)


def _held_gpus(node: Node) -> int:
    held = node.instances.exclude(held="").filter(state=InstanceState.STOPPED, swap_group=None)
    return held.aggregate(gpus=Sum(gpus_of()))["gpus"] or 0


def _nodes(deployment: Deployment) -> QuerySet[Node]:
    return Node.objects.filter(region=deployment.region, gpu_type=deployment.gpu_type, active=True).order_by("pk")
