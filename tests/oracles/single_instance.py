"""One instance run over a trace of arrivals in simulated time, without any dispatcher."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduling.simulation.engine.reference import EngineConfig, EngineRequest, ReferenceEngine


@dataclass(slots=True)
class Timeline:
    """Timeline of a request, in seconds on the clock of its arrival."""

    arrival_s: float
    admitted_s: float | None = None
    """Start of its first iteration."""
    tokens_s: list[float] = field(default_factory=list)
    """Emission time of each token."""
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.tokens_s[-1] - self.arrival_s


def serve(config: EngineConfig, requests: Iterable[EngineRequest]) -> dict[str, Timeline]:
    """Run *requests* to their end on one engine, each added at its `arrival_s`; return timelines by request id.

    A request that arrives during an iteration is seen by the next one. ValueError as `ReferenceEngine.add`.
    """
    engine = ReferenceEngine(config)
    arrivals = sorted(requests, key=lambda request: request.arrival_s)
    timelines = {request.request_id: Timeline(request.arrival_s) for request in arrivals}
    now_s, added = 0.0, 0
    while True:
        while added < len(arrivals) and arrivals[added].arrival_s <= now_s:
            engine.add(arrivals[added])
            added += 1
        result = engine.step(now_s)
        if result is None:
            if added == len(arrivals):
                return timelines
            now_s = arrivals[added].arrival_s
            continue
        for request_id in result.admitted:
            if timelines[request_id].admitted_s is None:
                timelines[request_id].admitted_s = now_s
        for request_id in result.preempted:
            timelines[request_id].preemptions += 1
        now_s = result.ends_s
        for request_id in result.emitted:
            timelines[request_id].tokens_s.append(now_s)
