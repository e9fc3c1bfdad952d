"""What the gateway's reactive floor does to rows. Called in a thread of the gateway, which must not wait for a worker.

The floor's moves go through the same services as everybody's. A command that no worker takes in time, since Celery or
its broker is dead, is carried out here: claiming it is one update of its row, so a worker that comes back finds it done.
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
    """Have *work* leave no database connection behind in the thread that it ran in."""

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
) -> ScalingMove | None:
    """One instance more (delta 1; *to_minimum* only below it) or fewer (-1) for the floor; None if it cannot be made.

    It takes none away that a plan in force counts on.
    """
    if delta < 0 and executor.present(model, region) <= wanted_by_plan(model, region):
        return None
    why = executor.Why(MoveSource.FLOOR, STRATEGY, reason, inputs)
    return executor.attempt(delta, model, region, why, load=load, to_minimum=to_minimum)


@in_a_thread
def swap(instance_id: int, reason: str) -> Swap | None:
    """Have that instance take the GPUs that it shares; None if that cannot be now."""
    try:
        return swaps.request(Instance.objects.get(pk=instance_id), executor.FLOOR_ACTOR, reason)
    except (ActionError, Instance.DoesNotExist) as error:
        logger.info("floor: no swap: %s", error)
        return None


@in_a_thread
def note_evictions(evictions: Sequence[Evicted]) -> None:
    """An event for each: for which group, and what it gains and costs."""
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
    """Instances that the newest plan in force wants at an endpoint; 0 without one."""
    plan = selectors.plan_in_force(model, timezone.now())
    return sum(row["target"] for row in plan.targets if row["region"] == region) if plan else 0


@in_a_thread
def take_up_commands(patience_s: float) -> int:
    """Carry out the floor's own commands that waited for a worker for *patience_s*. Returns how many were taken up.

    Those of other hosts are left to them; what is left of failed servers on this one is ended too.
    """
    from workers.tasks.fleet import STALE_AFTER, end_failed, run_command

    now = timezone.now()
    own = InstanceCommand.objects.filter(actor=executor.FLOOR_ACTOR)
    # A worker may have died with one in its hands.
    own.filter(state=CommandState.RUNNING, started_at__lt=now - STALE_AFTER).update(
        state=CommandState.PENDING, started_at=None
    )
    waiting = own.filter(state=CommandState.PENDING, created_at__lt=now - timedelta(seconds=patience_s)).order_by("pk")
    keys = [row.pk for row in waiting.select_related("instance__node") if not hosts.obstacle(row.instance)]
    for key in keys:
        logger.warning("floor: no worker took command %s within %g s; the gateway carries it out", key, patience_s)
        run_command(key)
    end_failed(forward=False)
    return len(keys)


@in_a_thread
def finish_drains(idle: Iterable[str]) -> int:
    """Stop those of the instances *idle* (names, nothing runs there) that scaling has drained. Returns how many."""
    names = set(idle)
    return sum(executor.finish_drain(row, 0, executor.FLOOR_ACTOR) for row in executor.drained() if row.name in names)
