"""Weights by node: a row for each model and adapter that servers of the node load, kept up to date where the disk is.

A pull is asked for in its row, and begun on the node itself. The message is only a notification: the next report takes up
what it finds asked for.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from msgspec import Struct

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.lifecycle import engine_logs, hosts
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Adapter, Deployment, Gpu, Launcher, Node, Stock, StockState
from controlplane.jobs.broker import send_task
from workers.vllm import engine_log, hardware, stock

REPORT_TASK = "workers.tasks.nodes.report_node"
REPORT_EXPIRES_S = 5.0
ACTOR = "node agent"


class Wanted(Struct, frozen=True):
    """Weights that servers of a node load, with the environment in which they do."""

    name: str
    source: str
    environment: Mapping[str, str]


def wanted_on(node: Node) -> Iterator[Wanted]:
    """Yield what the vLLM processes of *node* load, models before their adapters."""
    here = Deployment.objects.filter(active=True, model__active=True, region=node.region, gpu_type=node.gpu_type)
    here = here.filter(instances__launcher=Launcher.PROCESS).exclude(model__source="").distinct()
    for deployment in here.select_related("model").order_by("model__name"):
        environment = {**os.environ, **deployment.environment, **deployment.secrets}
        yield Wanted(deployment.model.name, deployment.model.source, environment)
        if deployment.max_loras:
            for adapter in Adapter.objects.filter(base=deployment.model, active=True):
                yield Wanted(adapter.name, adapter.source, environment)


@transaction.atomic
def pull(row: Stock, actor: User | str, reason: str) -> str:
    """Ask the node of *row* to pull its weights. Return a sentence for the operator; raises ActionError."""
    row = Stock.objects.select_for_update(of=("self",)).select_related("node").get(pk=row.pk)
    if row.state in (StockState.PRESENT, StockState.PULLING):
        raise ActionError(f"{row} is {row.state}")
    if stock.is_folder(row.source):
        raise ActionError(f"{row.source} is a folder: copy it to {row.node}, only repositories are pulled")
    row.state, row.error, row.changed_at = StockState.PULLING, "", timezone.now()
    row.save(update_fields=["state", "error", "changed_at"])
    record("stock.pull_requested", row, actor=actor, after={"source": row.source}, reason=reason)
    transaction.on_commit(lambda: notify_agent(row.node))
    return f"{row.node} pulls {row.name}"


def notify_agent(node: Node) -> bool:
    """Have *node* report, and begin what it is asked to pull: by its agent, or where it has none by a worker here."""
    queue = hosts.queue_of_node(node) if node.host else ""
    return send_task(REPORT_TASK, node.name, queue=queue, expires_s=REPORT_EXPIRES_S)


def report(node: Node) -> int:
    """Compare the rows of *node* with this machine, which is that node, and shorten the logs there; return the number of
    rows that changed.
    """
    changed = _report_gpus(node)
    wanted = {each.name: each for each in wanted_on(node)}
    node.stock.exclude(name__in=wanted).delete()
    for each in wanted.values():
        row, _ = Stock.objects.get_or_create(node=node, name=each.name, defaults={"source": each.source})
        changed += _report(row, each)
    for instance in node.instances.filter(launcher=Launcher.PROCESS):
        if (path := engine_logs.path_of(instance)) is not None:
            engine_log.shorten(path)
    Node.objects.filter(pk=node.pk).update(reported_at=timezone.now())
    return changed


def _report(row: Stock, wanted: Wanted) -> int:
    """Bring *row* up to date; return 1 if it has changed, else 0."""
    base, order = Path(settings.STATE_DIR) / "pulls" / str(row.pk), row.changed_at.isoformat()
    asked = row.state == StockState.PULLING
    size, whole = stock.on_disk(wanted.source, wanted.environment)
    state, error = StockState.MISSING, ""
    if stock.is_pulling(base):
        state = StockState.PULLING
    elif whole:
        state = StockState.PRESENT
    elif asked and stock.last_order(base) != order:
        try:
            stock.pull(settings.VLLM_PYTHON or sys.executable, wanted.source, base, order, wanted.environment)
            state = StockState.PULLING
        except stock.PullError as reason:
            state, error = StockState.FAILED, str(reason)
    elif asked:
        state, error = StockState.FAILED, stock.pull_error(base) or "The pull ended without a word."
    elif row.state == StockState.FAILED:
        state, error = StockState.FAILED, row.error
    fields = {"source": wanted.source, "state": state, "bytes": size, "error": error[:400]}
    if all(getattr(row, name) == value for name, value in fields.items()):
        return 0
    if state != row.state:
        fields["changed_at"] = timezone.now()
    # Not over a pull that was asked for meanwhile.
    done = Stock.objects.filter(pk=row.pk, state=row.state, changed_at=row.changed_at).update(**fields)
    if done and asked and state == StockState.FAILED:
        record("stock.pull_failed", row, actor=ACTOR, reason=error, severity=Severity.WARNING)
    elif done and asked and state == StockState.PRESENT:
        record("stock.pulled", row, actor=ACTOR, after={"bytes": size})
    return done


def _report_gpus(node: Node) -> int:
    """Note the addresses of the GPUs of this machine, by which the driver's messages name them."""
    known = dict(node.gpus.values_list("name", "address"))
    changed = 0
    for name, address in hardware.gpu_addresses().items():
        if known.get(name) != address and name.isdigit() and int(name) < node.gpu_count:
            Gpu.objects.update_or_create(node=node, name=name, defaults={"address": address})
            changed += 1
    return changed
