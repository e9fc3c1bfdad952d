"""Application runs in the queues: whose calls arrive and end, and the ranks of what waits (Hermes sections 3.2, 3.3)."""

from collections.abc import Callable, Hashable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.standings import (
    USUAL_READING,
    KnownGraph,
    Reading,
    Run,
    RunCall,
    Standings,
    follows_runs,
    key_in_run,
)
from scheduling.control.fleet import Fleet
from scheduling.policy import EndpointPolicy
from scheduling.queueing.ordering import BY_RUN, HERMES, ORDERINGS, Standing
from scheduling.queueing.waiting_set import rekey, rerank

REFRESH_S: Final = 1.0


class Runs:
    """Call `refresh_ranks` every `REFRESH_S`. *graphs*: known demand graphs by application, which may change meanwhile.

    A call is the row of its request; an execution of a unit that is no LLM, a negative number.
    """

    def __init__(self, fleet: Fleet, graphs: Mapping[Hashable, KnownGraph], reading: Reading = USUAL_READING) -> None:
        self.fleet, self.standings = fleet, Standings(graphs, reading)

    def by_run(self) -> NDArray[np.bool_]:
        """Return which endpoints order by run."""
        return np.array([follows_runs(endpoint.policy) for endpoint in self.fleet.endpoints], np.bool_)

    def arrive(self, call: RunCall, arrival_s: float) -> Run:
        """Return the run of *call*, which is about to be queued, or to be executed."""
        run = self.standings.arrive(call, arrival_s)
        if call.request >= 0 and self.by_run().any():
            self.rank(run, call.request)
        return run

    def late_s(self, call: RunCall, arrival_s: float) -> float:
        """Return by how much the run of *call*, which is not queued yet, will be late at the least; negative: it can be in
        time. That is by the shortest path drawn for it, where nothing waits.
        """
        run = self.standings.arrive(call, arrival_s)
        produced = self.fleet.produced(run.calls.keys() - {call.request})
        self.standings.refreshed(run, self.fleet.now_s, produced, self._predicts(run))
        late_s = self.fleet.now_s + run.path_left_s(0.0, produced) - run.due_s
        self.end(call.request, None)
        return late_s

    def _predicts(self, run: Run) -> str:
        """Return the knob `run_demand` of the endpoint that *run* goes to."""
        at = max(0, run.latest.endpoint) if run.latest is not None else 0
        return self.fleet.endpoints[at].policy.run_demand if self.fleet.endpoints else EndpointPolicy().run_demand

    def end(self, request: int, output_tokens: float | None) -> None:
        """End the call *request*, if it is one of a run, as `Standings.end` does."""
        self.standings.end(request, output_tokens, self.fleet.now_s)

    def rank(self, run: Run, row: int = -1, produced: Callable[[int], int] | None = None) -> bool:
        """Order the waiting requests of *run* by its standing, and record it for them and for that of *row*; return whether
        any key changed.
        """
        fleet, waiting = self.fleet, self.fleet.waiting
        produced = produced or fleet.produced(run.calls)
        standing = self.standings.refreshed(run, fleet.now_s, produced, self._predicts(run))
        slots = np.flatnonzero((waiting.run == run.number) & (waiting.position >= 0)).tolist()
        fleet.record_standing([*map(fleet.row_at, slots), *[row] * (row >= 0)], standing)
        return sum(self._rekey(slot, standing) for slot in slots) > 0

    def _rekey(self, slot: int, standing: Standing) -> bool:
        waiting, policy = self.fleet.waiting, self.fleet.endpoints[self.fleet.waiting.endpoint[slot]].policy
        ordering, stretch = ORDERINGS[policy.ordering], policy.ordering_stretch
        if ordering in BY_RUN:
            key, before = key_in_run(ordering, standing, int(waiting.priority[slot]), stretch), waiting.key[slot]
            rekey(waiting, slot, key)
        elif follows_runs(policy):
            key, before = key_in_run(HERMES, standing, 0, stretch), waiting.rank[slot]
            rerank(waiting, slot, key)
        else:
            return False
        return bool(key != before)

    def refresh_ranks(self, reading: Reading) -> list[int]:
        """Refresh the ranks of runs that wait, read by *reading*; return the endpoints whose order may have changed."""
        waiting, standings, by_run = self.fleet.waiting, self.standings, self.by_run()
        standings.forget(self.fleet.now_s)
        read_again, standings.reading = reading != standings.reading, reading
        slots = np.flatnonzero((waiting.run >= 0) & (waiting.position >= 0)) if by_run.any() else np.zeros(0, np.int64)
        produced, changed = self.fleet.produced() if slots.size else None, False
        for number in np.unique(waiting.run[slots[by_run[waiting.endpoint[slots]]]]).tolist():
            run = standings.by_number.get(number)
            if run is None or produced is None:
                continue
            if read_again or standings.is_stale(run, self.fleet.now_s, produced):
                changed |= self.rank(run, produced=produced)
        return np.flatnonzero(by_run & (waiting.size[: by_run.size] > 0)).tolist() if changed else []
