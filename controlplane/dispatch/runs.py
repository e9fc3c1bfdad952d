"""Application runs on the live queues: what gateways, tenants and operators say of them, for `scheduling.control.runs`.

The process that owns the queues follows runs in its own memory, by the records of the port. Demand graphs are fed to it from
the database (`controlplane.applications.feeding`), and when it starts or takes the regions over, the calls that runs in
progress have made.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet.topology import Endpoint, Request
from controlplane.dispatch.port import Asked, Refused, RunReport
from controlplane.dispatch.stages import Arrival, Stage
from scheduling.applications.demand_graph import ServiceRate
from scheduling.applications.recording import NO_UNIT
from scheduling.applications.standings import KnownGraph, PastCall, Reading, RunCall
from scheduling.control.runs import Runs
from scheduling.fleet.profile import USUAL

MAX_UNIT_S: Final = 3600.0
"""A unit that is reported to run, and whose end is not reported, is given up after so long."""
TRIED: Final = -(2**62)
"""In place of the row of a call that is not queued yet; no execution of a unit has it."""
MAX_OPENED: Final = 10_000
"""Runs whose deadline is kept until their first call; the oldest goes first."""


class ApplicationRuns(Stage):
    """*pump* gives out requests of an endpoint."""

    def __init__(self, fleet: LiveFleet, pump: Callable[[Endpoint], None]) -> None:
        self.fleet, self._pump = fleet, pump
        self.graphs: dict[Any, KnownGraph] = {}
        """By (tenant id, application)."""
        self.deadlines: dict[Any, float] = {}
        """Seconds that operators give the runs of an application: calls of one that cannot end by then are refused."""
        self.control = Runs(fleet, self.graphs, self._reading())
        self.standings = self.control.standings
        self._opened: OrderedDict[tuple[Any, str], float] = OrderedDict()
        """Deadline of runs that were opened with one, on the dispatcher's clock."""
        self._stopped: OrderedDict[tuple[Any, str], None] = OrderedDict()
        """Runs that an operator has stopped, the last `MAX_OPENED`."""
        self._units: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """When each reported unit that runs began, and its backend."""
        self.began: Callable[[str], None] = lambda backend: None
        """Called with the backend of each reported unit that begins."""

    def report(self, report: RunReport) -> None:
        """Act on *report*."""
        application, now_s, call = (report.tenant_id, report.application), self.fleet.now_s, -report.execution
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
                self.control.arrive(unit, now_s - report.ago_s)
                self._units[call] = now_s - report.ago_s, report.backend
                self.began(report.backend)
                if report.ago_s:
                    self._units.move_to_end(call, last=False)
            if report.what == "ended":
                del self._units[call]
                self.control.end(call, report.duration_s)

    @property
    def backends_in_use(self) -> set[str]:
        """Return the backends of reported units that run."""
        return {backend for _, backend in self._units.values()}

    def move_first(self, application: Any, name: str) -> bool:
        """Serve the waiting and later calls of a run before all others of their class; return whether it is followed."""
        run = self.standings.runs.get((application, name))
        if run is not None:
            run.first = True
            self.control.rank(run)
        return run is not None

    def stop(self, application: Any, name: str) -> None:
        """Refuse later calls of a run."""
        self._stopped[application, name] = None
        if len(self._stopped) > MAX_OPENED:
            self._stopped.popitem(last=False)

    def admit(self, arrival: Arrival) -> Refused | None:
        asked = arrival.asked
        application = asked.tenant_id, asked.application
        if self._stopped and self.is_stopped(application, asked.run):
            return run_stopped(asked)
        if application not in self.deadlines or not asked.run or arrival.again:
            return None
        call = self._call(asked, TRIED, int(asked.predicted_tokens), arrival.endpoint)
        late_s = self.control.late_s(call, asked.arrived_s)
        return None if late_s <= 0.0 else _too_late(asked, late_s)

    def is_stopped(self, application: Any, name: str) -> bool:
        return (application, name) in self._stopped

    def _due_in_s(self, application: Any, run: str, now_s: float) -> float:
        """Return seconds to the deadline that *run* was opened with, infinity without one."""
        return self._opened.get((application, run), math.inf) - now_s

    def queued(self, request: Request) -> None:
        """Follow *request* if it is a call of a run."""
        asked = request.asked
        if asked.application and asked.run:
            call = self._call(asked, request.row, request.predicted_tokens, request.endpoint, request.adapter)
            request.run = self.control.arrive(call, asked.arrived_s).number

    def _call(
        self, asked: Asked, row: int, predicted_tokens: int, endpoint: Endpoint | None, adapter: int = -1
    ) -> RunCall:
        application = asked.tenant_id, asked.application
        due_in_s = asked.run_due_s if asked.run_due_s is not None else asked.end_s
        if (application, asked.run) in self._opened:
            due_in_s = self._due_in_s(application, asked.run, self.fleet.now_s)
        at = self.fleet.preferred(asked.model, asked.region, asked.regions)
        endpoint = self.fleet.endpoints[at] if at >= 0 else endpoint
        return RunCall(
            row,
            application,
            asked.run,
            asked.unit or NO_UNIT,
            asked.prompt_tokens,
            predicted_tokens,
            ServiceRate.of(endpoint.profile if endpoint is not None else USUAL),
            min(math.inf if due_in_s is None else due_in_s, self.deadlines.get(application, math.inf)),
            self.fleet.waiting_queue.weight(asked),
            adapter=adapter,
            endpoint=-1 if endpoint is None else endpoint.index,
        )

    def _rate(self, model: str, region: str) -> ServiceRate:
        at = self.fleet.preferred(model, region)
        return ServiceRate.of(self.fleet.endpoints[at].profile if at >= 0 else USUAL)

    def resume(self, runs: Iterable[tuple[tuple[int, str], str, Sequence[PastCall]]]) -> int:
        """Follow *runs* in progress: (tenant id, application), run, and its ended calls, whose moments are seconds before
        now. Return how many are resumed.
        """
        now_s, resumed = self.fleet.now_s, 0
        for application, name, ended in runs:
            past = [
                one._replace(
                    unit=one.unit or NO_UNIT,
                    began_s=now_s - one.began_s,
                    ended_s=now_s - one.ended_s,
                    rate=self._rate(one.model, one.region) if one.model else one.rate,
                )
                for one in ended
            ]
            run = self.standings.resume(application, name, past)
            if run is not None:
                resumed += 1
                run.due_s = self._opened.get((application, name), run.due_s)
                if run.calls:
                    self.control.rank(run)
        return resumed

    def _reading(self) -> Reading:
        return Reading(late_last=self.fleet.topology.tuned.LATE_RUNS_LAST)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        self.control.end(request.row, output_tokens)

    def sweep(self) -> None:
        """Refresh the ranks of runs that wait."""
        while self._units and next(iter(self._units.values()))[0] < self.fleet.now_s - MAX_UNIT_S:
            self.control.end(self._units.popitem(last=False)[0], None)
        for endpoint in self.control.refresh_ranks(self._reading()):
            self._pump(self.fleet.endpoints[endpoint])


def run_stopped(asked: Asked) -> Refused:
    return Refused(asked.number, 409, "run_stopped", "An operator has stopped this run.", None)


def _too_late(asked: Asked, late_s: float) -> Refused:
    text = (
        f"The run {asked.run!r} of {asked.application!r} cannot end by its deadline: it would be {late_s:.1f} s late."
    )
    return Refused(asked.number, 429, "run_deadline_unreachable", text, None)
