"""Accounting of a request that ended: ledger row, metrics, and the data from which length predictors learn."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import RequestRecord
from controlplane.gateway.models import Outcome
from controlplane.gateway.monitoring.tracing import Tracing
from controlplane.gateway.monitoring.windows import Count, Latency, ServiceLevels, Windows
from controlplane.gateway.serving.open_requests import Ticket, TicketState
from controlplane.lengths.length_service import LengthService
from scheduling.queueing.promises import UNREACHABLE
from scheduling.routing.models import ModelRule

OUTCOMES = {
    TicketState.DONE: Outcome.DONE,
    TicketState.FAILED: Outcome.FAILED,
    TicketState.CANCELLED: Outcome.CANCELLED,
    TicketState.REJECTED: Outcome.REJECTED,
}
FLEET = "fleet"
READ_S = 0.1
"""Time for which a client may read on after its instance has ended, without a separate entry."""
TIMES = (Latency.QUEUE, Latency.TTFT, Latency.ITL, Latency.E2E)


class Rows(Protocol):
    """What takes the rows of requests that ended."""

    def add(self, entry: RequestRecord) -> None: ...


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

    def close(self, ticket: Ticket, status: int) -> int:
        """Record the end of *ticket*, answered with *status*; return the tokens that it used."""
        now_s, arrived_s = self.clock(), ticket.asked.arrived_s
        grant, call, terms = ticket.grant, ticket.call, ticket.terms
        outcome = OUTCOMES[ticket.state]
        done = outcome is Outcome.DONE
        ticket.finished_s, ticket.outcome = now_s, outcome.value
        ticket.tenant_id, ticket.api_key_id = grant.tenant_id, grant.key_id
        ticket.model, ticket.slo_class, ticket.streamed = ticket.asked.model, terms.name, call.stream
        ticket.status_code = ticket.status or status
        ticket.surface, ticket.adapter = call.kind.value, ticket.asked.adapter
        ticket.predicted_output_tokens = int(ticket.predicted_tokens) if call.kind.generates else 0
        ticket.output_tokens = max(0, ticket.output_tokens)
        if not call.kind.computes:
            ticket.predicted_prompt_tokens = 0
        if not ticket.worked:
            ticket.prompt_tokens = 0

        ticket.e2e_ms = (now_s - arrived_s) * 1000
        if ticket.placed_s:
            ticket.queue_ms = (ticket.placed_s - arrived_s) * 1000
        ticket.ran = _ran(ticket)
        if ticket.first_token_heard:
            ticket.ttft_ms = (ticket.first_token_s - arrived_s) * 1000
            if ticket.output_tokens > call.sequences:
                per_sequence = ticket.output_tokens / call.sequences
                ticket.itl_ms = (now_s - ticket.first_token_s) * 1000 / (per_sequence - 1)
        if done:
            ticket.slo_met = terms.met(ticket.ttft_ms, ticket.itl_ms, ticket.e2e_ms)
        elif outcome is not Outcome.CANCELLED and (
            ticket.status < 400 or ticket.status >= 429
        ):  # not the tenant's own mistake
            ticket.slo_met = False if terms.promises else None

        if done:
            self.lengths.prior.learn(ticket.query, ticket.output_tokens, call.prompt_characters, ticket.prompt_tokens)
            if ticket.model_rule in ("", ModelRule.WEIGHTS):  # else another model answered than was predicted
                self.lengths.learn(ticket.length, grant.tenant_id, ticket.output_tokens)
        if ticket.length is not None and ticket.steps:
            ticket.steps[0]["length"] = ticket.length.explained()
        ticket.trace = _json(ticket.steps)
        ticket.unserved = _unserved(ticket)
        self._measure(ticket, outcome)
        if ticket.own_region == ticket.region:
            ticket.own_region = ""
        self.ledger.add(ticket.ended())
        if self.tracing is not None:
            self.tracing.end(ticket)
        return ticket.prompt_tokens + ticket.output_tokens

    def _measure(self, ticket: Ticket, outcome: Outcome) -> None:
        model, slo_class, region = ticket.model, ticket.slo_class, ticket.region
        self.totals[model, region, slo_class, ticket.outcome] += 1
        if decision := _at_door(ticket):
            self.at_door[model, region, ticket.asked_class or slo_class, decision] += 1
        if ticket.model_rule:
            self.other_models[ticket.asked_model, ticket.adapter or model, ticket.model_rule] += 1
        self.tokens[model, region, slo_class, "prompt"] += ticket.prompt_tokens
        if ticket.cached_tokens is not None:
            self.tokens[model, region, slo_class, "cached_prompt"] += ticket.cached_tokens
            if ticket.expected_cached_tokens is not None:
                expected, by = ticket.expected_cached_tokens, ticket.expected_by
                self.cache_tokens[model, by, "expected"] += expected
                self.cache_tokens[model, by, "reported"] += ticket.cached_tokens
                self.cache_tokens[model, by, "wrong"] += abs(expected - ticket.cached_tokens)
        self.tokens[model, region, slo_class, "output"] += ticket.output_tokens
        windows = self.windows
        windows.advance(self.clock())
        counted = self.groups(model, region, "")
        windows.count(counted, Count.FINISHED)
        if outcome in (Outcome.FAILED, Outcome.REJECTED):
            windows.count(counted, Count.ERRORS)
        if ticket.slo_met is not None:
            self.judged[model, slo_class, ticket.slo_met] += 1
            self.service_levels.judge(scopes_of(model, region), slo_class, ticket.terms.objective, ticket.slo_met)
        times_ms = (ticket.queue_ms, ticket.ttft_ms, ticket.itl_ms, ticket.e2e_ms)
        groups = self.groups(model, region, ticket.instance)
        # A backlog that waits for a trough says nothing of how fast instances answer: TTFT counts from its release.
        held_ms = max(0.0, ticket.released_s - ticket.asked.arrived_s) * 1000
        for what, value in zip(TIMES, times_ms, strict=True):
            if value is not None and (outcome is Outcome.DONE or what is Latency.QUEUE):
                windows.latency(groups, what, max(0.0, value - held_ms) if what is Latency.TTFT else value)
        target_ms = ticket.terms.ttft_target_ms
        if target_ms is not None and outcome is Outcome.DONE and ticket.ttft_ms is not None:
            self.ttft_targets_ms[slo_class] = target_ms
            of_class = self._promised.get((model, slo_class))
            if of_class is None:
                scopes = FLEET, f"model {model}"
                of_class = tuple(windows.group(promised_in(one, slo_class)) for one in scopes)
                self._promised[model, slo_class] = of_class
            windows.latency(of_class, Latency.TTFT, ticket.ttft_ms)

    def arrived(self, model: str) -> None:
        """Count an arrival for the fleet and *model*; its region is not known yet."""
        self.windows.advance(self.clock())
        self.windows.count(self.groups(model, "", ""), Count.REQUESTS)


def _ran(ticket: Ticket) -> str | None:
    """Return when instances worked for *ticket*, as JSON; None where its last one did from its placement to its end."""
    if [each[:2] for each in ticket.worked] == [(ticket.instance, ticket.placed_s)]:
        if ticket.finished_s - ticket.worked[0][2] < READ_S:
            return None
    elif not ticket.worked:
        return None
    arrived_s = ticket.asked.arrived_s
    ran = [(name, *(round((at_s - arrived_s) * 1000, 3) for at_s in span)) for name, *span in ticket.worked]
    return orjson.dumps(ran).decode()


def _json(steps: list[dict[str, Any]]) -> str:
    """Return *steps* as JSON that every database takes: PostgreSQL's has no NUL."""
    try:
        text = orjson.dumps(steps).decode()
    except TypeError:  # a number of more than 64 bits, or half of a character
        text = json.dumps(steps, ensure_ascii=False, default=str)
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _at_door(ticket: Ticket) -> str:
    """Return what happened to *ticket* at the door: late, degraded or refused; empty where its promise was reachable."""
    if ticket.error_code == UNREACHABLE:
        return "refused"
    return str(ticket.steps[0].get("at_door", "")) if ticket.steps else ""


def promised_in(scope: str, slo_class: str) -> str:
    """Return the window group of the requests of *scope* in *slo_class*, which promises a first token."""
    return f"promised {slo_class} in {scope}"


def scopes_of(model: str, region: str) -> tuple[str, ...]:
    """Return the scopes of a request of *model* in *region* besides its instance; without a region it was not served."""
    of_endpoint = (f"endpoint {model} {region}",) if region else ()
    return FLEET, f"model {model}", *of_endpoint


def _unserved(ticket: Ticket) -> bool:
    """Whether *ticket* was demand of the fleet and got no token.

    A request refused by its tenant's quota never reached the dispatcher; one that an instance refused as bad asked for
    nothing that can be served.
    """
    if ticket.placement is None or ticket.first_token_s or ticket.state is TicketState.DONE:
        return False
    return not 400 <= ticket.status < 429
