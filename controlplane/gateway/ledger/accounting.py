"""Accounting of a request that ended: ledger row, what figures count, and the data from which length predictors learn."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from controlplane.dispatch import port
from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import Row, row_of
from controlplane.gateway.monitoring.tracing import Tracing
from controlplane.gateway.progress import Progress, RequestState
from controlplane.lengths.length_service import LengthService
from scheduling.queueing.promises import UNREACHABLE


class Rows(Protocol):
    """What takes the rows of requests that ended."""

    def add(self, row: Row) -> None: ...


class Records:
    """*send* takes what the dispatcher counts of requests."""

    def __init__(self, ledger: Rows, lengths: LengthService, clock: Callable[[], float], send: port.Send) -> None:
        self.ledger = ledger
        self.lengths = lengths
        self.clock = clock
        self.send = send
        self.errors: Counter[tuple[int, str]] = Counter()  # error answers by (status, code)
        self.tracing: Tracing | None = None

    def count_error(self, error: ApiError) -> None:
        self.errors[error.status, error.code] += 1

    def close(self, progress: Progress, status: int) -> None:
        """Record the end of *progress*, answered with *status*. Does nothing the second time."""
        if progress.finished_s:
            return
        progress.finished_s = self.clock()
        progress.status_code = progress.status_code or status
        progress.output_tokens = max(0, progress.output_tokens)
        call = progress.call
        if progress.state is RequestState.DONE:
            query, tokens = call.query(progress.asked, progress.asked_class), progress.output_tokens
            self.lengths.prior.learn(query, tokens, call.prompt_characters, progress.prompt_tokens)
            if not progress.fell_back:  # else another model answered than was predicted
                self.lengths.learn(progress.length, progress.asked.tenant_id, tokens)
        if progress.length is not None and progress.steps:
            progress.steps[0]["length"] = progress.length.explained()
        self.ledger.add(row_of(progress))
        self.send(ended(progress))
        if self.tracing is not None:
            self.tracing.end(progress)

    def arrived(self, progress: Progress) -> None:
        """Count an arrival, and begin its trace."""
        self.send(port.Arrived(progress.asked.model))
        if self.tracing is not None:
            progress.span, progress.trace_context = self.tracing.begin(
                progress.trace_context, progress.asked.arrived_at
            )


def ended(progress: Progress) -> port.Ended:
    """Return what figures count of *progress*, which ended."""
    asked, terms = progress.asked, progress.terms
    return port.Ended(
        model=asked.model,
        region=progress.region,
        instance=progress.instance,
        slo_class=asked.slo_class,
        asked_class=progress.asked_class,
        outcome=progress.outcome,
        prompt_tokens=progress.prompt_tokens,
        output_tokens=progress.output_tokens,
        cached_tokens=progress.cached_tokens,
        expected_cached_tokens=progress.expected_cached_tokens,
        expected_by=progress.expected_by,
        queue_ms=progress.queue_ms,
        ttft_ms=progress.ttft_ms,
        itl_ms=progress.itl_ms,
        e2e_ms=progress.e2e_ms,
        held_ms=max(0.0, progress.released_s - asked.arrived_s) * 1000,
        slo_met=progress.slo_met,
        objective=terms.objective,
        ttft_target_ms=terms.ttft_target_ms,
        at_door=_at_door(progress),
        asked_model=asked.asked_model,
        model_rule=asked.model_rule,
        adapter=asked.adapter,
    )


def _at_door(progress: Progress) -> str:
    """Return what happened to *progress* at the door: late, degraded or refused; empty where its promise was reachable."""
    if progress.error_code == UNREACHABLE:
        return "refused"
    return str(progress.steps[0].get("at_door", "")) if progress.steps else ""
