"""Accounting of a request that ended: ledger row, measures, and what predictors of lengths learn from it."""

from collections import Counter
from collections.abc import Callable

import orjson

from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import Entry
from controlplane.gateway.ledger.retries import Retries
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.models import Outcome
from controlplane.gateway.monitoring.windows import Count, Latency, ServiceLevels, Windows
from controlplane.gateway.serving.open_requests import Ticket, TicketState
from controlplane.lengths.length_service import LengthService

OUTCOMES = {
    TicketState.DONE: Outcome.DONE,
    TicketState.FAILED: Outcome.FAILED,
    TicketState.CANCELLED: Outcome.CANCELLED,
    TicketState.REJECTED: Outcome.REJECTED,
}
FLEET = "fleet"
TIMES = (Latency.QUEUE, Latency.TTFT, Latency.ITL, Latency.E2E)


class Records:
    def __init__(self, ledger: Ledger, lengths: LengthService, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.lengths = lengths
        self.clock = clock
        self.windows = Windows()
        self.service_levels = ServiceLevels(clock)
        self.retries = Retries()
        self.totals: Counter[tuple[str, str, str, str]] = Counter()  # requests by (model, region, class, outcome)
        self.tokens: Counter[tuple[str, str, str, str]] = Counter()  # tokens by (model, region, class, kind)
        self.errors: Counter[tuple[int, str]] = Counter()  # error answers by (status, code)
        self._groups: dict[tuple[str, str, str], tuple[int, ...]] = {}

    def count_error(self, error: ApiError) -> None:
        self.errors[error.status, error.code] += 1

    def groups(self, model: str, region: str, instance: str) -> tuple[int, ...]:
        """The window groups that a request of *model* in *region* on *instance* counts for."""
        groups = self._groups.get((model, region, instance))
        if groups is None:
            names = list(scopes_of(model, region))
            if instance:
                names.append(f"instance {instance}")
            groups = self._groups[model, region, instance] = tuple(map(self.windows.group, names))
        return groups

    def close(self, ticket: Ticket, status: int) -> int:
        """Write down how *ticket* ended, its answer having *status*. Returns the tokens that it used."""
        asked = ticket.asked
        now_s = ticket.finished_s = self.clock()
        grant, call, terms = ticket.grant, ticket.call, ticket.terms
        outcome = OUTCOMES[ticket.state]
        done = outcome is Outcome.DONE
        served_tokens = ticket.output_tokens = max(0, ticket.output_tokens)
        prompt_tokens = ticket.prompt_tokens if ticket.first_token_s else 0

        queue_ms = (ticket.placed_s - asked.arrived_s) * 1000 if ticket.placed_s else None
        e2e_ms = (now_s - asked.arrived_s) * 1000
        ttft_ms = itl_ms = None
        if ticket.first_token_heard:
            ttft_ms = (ticket.first_token_s - asked.arrived_s) * 1000
            if served_tokens > call.sequences:
                per_sequence = served_tokens / call.sequences
                itl_ms = (now_s - ticket.first_token_s) * 1000 / (per_sequence - 1)
        slo_met = None
        if done:
            slo_met = terms.met(ttft_ms, itl_ms, e2e_ms)
        elif outcome is not Outcome.CANCELLED and (
            ticket.status < 400 or ticket.status >= 429
        ):  # no tenant's own mistake
            slo_met = False if terms.promises else None

        if done:
            self.lengths.prior.learn(ticket.query, served_tokens, call.prompt_characters, prompt_tokens)
            self.lengths.learn(ticket.length, grant.tenant_id, served_tokens)
        if ticket.length is not None and ticket.trace:
            ticket.trace[0]["length"] = ticket.length.explained()
        if ticket.in_one_piece and ticket.trace:
            ticket.trace[0]["in_one_piece"] = ticket.in_one_piece
        unserved, repeated = self._demand(ticket)
        self._measure(ticket, outcome, prompt_tokens, slo_met, (queue_ms, ttft_ms, itl_ms, e2e_ms))
        self.ledger.add(
            Entry(
                request_id=asked.request_id,
                arrived_at=asked.arrived_at,
                tenant_id=grant.tenant_id,
                api_key_id=grant.key_id,
                model=call.model,
                slo_class=terms.name,
                region=ticket.region,
                own_region=ticket.own_region if ticket.own_region != ticket.region else "",
                instance=ticket.instance,
                application=ticket.application,
                run=ticket.run,
                unit=ticket.unit,
                streamed=call.stream,
                outcome=outcome.value,
                status_code=ticket.status or status,
                error_code=ticket.error_code,
                prompt_tokens=prompt_tokens,
                output_tokens=served_tokens,
                predicted_prompt_tokens=asked.prompt_tokens,
                predicted_output_tokens=int(ticket.predicted_tokens),
                queue_ms=queue_ms,
                ttft_ms=ttft_ms,
                itl_ms=itl_ms,
                e2e_ms=e2e_ms,
                slo_met=slo_met,
                unserved=unserved,
                retry=ticket.retry,
                repeated=repeated,
                attempts=ticket.attempts,
                trace=orjson.dumps(ticket.trace).decode(),
                error_message=ticket.error_message,
                queue_position=ticket.queue_position,
                estimated_wait_s=ticket.estimated_wait_s,
                estimated_wait_p99_s=ticket.estimated_wait_p99_s,
                evictions=ticket.evictions,
            )
        )
        return prompt_tokens + served_tokens

    def _demand(self, ticket: Ticket) -> tuple[bool, bool]:
        """Whether *ticket* is demand that was not served, and whether its demand was counted with an earlier attempt."""
        key_id, asked = ticket.grant.key_id, ticket.asked
        unserved = _unserved(ticket)
        repeated = ticket.retry > 0 and self.retries.counted(key_id, ticket.call.raw, asked.arrived_s)
        if unserved:
            self.retries.note(key_id, ticket.call.raw, ticket.finished_s)
        return unserved and not repeated, repeated

    def _measure(
        self,
        ticket: Ticket,
        outcome: Outcome,
        prompt_tokens: int,
        slo_met: bool | None,
        times_ms: tuple[float | None, float | None, float | None, float | None],
    ) -> None:
        model, slo_class, region = ticket.call.model, ticket.terms.name, ticket.region
        self.totals[model, region, slo_class, outcome.value] += 1
        self.tokens[model, region, slo_class, "prompt"] += prompt_tokens
        self.tokens[model, region, slo_class, "output"] += ticket.output_tokens
        windows = self.windows
        windows.advance(self.clock())
        groups = self.groups(model, region, ticket.instance)
        windows.count(groups, Count.FINISHED)
        if outcome in (Outcome.FAILED, Outcome.REJECTED):
            windows.count(groups, Count.ERRORS)
        if slo_met is not None:
            self.service_levels.judge(scopes_of(model, region), slo_class, ticket.terms.objective, slo_met)
        for what, value in zip(TIMES, times_ms, strict=True):
            if value is not None and (outcome is Outcome.DONE or what is Latency.QUEUE):
                windows.latency(groups, what, value)

    def arrived(self, model: str) -> None:
        """Count an arrival for the fleet and *model*; its region is not known yet."""
        self.windows.advance(self.clock())
        self.windows.count(self.groups(model, "", ""), Count.REQUESTS)


def scopes_of(model: str, region: str) -> tuple[str, ...]:
    """What a request of *model* in *region* counts for beside its instance; without a region it was served by none."""
    of_endpoint = (f"endpoint {model} {region}",) if region else ()
    return FLEET, f"model {model}", *of_endpoint


def _unserved(ticket: Ticket) -> bool:
    """Whether *ticket* was demand of the fleet and got no token.

    What a quota of its tenant refused never reached the dispatcher; what an instance refused as a bad request asked for
    nothing that can be served.
    """
    if ticket.placement is None or ticket.first_token_s or ticket.state is TicketState.DONE:
        return False
    return not 400 <= ticket.status < 429
