"""Operators' actions on an application run: move it first, stop it, and undo that, each with its price."""

from enum import StrEnum
from typing import Any, Final

from pydantic.dataclasses import dataclass

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.queues.view import UNDO_S
from controlplane.dispatch.wire import PublishedRow
from controlplane.fleet.lifecycle.states import ActionError

OVERTAKEN_SHOWN: Final = 10_000
"""Waiting requests that are looked through for those before a run."""


class RunAction(StrEnum):
    FIRST = "first"
    """Serve its calls before all others of their class, waiting ones and later ones."""
    STOP = "stop"
    """End its open calls, and refuse later ones."""
    UNDO = "undo"
    """Undo an action of the last 30 s. Calls that were ended stay so."""


@dataclass(frozen=True, config=PublishedRow.model_config)
class RunPrice:
    """Where the calls of a run are, and what actions on it cost others."""

    waiting: int
    """Those that the queue manager holds included."""
    running: int
    running_tokens: int
    """Output tokens of running calls so far, which are lost if it is stopped."""
    wait_s: float | None
    """Expected wait of its first waiting call from now; None if none waits, or while the pace is unknown."""
    overtaken: int
    """Waiting requests of others that its waiting calls would overtake."""
    first: bool
    stopped: bool
    can_undo: bool


class RunOperations:
    """Applications are (tenant id, name)."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._undo: dict[tuple[tuple[int, str], str], tuple[float, RunAction]] = {}
        """By run: deadline of the undo, and what was done."""

    def price(self, application: tuple[int, str], run: str) -> RunPrice:
        dispatcher = self.dispatcher
        calls = dispatcher.calls_of(application, run)
        queued = [one for one in calls if one.slot >= 0]
        running = [one for one in calls if one.replica is not None]
        followed = dispatcher.runs.standings.runs.get((application, run))
        first = min(queued, key=lambda one: one.asked.arrived_s, default=None)
        wait = dispatcher.waits.of(first).wait if first is not None else None
        until_s, _ = self._undo.get((application, run), (float("-inf"), None))
        return RunPrice(
            waiting=len(calls) - len(running),
            running=len(running),
            running_tokens=sum(one.output_tokens for one in running),
            wait_s=wait.mean_s if wait is not None else None,
            overtaken=len({other.asked.number for one in queued for other in self._before(one)}),
            first=bool(followed is not None and followed.first),
            stopped=dispatcher.runs.is_stopped_run(application, run),
            can_undo=dispatcher.clock() <= until_s,
        )

    def _before(self, request: Request) -> list[Request]:
        """Return the requests of other runs and of the same class that wait before *request*."""
        rows = self.dispatcher.queue.first(request.endpoint, OVERTAKEN_SHOWN)
        before = rows[: rows.index(request)] if request in rows else rows
        priority = request.asked.priority
        return [one for one in before if one.run != request.run and one.asked.priority == priority]

    def act(self, application: tuple[int, str], run: str, action: RunAction) -> RunPrice:
        """Do *action*; return its price, as before it. Raises ActionError where it cannot be done."""
        price, runs, key = self.price(application, run), self.dispatcher.runs, (application, run)
        if action == RunAction.UNDO:
            if not price.can_undo:
                raise ActionError(f"Nothing was done to run {run} in the last {UNDO_S:.0f} s")
            _, done = self._undo.pop(key)
            if done == RunAction.FIRST:
                runs.move_first(application, run, first=False)
            else:
                runs.stop(application, run, stopped=False)
        elif action == RunAction.FIRST:
            if price.stopped:
                raise ActionError(f"Run {run} was stopped")
            if not any(self.dispatcher.queue.follows_runs(each) for each in self.dispatcher.topology.endpoints):
                raise ActionError("No deployment orders by application run: choose such an order first")
            if not runs.move_first(application, run, first=True):
                raise ActionError(f"Run {run} has no call in progress, and none lately")
        else:
            self.dispatcher.stop_run(application, run)
        if action != RunAction.UNDO:
            now_s = self.dispatcher.clock()
            self._undo = {each: kept for each, kept in self._undo.items() if kept[0] >= now_s}
            self._undo[key] = now_s + UNDO_S, action
        self.dispatcher.placement.pump_all()
        return price


def sentence(run: str, action: RunAction, price: RunPrice) -> str:
    """Return the action and its price as a sentence."""
    if action == RunAction.UNDO:
        return f"Run {run} is as before."
    if action == RunAction.FIRST:
        count = price.overtaken
        return f"Run {run} goes first: its calls overtake {count:,} waiting request{'s' * (count != 1)} of others now."
    ended = price.waiting + price.running
    return f"Run {run} is stopped: {ended:,} open call{'s' * (ended != 1)} ended, and later ones are refused."


def run_of(values: dict[str, Any]) -> tuple[tuple[int, str], str]:
    """Return the run that a command names."""
    return (int(values["tenant_id"]), str(values["application"])), str(values["run"])
