"""The requests that this process carries, as the dispatcher knows them: each by its number, by records alone.

Decisions of the dispatcher are written to the ticket, whose task waits for them. Tokens of streams are counted on the
tickets and reported together, ten times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import Enum, IntEnum
from itertools import count
from typing import TYPE_CHECKING

from msgspec import structs

from controlplane.dispatch import port
from controlplane.gateway.admission.keys import Grant, SloTerms
from controlplane.gateway.admission.validation import Call
from controlplane.gateway.errors import ApiError
from controlplane.gateway.ledger.entry import RequestRecord
from controlplane.gateway.serving.prefixes import leading_hashes
from controlplane.gateway.upstream.answers import RefusedByInstance
from controlplane.gateway.upstream.connections import Connection
from controlplane.gateway.upstream.continuation import Kept
from controlplane.lengths.length_service import Prediction
from forecasting.lengths import LengthQuery

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class TicketState(IntEnum):
    ACCEPTED = 0  # authenticated and validated
    WAITING = 1  # held in its endpoint's queue
    PLACED = 2  # given to an instance, no byte back yet
    STREAMING = 3  # bytes are coming back
    DONE = 4
    FAILED = 5
    CANCELLED = 6
    REJECTED = 7


_T = TicketState
_ENDS = frozenset({_T.DONE, _T.FAILED, _T.CANCELLED})
MOVES: tuple[frozenset[TicketState], ...] = (
    frozenset({_T.WAITING, _T.REJECTED, _T.CANCELLED, _T.FAILED}),
    frozenset({_T.PLACED, _T.REJECTED, _T.CANCELLED, _T.FAILED}),
    frozenset({_T.STREAMING, _T.WAITING, *_ENDS}),  # WAITING again: the instance died before it sent a byte
    frozenset({_T.WAITING, *_ENDS}),  # WAITING again: its output so far is kept
    frozenset(),
    frozenset(),
    frozenset(),
    frozenset(),
)


class IllegalTicketMove(RuntimeError):
    def __init__(self, before: TicketState, after: TicketState) -> None:
        super().__init__(f"a request that is {before.name.lower()} cannot become {after.name.lower()}")


class Interrupt(Enum):
    """Reason for which a request's task is cancelled from outside."""

    DISCONNECT = "the client went away"
    INSTANCE_LOST = "the instance stopped answering"
    RECLAIMED = "the donated instance was reclaimed"
    STOPPED = "its run was stopped"
    STANDING_BY = "another process owns the regions"
    KEY_ENDED = "its API key may no longer be used"


