"""Stages of instances in scaling (`scheduling.scaling.view`)."""

from controlplane.fleet.lifecycle.states import COMING, InstanceState
from scheduling.scaling.view import Stage

COMING_LIMIT_S = 1800.0
"""An instance that loads for longer no longer counts as on its way."""
FIRST_SIGHT_S = 15.0
"""In which an instance that is ready by its row has answered the gateway; after that it is unreachable."""


def stage_of(state: str, for_s: float, takes_work: bool) -> Stage:
    """Return the stage of an instance in *state* for *for_s*; *takes_work*: whether it gets requests."""
    match state:
        case InstanceState.READY if takes_work:
            return Stage.READY
        case InstanceState.READY:
            return Stage.COMING if for_s < FIRST_SIGHT_S else Stage.AWAY
        case InstanceState.DRAINING:
            return Stage.DRAINING
        case InstanceState.SLEEPING | InstanceState.DONATED:
            return Stage.SPARE
        case _ if state in COMING and for_s < COMING_LIMIT_S:
            return Stage.COMING
        case _:
            return Stage.AWAY
