"""Application runs on the live queues: whose calls came and ended, and where each run stands.

The process that owns the queues follows runs in its own memory, by the records of the port. Demand graphs are fed to it from
the database (`controlplane.applications.feeding`), and when it starts or takes the regions over, the calls that runs in
progress have made.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from controlplane.dispatch.live_fleet.topology import Endpoint, Request, Topology
from controlplane.dispatch.port import Asked, Refused
from controlplane.dispatch.stages import Arrival, Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.applications.demand_graph import ServiceRate
from scheduling.applications.prewarming import LikelyCall, Needs, likely_calls_of
from scheduling.applications.recording import NO_UNIT
from scheduling.applications.standings import (
    FIRST_S,
    KnownGraph,
    PastCall,
    Reading,
    Run,
    RunCall,
    Standings,
    rekey_run,
    runs_waiting,
)
from scheduling.fleet.profile import USUAL
from scheduling.queueing.ordering import ORDERINGS


class EndedCall(NamedTuple):
    """A call of a run in progress, as the ledger has it, or a reported unit; moments in seconds before now."""

    model: str
    """Empty of a unit that is no LLM."""
    region: str
    """Of its caller."""
    unit: str
    began_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: float | None
    """Seconds of a unit that is no LLM. None: it failed."""


MAX_UNIT_S: Final = 3600.0
"""A unit that is reported to run, and whose end is not reported, is given up after so long."""
MAX_OPENED: Final = 10_000
"""Runs whose deadline is kept until their first call; the oldest goes first."""


class RunReport(NamedTuple):
    """A report of a tenant about a run: it was opened or closed, or a unit that is no LLM began or ended. Or of an operator
    that stopped it."""

    what: Literal["opened", "began", "ended", "closed", "stopped"]
    tenant_id: int
    application: str
    run: str
    number: int = 0
    """Of the execution of the unit."""
    unit: str = ""
    duration_s: float | None = None
    """Of a unit that ended; None: it failed."""
    due_s: float | None = None
    """Of a run that was opened, after now."""
    ago_s: float = 0.0
    """Since when a unit has run that a process hears of later, as after a restart."""
    backend: str = ""
    """Of the unit."""


class ApplicationRuns(Stage):
    """*produced* gives the output tokens so far of the request with a number; *pump* gives out requests of an endpoint."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        produced: Callable[[int], int],
        pump: Callable[[Endpoint], None],
    ) -> None:
        self.topology, self.queue, self._pump = topology, queue, pump
        self.graphs: dict[Any, KnownGraph] = {}
        """By (tenant id, application)."""
        self.standings = Standings(self.graphs, self._reading())
        self._produced = produced
        self._opened: OrderedDict[tuple[Any, str], float] = OrderedDict()
        """Deadline of runs that were opened with one, on the clock of the waiting set."""
        self._stopped: OrderedDict[tuple[Any, str], None] = OrderedDict()
        """Runs that an operator has stopped, the last `MAX_OPENED`."""
        self._units: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """When each reported unit that runs began, and its backend."""
        self.began: Callable[[str], None] = lambda backend: None
        """Called with the backend of each reported unit that begins."""

    def report(self, report: RunReport) -> None:
        """Take in *report*. Steps of units that are no LLM have no request: their calls have negative numbers."""
        application, now_s, call = (report.tenant_id, report.application), self.queue.clock(), -report.number
        if report.what == "opened" and report.due_s is not None:
            self._opened[application, report.run] = now_s + report.due_s
            if len(self._opened) > MAX_OPENED:
                self._opened.popitem(last=False)
        elif report.what == "closed":
            self._opened.pop((application, report.run), None)
            self.standings.close(application, report.run)
        elif report.what == "stopped":
            self.stop(application, report.run)
        elif report.what in ("began", "ended"):
            if call not in self._units:
                due_in_s = self._due_in_s(application, report.run, now_s)
                unit = RunCall(call, application, report.run, report.unit, 0, 0, ServiceRate(), due_in_s)
                self.standings.come(unit, now_s - report.ago_s)
                self._units[call] = now_s - report.ago_s, report.backend
                self.began(report.backend)
                if report.ago_s:
                    self._units.move_to_end(call, last=False)
            if report.what == "ended":
                del self._units[call]
                self.standings.end(call, report.duration_s, now_s)

    @property
    def backends_in_use(self) -> set[str]:
        """Return the backends of reported units that run."""
        return {backend for _, backend in self._units.values()}

    def move_first(self, application: Any, name: str) -> bool:
        """Serve the waiting and later calls of a run before all others of their class; return whether it is followed."""
        run = self.standings.runs.get((application, name))
        if run is not None:
            run.first = True
            self._rekey(run.number)
        return run is not None

    def stop(self, application: Any, name: str) -> None:
        """Refuse later calls of a run."""
        self._stopped[application, name] = None
        if len(self._stopped) > MAX_OPENED:
            self._stopped.popitem(last=False)

    def admit(self, arrival: Arrival) -> Refused | None:
        asked = arrival.asked
        stopped = self._stopped and self.is_stopped((asked.tenant_id, asked.application), asked.run)
        return run_stopped(asked) if stopped else None

    def is_stopped(self, application: Any, name: str) -> bool:
        return (application, name) in self._stopped

    def _due_in_s(self, application: Any, run: str, now_s: float) -> float:
        """Return seconds to the deadline that *run* was opened with, infinity without one."""
        return self._opened.get((application, run), math.inf) - now_s

    def queued(self, request: Request) -> None:
        """Follow *request* if it is a call of a run."""
        asked = request.asked
        if not (asked.application and asked.run):
            return
        queue, application = self.queue, (asked.tenant_id, asked.application)
        due_in_s = asked.run_due_s if asked.run_due_s is not None else asked.end_s
        if (application, asked.run) in self._opened:
            due_in_s = self._due_in_s(application, asked.run, queue.clock())
        endpoint = self._endpoint(asked.model, asked.region) or request.endpoint
        call = RunCall(
            asked.number,
            application,
            asked.run,
            asked.unit or NO_UNIT,
            asked.prompt_tokens,
            request.predicted_tokens,
            ServiceRate.of(endpoint.spec.profile),
            math.inf if due_in_s is None else due_in_s,
            queue.weight(asked),
            adapter=request.adapter,
            endpoint=endpoint.index,
        )
        run = self.standings.come(call, asked.arrived_s)
        request.run = run.number
        if self._is_ranked(request.asked.model):
            request.standing = self.standings.stand(run, queue.clock(), self._produced)
            self._rekey(run.number, request)

    def _rate(self, model: str, region: str) -> ServiceRate:
        endpoint = self._endpoint(model, region)
        return ServiceRate.of(endpoint.spec.profile if endpoint is not None else USUAL)

    def _endpoint(self, model: str, region: str) -> Endpoint | None:
        """Return the endpoint of *model* that a caller in *region* prefers; None without any."""
        candidates = self.topology.candidates(model, region)
        return self.topology.endpoints[int(candidates[0])] if candidates.size else None

    def likely_calls_of(self, run: Run, needs: Needs) -> list[LikelyCall]:
        """Return the calls that *run* will probably make next; *needs* as in `prewarming.likely_calls_of`."""
        graph, k = self.graphs.get(run.application), self.topology.tuned.PREWARM_K
        return likely_calls_of(run, graph, self._produced, needs, k, self.queue.clock())

    def resume(self, runs: Iterable[tuple[tuple[int, str], str, Sequence[EndedCall]]]) -> int:
        """Follow *runs* in progress: (tenant id, application), run, and its ended calls. Return how many are resumed."""
        now_s, resumed = self.queue.clock(), 0
        for application, name, ended in runs:
            past = [
                PastCall(
                    one.unit or NO_UNIT,
                    now_s - one.began_s,
                    now_s - one.ended_s,
                    one.prompt_tokens,
                    one.output_tokens,
                    self._rate(one.model, one.region) if one.model else ServiceRate(),
                )
                for one in ended
            ]
            run = self.standings.resume(application, name, past)
            if run is not None:
                resumed += 1
                run.due_s = self._opened.get((application, name), run.due_s)
                if run.calls:
                    self._rekey(run.number)
        return resumed

    def _reading(self) -> Reading:
        return Reading(late_last=self.topology.tuned.LATE_RUNS_LAST)

    def _is_ranked(self, model: str) -> bool:
        """Whether an endpoint of *model* orders by run."""
        return any(self.queue.follows_runs(endpoint) for endpoint in self.topology.endpoints if endpoint.model == model)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        self.standings.end(request.asked.number, output_tokens, self.queue.clock())

    def sweep(self) -> None:
        """Refresh the ranks of runs that wait."""
        queue = self.queue
        while self._units and next(iter(self._units.values()))[0] < queue.clock() - MAX_UNIT_S:
            self.standings.end(self._units.popitem(last=False)[0], None, queue.clock())
        self.standings.forget(queue.clock())
        by_run = np.zeros(queue.arrays.size.size, np.bool_)
        for endpoint in self.topology.endpoints:
            by_run[endpoint.index] = self.queue.follows_runs(endpoint)
        before, self.standings.reading = self.standings.reading, self._reading()
        read_anew = before != self.standings.reading
        changed = False
        for number in runs_waiting(queue.arrays, by_run) if by_run.any() else ():
            run = self.standings.by_number.get(number)
            if run is not None and (read_anew or self.standings.is_stale(run, queue.clock(), self._produced)):
                changed |= self._rekey(number) > 0
        for endpoint in self.topology.endpoints if changed else ():
            if by_run[endpoint.index] and queue.count(endpoint):
                self._pump(endpoint)

    def _rekey(self, number: int, request: Request | None = None) -> int:
        """Give the waiting requests of run *number* keys by its standing, that of *request* if given; return how many."""
        queue = self.queue
        standing = request.standing if request is not None else None
        if standing is None:
            standing = self.standings.stand(self.standings.by_number[number], queue.clock(), self._produced)
        codes, stretches = np.zeros(queue.arrays.size.size, np.int64), np.zeros(queue.arrays.size.size)
        for endpoint in self.topology.endpoints:
            policy = endpoint.spec.policy
            codes[endpoint.index], stretches[endpoint.index] = ORDERINGS[policy.ordering], policy.ordering_stretch
        queue.note_standing(number, standing)
        return rekey_run(queue.arrays, number, standing, codes, stretches)


def run_stopped(asked: Asked) -> Refused:
    return Refused(asked.number, 409, "run_stopped", "An operator has stopped this run.", None)


def trace_of(request: Request) -> dict[str, object]:
    """Return what the decision trace says of the run of *request*; nothing without a rank."""
    standing = request.standing
    if standing is None:
        return {}
    asked, first = request.asked, "moved first by an operator, " if standing.began_s == FIRST_S else ""
    return {
        "run": {
            "application": asked.application,
            "run": asked.run,
            "unit": asked.unit or NO_UNIT,
            "rank_s": round(standing.rank_s, 4),
            "remaining_s": round(standing.mean_s, 4),
            "worst_s": round(standing.worst_s, 4),
            "attained_s": round(standing.attained_s, 4),
            "words": (
                f"Run {asked.run} of {asked.application}: {first}rank {standing.rank_s:,.2f} s. It has had "
                f"{standing.attained_s:,.2f} s of service and is expected to need {standing.mean_s:,.2f} s more. "
                f"Its path to the end takes {standing.worst_s:,.2f} s at the most."
            ),
        }
    }