class Ticket(RequestRecord, eq=False, kw_only=True):
    """One request on the HTTP side, from its arrival to its ledger row. Times are seconds of the event loop's clock."""

    asked: port.Asked  # the dispatcher's part of it
    grant: Grant
    terms: SloTerms
    call: Call
    query: LengthQuery
    length: Prediction | None = None
    session: str = ""  # "" for none
    trace_context: tuple[tuple[str, str], ...] = ()  # headers for the instance
    span: Span | None = None  # None: it is not traced
    queued_s: float = 0.0  # when its length was predicted
    budget_warnings: tuple[str, ...] = ()  # budgets above their soft limit

    state: TicketState = TicketState.ACCEPTED
    predicted_tokens: float = 0.0  # output
    released_s: float = 0.0  # by the queue manager; 0 where it was not held
    placed_s: float = 0.0
    worked: list[tuple[str, float, float]] = []  # (instance, begin, end): an engine worked for it
    first_token_s: float = 0.0
    first_token_heard: bool = False  # else that is when the whole answer came
    finished_s: float = 0.0
    reported_tokens: int | None = None  # output tokens reported to the dispatcher; None: not even its start
    status: int = 0  # where it differs from the answer's
    steps: list[dict[str, object]] = []  # of its decision trace

    task: asyncio.Task[object] | None = None
    interrupted: Interrupt | None = None
    placement: asyncio.Future[port.Placed] | None = None
    kept: Kept | None = None  # where it may be evicted
    evicting: bool = False
    leave_instance: Callable[[], None] | None = None  # while an instance answers, as is the next one
    connection: Connection | None = None
    busy: ApiError | None = None  # from the last busy instance
    adapter_failed: bool = False  # its instance could not load its adapter

    def __post_init__(self) -> None:
        asked = self.asked
        self.request_id, self.arrived_at = asked.request_id, asked.arrived_at
        self.prompt_tokens = self.predicted_prompt_tokens = asked.prompt_tokens
        self.predicted_tokens = asked.predicted_tokens

    def move(self, to: TicketState) -> None:
        """Move to state *to*. Raises IllegalTicketMove, naming both states."""
        if to not in MOVES[self.state]:
            raise IllegalTicketMove(self.state, to)
        self.state = to

    def fail(self, error: ApiError | RefusedByInstance) -> None:
        """Keep the error that the tenant is answered with."""
        self.error_code, self.error_message, self.status = error.code, error.message[:500], error.status

    def wait_headers(self) -> list[tuple[bytes, bytes]]:
        """Return headers for the tenant: which other model serves it, and its wait, as estimated on arrival."""
        headers = [(b"x-budget-warning", each.encode("ascii", "replace")) for each in self.budget_warnings]
        if self.asked_model:
            headers += [(b"x-served-model", self.call.model.encode()), (b"x-model-rule", self.model_rule.encode())]
        if self.queue_position is None:
            return headers
        headers.append((b"x-queue-position", b"%d" % self.queue_position))
        if self.asked_class:
            headers += [(b"x-slo-class", self.terms.name.encode()), (b"x-asked-slo-class", self.asked_class.encode())]
        if self.estimated_wait_s is not None:
            headers.append((b"x-estimated-wait-s", b"%.3f" % self.estimated_wait_s))
        return headers

    def fall_back(self, record: port.FellBack) -> None:
        """Become a request of the fallback of its model: predicted, counted and billed as that."""
        asked, self.asked_model = self.asked, self.asked_model or self.call.model
        self.asked = structs.replace(asked, model=record.model, fallback="", adapter="")
        self.query = replace(self.query, model=record.model)
        self.call.rename(record.model)
        self.region, self.predicted_tokens, self.model_rule = record.region, record.predicted_tokens, record.rule
        self.note_model(record.why)
        if self.state not in (TicketState.ACCEPTED, TicketState.WAITING):
            self.move(TicketState.WAITING)

    def note_model(self, why: str) -> None:
        """Note in the decision trace that another model serves it than it asked for."""
        self.steps.append(
            {"model_rule": self.model_rule, "model": self.call.model, "asked": self.asked_model, "why": why}
        )

    def admit(self, decided: port.Admission) -> None:
        """Note that its promise could not be kept when it came: it waits anyway, or in another class."""
        step: dict[str, object] = {
            "at_door": "late" if decided.slo_class == self.terms.name else "degraded",
            "slo_class": decided.slo_class,
            "wait_p99_s": round(decided.wait_p99_s, 3),
            "late_s": round(decided.late_s, 3),
        }
        if decided.slo_class != self.terms.name:
            self.asked_class, self.terms = self.terms.name, self.grant.terms[decided.slo_class]
            step["asked_class"] = self.asked_class
        self.steps.insert(0, step)

    def note_work(self, ended_s: float) -> None:
        """Note that its instance worked for it, from its placement to *ended_s*: that is paid, however it ends."""
        self.worked.append((self.instance, self.placed_s, ended_s))

    @property
    def expected_tokens(self) -> int:
        """Return the tokens that count towards limits and budgets until those used are known."""
        if self.call.kind.generates:
            return self.asked.prompt_tokens + int(self.asked.predicted_tokens)
        return self.asked.prompt_tokens if self.call.kind.computes else 0

    @property
    def has_shown(self) -> bool:
        """Whether its tenant has been sent a token, after which it cannot start over."""
        return self.call.stream and self.first_token_s > 0

    def evict(self) -> None:
        """Leave the instance, if its output can be continued or there is none."""
        at_instance = self.state in (TicketState.PLACED, TicketState.STREAMING)
        resumable = self.kept.resumable if self.kept is not None else not self.has_shown
        if not at_instance or not resumable or self.evicting:
            return
        self.evicting = True
        if self.leave_instance is not None:
            self.leave_instance()

    def interrupt(self, reason: Interrupt) -> None:
        """Cancel the request's task; it finds the reason in `interrupted`."""
        if self.state < TicketState.DONE and self.interrupted is None and self.task is not None:
            self.interrupted = reason
            self.task.cancel()


