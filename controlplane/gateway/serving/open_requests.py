"""The requests that this process carries, as the dispatcher knows them: each by its number, by records alone.

What the dispatcher decides is put down on the ticket, whose task waits for it. How far streams have come is counted on the
tickets themselves and handed over together, some ten times a second.
"""

import asyncio
from collections.abc import Callable
from itertools import count

from controlplane.dispatch.port import (
    INSTANCES_BUSY,
    Evict,
    Finished,
    Left,
    Lost,
    Moved,
    OfRequest,
    Placed,
    Prefix,
    PrefixWanted,
    Progress,
    Refused,
    Send,
    Waiting,
)
from controlplane.gateway.errors import ApiError
from controlplane.gateway.serving.prefixes import leading_hashes
from controlplane.gateway.serving.ticket import Interrupt, Ticket, TicketState


class OpenRequests:
    """*send* takes the records for the dispatcher."""

    def __init__(self, clock: Callable[[], float], send: Send) -> None:
        self.clock = clock
        self.streaming: set[Ticket] = set()
        self._tickets: dict[int, Ticket] = {}
        self._numbers = count()
        self._send = send

    def next_number(self) -> int:
        return next(self._numbers)

    # To the dispatcher

    def submit(self, ticket: Ticket) -> None:
        """Have *ticket* queued and placed; `Ticket.placement` is where, or the ApiError that it is refused with."""
        self._tickets[ticket.asked.number] = ticket
        ticket.placement = asyncio.get_running_loop().create_future()
        self._send(ticket.asked)

    def place_again(self, ticket: Ticket, reason: str, failure: str, wait_s: float = 1.0) -> None:
        """*ticket* was sent no byte by its instance, or what it was sent is kept. The others are as in `Left`."""
        ticket.course.trace[-1]["lost"] = reason
        self._again(ticket, failure=failure, reason=reason, wait_s=wait_s)

    def evicted(self, ticket: Ticket) -> None:
        """*ticket* has left its instance, as `Evict` asked."""
        ticket.course.evictions += 1
        ticket.course.trace[-1]["evicted"] = {"tokens_seen": ticket.course.output_tokens}
        self._again(ticket, evicted=True)

    def _again(
        self, ticket: Ticket, *, failure: str = "", reason: str = "", wait_s: float = 1.0, evicted: bool = False
    ) -> None:
        course = ticket.course
        course.output_tokens = ticket.kept.rewind() if ticket.kept is not None else 0
        if ticket.kept is None or not ticket.kept.opened:
            course.first_token_s, course.first_token_heard = 0.0, False
        ticket.evicting = False
        self.streaming.discard(ticket)
        ticket.placement = asyncio.get_running_loop().create_future()
        number, kept_tokens = ticket.asked.number, course.output_tokens
        self._send(
            Left(
                number,
                again=True,
                failure=failure,
                reason=reason,
                wait_s=wait_s,
                evicted=evicted,
                kept_tokens=kept_tokens,
            )
        )

    def headers_came(self, ticket: Ticket) -> None:
        """The instance of *ticket* begins to answer."""
        self._send(Progress(headers=((ticket.asked.number, self.clock() - ticket.course.placed_s),)))

    def began(self, ticket: Ticket) -> None:
        """The first token of its instance came back: the prompt is prefilled."""
        ticket.course.move(TicketState.STREAMING)
        ticket.course.first_token_s = ticket.course.first_token_s or self.clock()
        ticket.course.first_token_heard = True
        self.streaming.add(ticket)

    def came_whole(self, ticket: Ticket, first_token_s: float | None) -> None:
        """Its instance answered in one piece, and said how long the first token took, or not."""
        course, now_s = ticket.course, self.clock()
        course.move(TicketState.STREAMING)
        course.first_token_heard = first_token_s is not None
        course.first_token_s = now_s if first_token_s is None else min(course.placed_s + first_token_s, now_s)

    def report(self) -> None:
        """Report how far every stream has come since the last call. Call it some ten times a second."""
        moved = []
        for ticket in self.streaming:
            course = ticket.course
            if course.output_tokens != course.reported_tokens:
                course.reported_tokens = course.output_tokens
                moved.append((ticket.asked.number, course.output_tokens))
        if moved:
            self._send(Progress(tuple(moved)))

    def last_heard(self) -> dict[int, float]:
        """When each stream was heard of last, by number, on the clock; all that has come is reported."""
        self.report()
        return {
            ticket.asked.number: ticket.connection.heard_s for ticket in self.streaming if ticket.connection is not None
        }

    def finished(self, ticket: Ticket) -> None:
        """*ticket* was answered whole."""
        if self._close(ticket):
            self._send(Finished(ticket.asked.number, ticket.course.output_tokens))

    def leave(self, ticket: Ticket, failure: str = "", reason: str = "") -> None:
        """*ticket* ends before it is answered. Nothing happens to one that was closed, or never submitted."""
        if self._close(ticket):
            self._send(Left(ticket.asked.number, failure=failure, reason=reason))

    def _close(self, ticket: Ticket) -> bool:
        self.streaming.discard(ticket)
        placement = ticket.placement
        if placement is not None and placement.done() and not placement.cancelled():
            placement.exception()  # it may leave before it heard: nobody else will ask
        return self._tickets.pop(ticket.asked.number, None) is not None

    # From the dispatcher

    def take(self, record: OfRequest) -> None:
        """Put down what was decided. A request that has left meanwhile hears nothing."""
        ticket = self._tickets.get(record.number)
        if ticket is None:
            return
        course, placement = ticket.course, ticket.placement
        match record:
            case Placed():
                course.move(TicketState.PLACED)
                course.placed_s, course.attempts = record.placed_s, record.attempt
                course.region, course.instance = record.region, record.instance
                course.trace.append(record.why)
                if placement is not None and not placement.done():
                    placement.set_result(record)
            case Moved():
                course.region, course.predicted_tokens = record.region, record.predicted_tokens
                course.own_region = record.own_region or course.own_region
                if record.came_from:
                    moved = f"{record.came_from} to {record.region}"
                    course.trace.append({"moved": moved, "pressure": record.pressure})
                else:
                    course.move(TicketState.WAITING)
                    if course.queue_position is None:  # `Waiting` comes if it does wait
                        course.queue_position, course.estimated_wait_s, course.estimated_wait_p99_s = 0, 0.0, 0.0
            case Waiting():
                course.queue_position = record.position
                course.estimated_wait_s = record.estimated_wait_s
                course.estimated_wait_p99_s = record.estimated_wait_p99_s
            case PrefixWanted():
                hashes, block_tokens = leading_hashes(ticket.call, ticket.asked.prompt_tokens)
                self._send(Prefix(record.number, tuple(hashes), block_tokens))
            case Refused():
                course.region = record.region or course.region
                course.own_region = record.own_region or course.own_region
                if placement is not None and not placement.done():
                    busy = ticket.busy if record.code == INSTANCES_BUSY else None
                    placement.set_exception(busy or _as_error(record))
            case Evict():
                ticket.evict()
            case Lost():
                ticket.interrupt(Interrupt.INSTANCE_LOST)


def _as_error(refused: Refused) -> ApiError:
    return ApiError(
        refused.status,
        refused.message,
        type={422: "invalid_request_error", 429: "rate_limit_error"}.get(refused.status, "server_error"),
        code=refused.code,
        retry_after_s=refused.retry_after_s,
        estimated_wait_s=refused.estimated_wait_s,
    )
