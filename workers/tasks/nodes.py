"""Tasks of a node's agent: reports on its GPUs and its disk, pulls, and the ends of logs."""

import logging
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from controlplane.events.services import record
from controlplane.fleet import stock
from controlplane.fleet.lifecycle import engine_logs, hosts
from controlplane.fleet.models import Instance, Launcher, Node, StockState
from workers.celery import app

logger = logging.getLogger(__name__)
REPORT_EVERY = timedelta(seconds=60)


def report_nodes() -> int:
    """Report on the nodes that are this machine and have no agent; remind agents. Return the number of changed rows.

    Each is due once a minute, and at each call while it pulls.
    """
    changed = 0
    late = timezone.now() - REPORT_EVERY
    theirs = ~Q(host="") | Q(instances__launcher=Launcher.PROCESS)
    due = Q(reported_at=None) | Q(reported_at__lt=late) | Q(stock__state=StockState.PULLING)
    nodes = Node.objects.filter(theirs, due, active=True).distinct()
    for node in nodes.select_related("region", "gpu_type"):
        if hosts.acts_for(node):
            changed += stock.report(node)
        elif node.host:
            stock.notify_agent(node)
    return changed


@app.task
def report_node(name: str) -> None:
    """Report on the node *name*, if it is this machine."""
    node = Node.objects.select_related("region", "gpu_type").filter(name=name).first()
    if node is not None and hosts.acts_for(node):
        stock.report(node)


@app.task
def announce(name: str) -> None:
    """Note this host as that of the agent of the node *name*, on whose queue its worker has begun to listen."""
    node = Node.objects.select_related("region", "gpu_type").filter(name=name).first()
    if node is None:
        logger.warning(
            "there is no node %s: the queue node.%s gets commands of instances of that host alone", name, name
        )
        return
    if node.host != settings.HOST:
        record("node.agent", node, actor=stock.ACTOR, before={"host": node.host}, after={"host": settings.HOST})
        Node.objects.filter(pk=node.pk).update(host=settings.HOST)
        node.host = settings.HOST
    stock.report(node)


@app.task
def send_log(name: str, count: int, reply: str) -> None:
    """Send the last *count* lines of the log of the instance *name*, which is here, to the Redis list *reply*."""
    instance = Instance.objects.select_related("node").filter(name=name).first()
    if instance is not None:
        engine_logs.send(instance, count, reply)
