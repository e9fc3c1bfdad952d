"""State machine of an instance. `fleet.services.move` makes and records the changes."""

from django.db import models


class InstanceState(models.TextChoices):
    PROVISIONING = "provisioning", "Provisioning"  # hardware or a process is being got
    LOADING = "loading", "Loading"  # the server is starting, loading weights or waking up
    READY = "ready", "Ready"  # takes requests
    DRAINING = "draining", "Draining"  # finishes what it runs, takes nothing new
    DONATED = "donated", "Donated"  # in the spot pool: serves opportunistic requests until it is reclaimed
    RECLAIMING = "reclaiming", "Reclaiming"  # its opportunistic requests are evicted, then it is ready
    SLEEPING = "sleeping", "Sleeping"  # weights are off the GPU; a request would hang (facts: vLLM's /sleep)
    STOPPED = "stopped", "Stopped"  # no process
    FAILED = "failed", "Failed"  # does not answer, or could not be started


_S = InstanceState
MOVES: dict[InstanceState, frozenset[InstanceState]] = {
    _S.PROVISIONING: frozenset({_S.LOADING, _S.FAILED, _S.STOPPED}),
    _S.LOADING: frozenset({_S.READY, _S.FAILED, _S.STOPPED}),
    _S.READY: frozenset({_S.DRAINING, _S.SLEEPING, _S.FAILED, _S.STOPPED}),
    _S.DRAINING: frozenset({_S.READY, _S.DONATED, _S.SLEEPING, _S.STOPPED, _S.FAILED}),
    _S.DONATED: frozenset({_S.RECLAIMING, _S.DRAINING, _S.STOPPED, _S.FAILED}),
    _S.RECLAIMING: frozenset({_S.READY, _S.DRAINING, _S.STOPPED, _S.FAILED}),
    _S.SLEEPING: frozenset({_S.LOADING, _S.STOPPED, _S.FAILED}),
    _S.STOPPED: frozenset({_S.PROVISIONING}),
    _S.FAILED: frozenset({_S.PROVISIONING, _S.LOADING, _S.STOPPED}),
}

# States in which a server process is expected to answer heartbeats.
ALIVE = frozenset({_S.LOADING, _S.READY, _S.DRAINING, _S.DONATED, _S.RECLAIMING, _S.SLEEPING})
SERVING = frozenset({_S.READY, _S.DRAINING, _S.DONATED, _S.RECLAIMING})
"""States in which requests may run on an instance."""

STARTING = frozenset({_S.PROVISIONING, _S.LOADING})
COMING = frozenset({_S.PROVISIONING, _S.LOADING, _S.RECLAIMING})
"""States on the way to serving."""
PRESENT = COMING | {_S.READY}
"""States of instances that serve or soon will: what targets and bounds count."""


AWAKE = PRESENT | {_S.DRAINING, _S.DONATED}
"""States in which an instance has its GPUs to itself: of those that share theirs, one at most is in them."""


class ActionError(ValueError):
    """Action that does not fit the current state; the text says why and can be shown."""


class IllegalMove(ActionError):
    """Move between states that the machine does not have; the text names both."""

    def __init__(self, name: str, before: str, after: str) -> None:
        allowed = ", ".join(sorted(MOVES[InstanceState(before)])) or "nothing"
        super().__init__(f"{name} is {before} and cannot become {after}; from {before} it can become {allowed}")
        self.before, self.after = before, after


def check_move(name: str, before: str, after: str) -> None:
    """Raise IllegalMove unless *before* leads to *after*."""
    if InstanceState(after) not in MOVES[InstanceState(before)]:
        raise IllegalMove(name, before, after)


class Action(models.TextChoices):
    """Actions of an operator on an instance; each is the function of that name in `fleet.services`."""

    DRAIN = "drain", "Drain"
    RESUME = "resume", "Resume"
    START = "start", "Start"
    STOP = "stop", "Stop"
    RESTART = "restart", "Restart"
    SLEEP = "sleep", "Sleep"
    WAKE = "wake", "Wake"
    RECLAIM = "reclaim", "Reclaim"


# States in which each action makes sense; a service may refuse for further reasons (a command under way, a launcher).
ACTION_STATES: dict[Action, frozenset[InstanceState]] = {
    Action.DRAIN: frozenset({_S.READY}),
    Action.RESUME: frozenset({_S.DRAINING}),
    Action.START: frozenset({_S.PROVISIONING, _S.STOPPED, _S.FAILED}),
    Action.STOP: frozenset(_S) - {_S.STOPPED},
    Action.RESTART: frozenset({_S.LOADING, _S.READY, _S.DRAINING}),
    Action.SLEEP: frozenset({_S.READY, _S.DRAINING}),
    Action.WAKE: frozenset({_S.SLEEPING}),
    Action.RECLAIM: frozenset({_S.DONATED}),
}


def check_action(name: str, action: Action, state: str) -> None:
    """Raise ActionError unless *action* makes sense for an instance in *state*."""
    if InstanceState(state) not in ACTION_STATES[action]:
        states = " or ".join(sorted(ACTION_STATES[action]))
        raise ActionError(f"{name} is {state}: {action} is for an instance that is {states}")
