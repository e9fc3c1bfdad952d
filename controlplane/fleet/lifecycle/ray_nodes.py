"""Nodes of a Ray cluster as rows: its machines join, change and are lost as Ray says.

A machine needs the custom resource `region:NAME` of one of our regions. Its GPU type is that of its resource `gpu:NAME`, or
Ray's name of its accelerator; its GPUs are counted by Ray. A lost node is not active, so that its instances are replaced
elsewhere; it is active again when it is back, and its row is removed where nothing refers to it.
"""

from collections import defaultdict
from collections.abc import Sequence

from django.core.exceptions import ValidationError
from django.db.models import ProtectedError
from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.models import GpuType, Node, Region
from workers.ray.launcher import Machine

ACTOR = "Ray"


class NotANode(ValueError):
    """A machine cannot be a node; the text says why in one sentence."""


def report(machines: Sequence[Machine]) -> list[str]:
    """Bring the rows up to date with *machines*; return a sentence on each node of theirs that cannot be one."""
    by_node = defaultdict(list)
    for machine in machines:
        if machine.alive:
            by_node[machine.node].append(machine)
    problems = []
    for name, alive in by_node.items():
        try:
            _report(name, alive)
        except NotANode as error:
            problems.append(f"{name}: {error}")
    for row in Node.objects.exclude(ray={}).exclude(name__in=by_node):
        _lose(row)
    return problems


def note_error(error: str) -> bool:
    """Note with the rows that Ray could not be asked; return whether there are any."""
    rows = list(Node.objects.exclude(ray={}))
    for row in rows:
        if row.ray.get("error") != error:
            Node.objects.filter(pk=row.pk).update(ray=row.ray | {"error": error})
    return bool(rows)


def _report(name: str, machines: Sequence[Machine]) -> None:
    first = min(machines, key=lambda machine: machine.id)
    region, gpu_type = _region(first.region), _gpu_type(first.gpu_type)
    groups: dict[str, int] = {}
    for machine in machines:
        for group, gpus in machine.groups.items():
            groups[group] = groups.get(group, 0) + gpus
    view = {"machines": len(machines), "lost": False, "groups": groups, "error": ""}
    gpus = sum(machine.gpus for machine in machines)
    row = Node.objects.filter(name=name).first()
    if row is None:
        row = Node(name=name, region=region, gpu_type=gpu_type, gpu_count=gpus, address=first.address, ray=view)
        try:
            row.full_clean()
        except ValidationError as error:
            raise NotANode(" ".join(error.messages)) from error
        row.reported_at = timezone.now()
        row.save()
        record("node.joined", row, actor=ACTOR, after={"region": region.name, "gpus": gpus, "address": first.address})
        return
    if row.host or (not row.ray and row.instances.exists()):
        raise NotANode("a node of this name is not Ray's: give Ray's another (ray start --node-name)")
    if (row.region_id, row.gpu_type_id) != (region.pk, gpu_type.pk):
        raise NotANode(f"it says {region.name} and {gpu_type.name}, its row {row.region.name} and {row.gpu_type.name}")
    fields = {"gpu_count": gpus, "address": first.address, "ray": view}
    if row.ray.get("lost"):
        fields["active"] = True
        record("node.back", row, actor=ACTOR, after={"address": first.address})
    Node.objects.filter(pk=row.pk).update(reported_at=timezone.now(), **fields)


def _lose(row: Node) -> None:
    try:
        row.delete()
    except ProtectedError:
        lost = row.ray | {"machines": 0, "lost": True, "groups": {}, "error": ""}
        Node.objects.filter(pk=row.pk).update(active=False, ray=lost, reported_at=timezone.now())
        if not row.ray.get("lost"):
            reason = "Ray has lost its machines"
            record("node.lost", row, actor=ACTOR, reason=reason, severity=Severity.CRITICAL)


def _region(name: str) -> Region:
    region = Region.objects.filter(name=name).first()
    if region is None:
        raise NotANode(f"there is no region {name!r} (its resource region:NAME)")
    return region


def _gpu_type(name: str) -> GpuType:
    """Return the GPU type *name*, or the only one whose name begins so."""
    types = GpuType.objects.filter(name__istartswith=name.lower().replace("_", "-")) if name else GpuType.objects.none()
    exact = [each for each in types if each.name == name]
    if len(found := exact or list(types)) != 1:
        raise NotANode(f"{name or 'nothing'!r} names no GPU type (its resource gpu:NAME)")
    return found[0]
