"""The machine that acts for an instance: a vLLM process can be stopped, watched and restarted only where it runs.

An instance remembers the host that started it, until it is stopped there. A command for it is carried out on that host
alone; elsewhere it is left as it is and passed on to the queue of its node, `node.<name>`, where that host's worker takes
it up. A node belongs to the host of its agent, the worker that was last started on its queue; one that never had an agent,
to the machine with its address. Emulated instances and servers started elsewhere belong to no host. For what Ray starts,
each worker with a RAY_ADDRESS acts, and the queue `ray` is for those that have one.
"""

import socket

from django.conf import settings

from controlplane.fleet.models import Instance, Launcher, Node

RAY = "ray"
"""Queue of the workers that start vLLM through Ray."""


def obstacle(instance: Instance) -> str:
    """Return a sentence on why this host does not act for *instance*; empty if it does."""
    if instance.launcher == Launcher.RAY and not settings.RAY_ADDRESS:
        return (
            f"Ray starts {instance.name}, and {settings.HOST} has no RAY_ADDRESS: the worker on queue {RAY} acts for it"
        )
    if instance.launcher != Launcher.PROCESS:
        return ""
    if instance.host:
        if instance.host == settings.HOST:
            return ""
        return (
            f"{instance.name} runs on host {instance.host}, and this is {settings.HOST}: "
            f"the worker on queue {queue_of(instance)} there acts for it"
        )
    node = instance.node
    if node is None or acts_for(node):
        return ""
    return (
        f"{instance.name} is placed on node {node.name} at {node.host or node.address}, and this host is "
        f"{settings.HOST}: the worker on queue {queue_of(instance)} there starts it"
    )


def acts_for(node: Node) -> bool:
    """Return whether this host is *node*."""
    return node.host == settings.HOST if node.host else is_here(node.address)


def queue_of_node(node: Node) -> str:
    return f"node.{node.name}"


def queue_of(instance: Instance) -> str:
    """Return the Celery queue of the host of *instance*: Ray's, its node's, else the host's."""
    if instance.launcher == Launcher.RAY:
        return RAY
    return f"node.{instance.node.name if instance.node else instance.host}"


def is_here(address: str) -> bool:
    """Return whether servers of this machine are reachable at *address*."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
