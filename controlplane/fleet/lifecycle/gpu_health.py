"""GPUs that fail: cordoned when a server's last words name them, or when starts of two different models fail on them.

A failed start alone accuses nothing: the model may be at fault. Where a GPU is to blame, the failures of the instances that
it ended do not count, so that their next start, on other GPUs, waits for nothing.
"""

from collections.abc import Iterable

from django.db import transaction

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import STARTING, InstanceState
from controlplane.fleet.models import Gpu, Instance, Node
from workers.vllm.gpu_faults import Blame, Verdict

ACTOR = "GPU health"
ENDED = (InstanceState.FAILED, InstanceState.PROVISIONING)
"""States of an instance whose last server has failed: its next start may have been asked for."""


def addresses(node: Node) -> dict[str, str]:
    """Return the names of the GPUs of *node* by their addresses on the bus, as far as they are known."""
    return dict(node.gpus.exclude(address="").values_list("address", "name"))


@transaction.atomic
def judge(instance: Instance, verdict: Verdict) -> bool:
    """Hold *verdict* on the end of the failed *instance* against its GPUs, once; return whether one is to blame."""
    list(Node.objects.select_for_update(no_key=True).filter(pk__in=[instance.node_id]))  # one judgement at a time
    rows = Instance.objects.select_for_update(of=("self",)).select_related("deployment__model", "node")
    row = rows.get(pk=instance.pk)
    if not row.gpus or row.node is None or row.state not in ENDED:
        return False
    Instance.objects.filter(pk=row.pk).update(gpus=[])
    instance.gpus = []
    if verdict.blame == Blame.OTHER or (verdict.blame == Blame.SUSPECT and not _was_starting(row)):
        return False
    for name in verdict.gpus:
        Gpu.objects.get_or_create(node=row.node, name=name)
    guilty = False
    for gpu in Gpu.objects.select_for_update(of=("self",)).filter(node=row.node, name__in=verdict.gpus).order_by("pk"):
        gpu.failed_starts[row.deployment.model.name] = f"{row.name}: {verdict.words}"
        gpu.save(update_fields=["failed_starts"])
        if verdict.blame == Blame.SUSPECT and len(gpu.failed_starts) < 2:
            continue
        guilty = True
        _forgive(row.node, {row.name, *(each.partition(":")[0] for each in gpu.failed_starts.values())})
        if not gpu.cordoned:
            why = verdict.words if verdict.blame == Blame.GPU else f"starts of {_and(gpu.failed_starts)} failed on it"
            services.cordon(gpu, ACTOR, why)
    return guilty


def record_ready(instance: Instance) -> None:
    """Clear the GPUs of *instance*, whose start has succeeded, of suspicion."""
    if instance.gpus and instance.node_id:
        suspects = Gpu.objects.filter(node=instance.node_id, name__in=instance.gpus, cordoned="")
        suspects.exclude(failed_starts={}).update(failed_starts={})


def _was_starting(instance: Instance) -> bool:
    moves = Event.objects.filter(kind="instance.moved", subject_type="instance", subject_id=str(instance.pk))
    last = moves.filter(after__state=InstanceState.FAILED).order_by("-pk").first()
    return last is not None and last.before.get("state") in STARTING


def _forgive(node: Node, names: set[str]) -> None:
    """Forget the failures of the instances *names* of *node* that have failed."""
    failed = Instance.objects.filter(node=node, name__in=names, state__in=ENDED)
    failed.update(failures=0)


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))
