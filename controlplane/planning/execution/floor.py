"""Row writes of the gateway's reactive floor, called in a gateway thread that must not wait for a worker.

The floor's moves use the same services as all others. A command that no worker takes in time, since Celery or its broker
is down, is carried out here: claiming it is one update of its row, so a returning worker finds it done.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from django.db import connections
from django.utils import timezone

from controlplane.dispatch.reordering import Evicted
from controlplane.events.services import record
from controlplane.fleet.lifecycle import hosts
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import CommandState, Instance, InstanceCommand, Model, Swap
from controlplane.fleet.swaps import services as swaps
from controlplane.planning import selectors
from controlplane.planning.execution import executor
from controlplane.planning.models import MoveSource, ScalingMove

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

STRATEGY = "floor"


def in_a_thread(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap *work* to close its thread's database connections."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        finally:
            connections.close_all()

    return run


@in_a_thread
def move(
    delta: int,
    model: str,
    region: str,
    reason: str,
    inputs: Mapping[str, Any],
    load: Mapping[str, float],
    to_minimum: bool = False,
    drains: bool = True,
) -> ScalingMove | None:
    """Add (delta 1; *to_minimum* only below it) or remove (-1) an instance for the floor; None if impossible.

    Without *drains* a removal only cancels a start. Never removes an instance that a plan in force counts on.
    """
    if delta < 0 and executor.present(model, region) <= wanted_by_plan(model, region):
        return None
    why = executor.Why(MoveSource.FLOOR, STRATEGY, reason, inputs)
    return executor.attempt(delta, model, region, why, load=load, to_minimum=to_minimum, drains=drains)


@in_a_thread
def swap(instance_id: int, reason: str) -> Swap | None:
    """Swap the instance onto its shared GPUs; None if impossible at the moment."""
    try:
        return swaps.request(Instance.objects.get(pk=instance_id), executor.FLOOR_ACTOR, reason)
    except (ActionError, Instance.DoesNotExist) as error:
        logger.info("floor: no swap: %s", error)
        return None


@in_a_thread
def note_evictions(evictions: Sequence[Evicted]) -> None:
    """Record an event per eviction: the group it is for, its gain and its cost."""
    for one in evictions:
        record(
            "queue.evicted",
            Model.objects.filter(name=one.model).first(),
            actor="global scheduler",
            reason=f"{one.reason}. {one.what}.",
            after={"evicted_requests": one.evicted_requests, "lost_tokens": one.lost_tokens},
            inputs=asdict(one),
        )


def wanted_by_plan(model: str, region: str) -> int:
    """Return the instances that the newest plan in force wants at an endpoint; 0 without one."""
    plan = selectors.plan_in_force(model, timezone.now())
    return sum(row["target"] for row in plan.targets if row["region"] == region) if plan else 0


@in_a_thread
def take_up_commands(patience_s: float) -> int:
    """Carry out the floor's own commands that waited for a worker for *patience_s*. Return their number.

    Commands of other hosts are left to them; leftovers of failed servers on this host are ended too.
    """
    from workers.tasks.fleet import STALE_AFTER, end_failed, run_command, waits_for_gpus

    now = timezone.now()
    own = InstanceCommand.objects.filter(actor=executor.FLOOR_ACTOR)
    # A worker may have died while holding one.
    own.filter(state=CommandState.RUNNING, started_at__lt=now - STALE_AFTER).update(
        state=CommandState.PENDING, started_at=None
    )
    waiting = own.filter(state=CommandState.PENDING, created_at__lt=now - timedelta(seconds=patience_s)).order_by("pk")
    rows = waiting.select_related("instance__node", "instance__takes_over")
    keys = [row.pk for row in rows if not hosts.obstacle(row.instance) and not waits_for_gpus(row)]
    for key in keys:
        logger.warning("floor: no worker took command %s within %g s; the gateway carries it out", key, patience_s)
        run_command(key)
    end_failed(forward=False)
    return len(keys)


@in_a_thread
def finish_drains(idle: Iterable[str]) -> int:
    """Stop those of the *idle* instances (names) that scaling has drained. Return their number."""
    names = set(idle)
    return sum(executor.finish_drain(row, 0, executor.FLOOR_ACTOR) for row in executor.drained() if row.name in names)