class OpenRequests:
    """Open requests by number. *send* takes the records for the dispatcher."""

    def __init__(self, clock: Callable[[], float], send: port.Send) -> None:
        self.clock = clock
        self.streaming: set[Ticket] = set()
        self._tickets: dict[int, Ticket] = {}
        self._numbers = count()
        self._send = send

    def next_number(self) -> int:
        return next(self._numbers)

    # To the dispatcher

    def submit(self, ticket: Ticket) -> None:
        """Have *ticket* queued and placed; `Ticket.placement` resolves to the placement, or to its ApiError."""
        self._tickets[ticket.asked.number] = ticket
        ticket.placement = asyncio.get_running_loop().create_future()
        self._send(ticket.asked)

    def place_again(
        self, ticket: Ticket, *, failure: str = "", reason: str = "", wait_s: float = 1.0, evicted: bool = False
    ) -> None:
        """Return *ticket* to the dispatcher: it left its failed instance, or was evicted, and can start over or be resumed.

        The arguments are those of `Left`.
        """
        if evicted:
            ticket.evictions += 1
            ticket.steps[-1]["evicted"] = {"tokens_seen": ticket.output_tokens}
        else:
            ticket.steps[-1]["lost"] = reason
        ticket.output_tokens = ticket.kept.rewind() if ticket.kept is not None else 0
        if ticket.kept is None or not ticket.kept.opened:
            ticket.first_token_s, ticket.first_token_heard = 0.0, False
        ticket.evicting = False
        self.streaming.discard(ticket)
        ticket.placement = asyncio.get_running_loop().create_future()
        number, kept_tokens = ticket.asked.number, ticket.output_tokens
        self._send(port.Left(number, True, failure, reason, wait_s, evicted, kept_tokens=kept_tokens))

    def expect(self, model: str, due: Iterable[tuple[float, int]]) -> None:
        """Announce work of *model* that will be submitted once there is room: (deadline on the clock, requests)."""
        self._send(port.Backlog(model, tuple(due)))

    def prefix_warmed(self, warmed: port.PrefixWarmed) -> None:
        """Record the end of a request that computed a system prompt early."""
        self._send(warmed)

    def at_instances(self) -> frozenset[str]:
        """Return the ids of the requests that an instance was given."""
        given = (TicketState.PLACED, TicketState.STREAMING)
        return frozenset(one.asked.request_id for one in self._tickets.values() if one.state in given)

    def key_ids(self) -> set[int]:
        """Return the ids of the keys with open requests."""
        return {ticket.grant.key_id for ticket in self._tickets.values()}

    def end_keys(self, key_ids: Collection[int]) -> None:
        """End the requests of keys that may no longer be used, wherever they are."""
        for ticket in list(self._tickets.values()):
            if ticket.grant.key_id in key_ids:
                ticket.interrupt(Interrupt.KEY_ENDED)

    def stand_by(self) -> None:
        """End what no instance has: this process places nothing any longer."""
        for ticket in list(self._tickets.values()):
            if ticket.state in (TicketState.ACCEPTED, TicketState.WAITING):
                ticket.interrupt(Interrupt.STANDING_BY)

    def headers_received(self, ticket: Ticket) -> None:
        """Record that the instance of *ticket* begins to answer."""
        self._send(port.Advanced(headers=((ticket.asked.number, self.clock() - ticket.placed_s),)))

    def began(self, ticket: Ticket) -> None:
        """Record the first token of its instance: the prompt is prefilled."""
        ticket.move(TicketState.STREAMING)
        ticket.first_token_s = ticket.first_token_s or self.clock()
        ticket.first_token_heard = True
        self.streaming.add(ticket)

    def answered_whole(self, ticket: Ticket, first_token_s: float | None) -> None:
        """Record a whole answer, with the time to its first token if the instance reported it."""
        now_s = self.clock()
        ticket.move(TicketState.STREAMING)
        ticket.first_token_heard = first_token_s is not None
        ticket.first_token_s = now_s if first_token_s is None else min(ticket.placed_s + first_token_s, now_s)

    def report(self) -> None:
        """Report the tokens of every stream. Call some ten times a second."""
        moved = []
        for ticket in self.streaming:
            if ticket.output_tokens != ticket.reported_tokens:
                ticket.reported_tokens = ticket.output_tokens
                moved.append((ticket.asked.number, ticket.output_tokens))
        if moved:
            self._send(port.Advanced(tuple(moved)))

    def last_heard(self) -> dict[int, float]:
        """Report everything received; return when each stream was last heard from, by number, on the clock."""
        self.report()
        return {
            ticket.asked.number: ticket.connection.heard_s for ticket in self.streaming if ticket.connection is not None
        }

    def finished(self, ticket: Ticket) -> None:
        """Record that *ticket* was answered completely."""
        if self._close(ticket):
            tokens = ticket.output_tokens if ticket.call.kind.generates else ticket.call.sequences
            self._send(port.Finished(ticket.asked.number, tokens))

    def leave(self, ticket: Ticket, failure: str = "", reason: str = "") -> None:
        """End *ticket* before it is answered. Does nothing to one that was closed, or never submitted."""
        if self._close(ticket):
            failed = ticket.adapter_failed
            self._send(port.Left(ticket.asked.number, failure=failure, reason=reason, adapter_failed=failed))

    def _close(self, ticket: Ticket) -> bool:
        self.streaming.discard(ticket)
        placement = ticket.placement
        if placement is not None and placement.done() and not placement.cancelled():
            placement.exception()  # retrieved here: its task may have left before
        return self._tickets.pop(ticket.asked.number, None) is not None

    # From the dispatcher

    def on_event(self, record: port.OfRequest) -> None:
        """Write a decision to its ticket. Ignored for a request that has left meanwhile, whose place is given back."""
        ticket = self._tickets.get(record.number)
        if ticket is None:
            if isinstance(record, port.Placed):  # once the dispatcher is done with what it decides
                asyncio.get_running_loop().call_soon(self._send, port.Left(record.number))
            return
        placement = ticket.placement
        match record:
            case port.Placed():
                ticket.move(TicketState.PLACED)
                ticket.placed_s, ticket.attempts = record.placed_s, record.attempt
                ticket.region, ticket.instance = record.region, record.instance
                ticket.steps.append(record.why)
                if placement is not None and not placement.done():
                    placement.set_result(record)
            case port.Held():
                ticket.region, ticket.predicted_tokens = record.region, record.predicted_tokens
                ticket.own_region = record.own_region or ticket.own_region
                ticket.steps.append({"held": record.why})
                if ticket.state is not TicketState.WAITING:  # else it has been degraded to a class that is held
                    ticket.move(TicketState.WAITING)
            case port.Rerouted():
                ticket.region, ticket.predicted_tokens = record.region, record.predicted_tokens
                ticket.steps.append({"moved": f"{record.came_from} to {record.region}", "pressure": record.pressure})
            case port.Queued():
                ticket.region, ticket.predicted_tokens = record.region, record.predicted_tokens
                ticket.own_region = record.own_region or ticket.own_region
                if record.released is not None:
                    ticket.released_s = self.clock()
                    ticket.steps.append({"released": record.released})
                else:
                    ticket.move(TicketState.WAITING)
                    if ticket.queue_position is None:  # `Waiting` comes if it does wait
                        ticket.queue_position, ticket.estimated_wait_s, ticket.estimated_wait_p99_s = 0, 0.0, 0.0
            case port.FellBack():
                ticket.fall_back(record)
            case port.Waiting():
                ticket.queue_position = record.position
                ticket.estimated_wait_s = record.estimated_wait_s
                ticket.estimated_wait_p99_s = record.estimated_wait_p99_s
            case port.Admission():
                ticket.admit(record)
            case port.PrefixWanted():
                hashes, block_tokens, _ = leading_hashes(ticket.call, ticket.asked.prompt_tokens, ticket.session)
                self._send(port.Prefix(record.number, tuple(hashes), block_tokens))
            case port.Refused():
                ticket.region = record.region or ticket.region
                ticket.own_region = record.own_region or ticket.own_region
                if placement is not None and not placement.done():
                    busy = ticket.busy if record.code == port.INSTANCES_BUSY else None
                    placement.set_exception(busy or _as_error(record))
            case port.Evict():
                ticket.evict()
            case port.Lost():
                ends = Interrupt.STOPPED if record.stopped else Interrupt.RECLAIMED if record.reclaimed else None
                ticket.interrupt(ends or Interrupt.INSTANCE_LOST)


def _as_error(refused: port.Refused) -> ApiError:
    return ApiError(
        refused.status,
        refused.message,
        type={429: "rate_limit_error"}.get(
            refused.status, "invalid_request_error" if refused.status < 429 else "server_error"
        ),
        code=refused.code,
        retry_after_s=refused.retry_after_s,
        estimated_wait_s=refused.estimated_wait_s,
        earliest_at=refused.earliest_at,
    )
