"""Accounting of a request that ended: ledger row, metrics, and the data from which length predictors learn."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import Row, row_of
from controlplane.gateway.models import Outcome
from controlplane.gateway.monitoring.tracing import Tracing
from controlplane.gateway.monitoring.windows import Count, Latency, ServiceLevels, Windows
from controlplane.gateway.progress import Progress, RequestState
from controlplane.lengths.length_service import LengthService
from scheduling.queueing.promises import UNREACHABLE

FLEET = "fleet"


class Rows(Protocol):
    """What takes the rows of requests that ended."""

    def add(self, row: Row) -> None: ...


class Records:
    def __init__(self, ledger: Rows, lengths: LengthService, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.lengths = lengths
        self.clock = clock
        self.windows = Windows()
        self.service_levels = ServiceLevels(clock)
        self.totals: Counter[tuple[str, str, str, str]] = Counter()  # requests by (model, region, class, outcome)
        self.tokens: Counter[tuple[str, str, str, str]] = Counter()  # tokens by (model, region, class, kind)
        self.at_door: Counter[tuple[str, str, str, str]] = Counter()
        """Requests whose promise was unreachable by (model, region, class asked for, decision), since the start."""
        self.cache_tokens: Counter[tuple[str, str, str]] = Counter()
        """Cached prompt tokens by (model, how the router knew, kind): expected, reported, and by how much these differ."""
        self.other_models: Counter[tuple[str, str, str]] = Counter()
        """Requests that another model served, by (name asked for, model or adapter that served, rule)."""
        self.judged: Counter[tuple[str, str, bool]] = Counter()  # verdicts by (model, class, met), since the start
        self.errors: Counter[tuple[int, str]] = Counter()  # error answers by (status, code)
        self.tracing: Tracing | None = None
        self._groups: dict[tuple[str, str, str], tuple[int, ...]] = {}
        self.ttft_targets_ms: dict[str, float] = {}
        """By class that promises a first token and had requests, the latest target."""
        self._promised: dict[tuple[str, str], tuple[int, ...]] = {}  # by model and class

    def count_error(self, error: ApiError) -> None:
        self.errors[error.status, error.code] += 1

    def groups(self, model: str, region: str, instance: str) -> tuple[int, ...]:
        """Return the window groups of a request of *model* in *region*, with that of *instance*."""
        groups = self._groups.get((model, region, instance))
        if groups is None:
            names = list(scopes_of(model, region))
            if instance:
                names.append(f"instance {instance}")
            groups = self._groups[model, region, instance] = tuple(map(self.windows.group, names))
        return groups

    def close(self, progress: Progress, status: int) -> None:
        """Record the end of *progress*, answered with *status*."""
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
        self._measure(progress)
        self.ledger.add(row_of(progress))
        if self.tracing is not None:
            self.tracing.end(progress)

    def _measure(self, progress: Progress) -> None:
        asked, region, outcome = progress.asked, progress.region, progress.outcome
        model, slo_class, met = asked.model, asked.slo_class, progress.slo_met
        self.totals[model, region, slo_class, outcome] += 1
        if decision := _at_door(progress):
            self.at_door[model, region, progress.asked_class or slo_class, decision] += 1
        if asked.model_rule:
            self.other_models[asked.asked_model, asked.adapter or model, asked.model_rule] += 1
        tokens = {"prompt": progress.prompt_tokens, "output": progress.output_tokens}
        if (cached := progress.cached_tokens) is not None:
            tokens["cached_prompt"] = cached
            if (expected := progress.expected_cached_tokens) is not None:
                by = progress.expected_by
                self.cache_tokens[model, by, "expected"] += expected
                self.cache_tokens[model, by, "reported"] += cached
                self.cache_tokens[model, by, "wrong"] += abs(expected - cached)
        for kind, count in tokens.items():
            self.tokens[model, region, slo_class, kind] += count
        windows = self.windows
        windows.advance(self.clock())
        counted = self.groups(model, region, "")
        windows.count(counted, Count.FINISHED)
        if outcome in (Outcome.FAILED, Outcome.REJECTED):
            windows.count(counted, Count.ERRORS)
        if met is not None:
            self.judged[model, slo_class, met] += 1
            self.service_levels.judge(scopes_of(model, region), slo_class, progress.terms.objective, met)
        done, ttft_ms, target_ms = outcome == Outcome.DONE, progress.ttft_ms, progress.terms.ttft_target_ms
        # A backlog that waits for a trough says nothing of how fast instances answer: TTFT counts from its release.
        held_ms = max(0.0, progress.released_s - asked.arrived_s) * 1000
        times_ms = {Latency.QUEUE: progress.queue_ms}
        if done:
            times_ms[Latency.TTFT] = None if ttft_ms is None else max(0.0, ttft_ms - held_ms)
            times_ms |= {Latency.ITL: progress.itl_ms, Latency.E2E: progress.e2e_ms}
        groups = self.groups(model, region, progress.instance)
        for what, value in times_ms.items():
            if value is not None:
                windows.latency(groups, what, value)
        if target_ms is not None and done and ttft_ms is not None:
            self.ttft_targets_ms[slo_class] = target_ms
            of_class = self._promised.get((model, slo_class))
            if of_class is None:
                scopes = FLEET, f"model {model}"
                of_class = tuple(windows.group(promised_in(one, slo_class)) for one in scopes)
                self._promised[model, slo_class] = of_class
            windows.latency(of_class, Latency.TTFT, ttft_ms)

    def arrived(self, progress: Progress) -> None:
        """Count an arrival for the fleet and its model, and begin its trace; its region is not known yet."""
        asked = progress.asked
        if self.tracing is not None:
            progress.span, progress.trace_context = self.tracing.begin(progress.trace_context, asked.arrived_at)
        self.windows.advance(self.clock())
        self.windows.count(self.groups(asked.model, "", ""), Count.REQUESTS)


def _at_door(progress: Progress) -> str:
    """Return what happened to *progress* at the door: late, degraded or refused; empty where its promise was reachable."""
    if progress.error_code == UNREACHABLE:
        return "refused"
    return str(progress.steps[0].get("at_door", "")) if progress.steps else ""


def promised_in(scope: str, slo_class: str) -> str:
    """Return the window group of the requests of *scope* in *slo_class*, which promises a first token."""
    return f"promised {slo_class} in {scope}"


def scopes_of(model: str, region: str) -> tuple[str, ...]:
    """Return the scopes of a request of *model* in *region* besides its instance; without a region it was not served."""
    of_endpoint = (f"endpoint {model} {region}",) if region else ()
    return FLEET, f"model {model}", *of_endpoint
