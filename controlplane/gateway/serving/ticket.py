"""A request on its way through the gateway: what was asked, and how it goes. Where it waits and runs is the dispatcher's."""

from __future__ import annotations

import asyncio
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct, field

from controlplane.dispatch.port import Placed, Submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.gateway.admission.keys import Grant, SloTerms
    from controlplane.gateway.admission.validation import Call
    from controlplane.gateway.errors import ApiError
    from controlplane.gateway.serving.continuation import Kept
    from controlplane.gateway.upstream.connections import Connection
    from controlplane.gateway.upstream.failures import RefusedByInstance
    from controlplane.gateway.upstream.whole_answer import WholeAnswer
    from controlplane.lengths.length_service import Prediction
    from forecasting.lengths import LengthQuery


class TicketState(IntEnum):
    ACCEPTED = 0  # authenticated and checked
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
    frozenset({_T.WAITING, *_ENDS}),  # WAITING again: what it has emitted is kept
    frozenset(),
    frozenset(),
    frozenset(),
    frozenset(),
)


class IllegalTicketMove(RuntimeError):
    def __init__(self, before: TicketState, after: TicketState) -> None:
        super().__init__(f"a request that is {before.name.lower()} cannot become {after.name.lower()}")


class Interrupt(Enum):
    """Why a request's task is cancelled from outside."""

    DISCONNECT = "the client went away"
    INSTANCE_LOST = "the instance stopped answering"


class Course(Struct, eq=False):
    """How a request goes. Times are seconds of the event loop's clock."""

    prompt_tokens: int  # predicted, until the instance says
    predicted_tokens: float  # output
    state: TicketState = TicketState.ACCEPTED
    region: str = ""  # where it waits or runs
    own_region: str = ""  # of its caller, where it counts as demand
    instance: str = ""  # the last one
    queue_position: int | None = None  # when it was queued, as the next two; 0: it did not wait
    estimated_wait_s: float | None = None  # None while queued: nothing was known
    estimated_wait_p99_s: float | None = None
    attempts: int = 0
    evictions: int = 0  # times that it was taken from an instance and queued again
    placed_s: float = 0.0
    first_token_s: float = 0.0
    first_token_heard: bool = False  # else that is when the whole answer came
    finished_s: float = 0.0
    output_tokens: int = 0
    reported_tokens: int | None = None  # of those, reported to the dispatcher; None: not even its beginning
    status: int = 0  # where it differs from the answer's
    error_code: str = ""
    error_message: str = ""  # what the tenant was answered
    trace: list[dict[str, object]] = field(default_factory=list)

    def move(self, to: TicketState) -> None:
        """Raises IllegalTicketMove, naming both states."""
        if to not in MOVES[self.state]:
            raise IllegalTicketMove(self.state, to)
        self.state = to

    def wait_headers(self) -> list[tuple[bytes, bytes]]:
        """What its tenant hears of its wait, as it was estimated when it came."""
        if self.queue_position is None:
            return []
        headers = [(b"x-queue-position", b"%d" % self.queue_position)]
        if self.estimated_wait_s is not None:
            headers.append((b"x-estimated-wait-s", b"%.3f" % self.estimated_wait_s))
        return headers

    def fail(self, error: ApiError | RefusedByInstance) -> None:
        """Note the error that the tenant is answered with."""
        self.error_code, self.error_message, self.status = error.code, error.message[:500], error.status


class Ticket(Struct, eq=False):
    """One request as HTTP brought it, and its course."""

    asked: Submit  # what the dispatcher needs to know of it
    grant: Grant
    terms: SloTerms
    call: Call
    query: LengthQuery
    course: Course
    raw: bytes  # `Call.raw`
    retry: int = 0  # by the client's SDK, as it says
    length: Prediction | None = None  # who predicted, and from what
    application: str = ""
    run: str = ""
    unit: str = ""
    trace_context: tuple[tuple[str, str], ...] = ()  # headers for the instance
    task: asyncio.Task[object] | None = None
    interrupted: Interrupt | None = None
    placement: asyncio.Future[Placed] | None = None
    kept: Kept | None = None  # where it may be evicted
    whole: WholeAnswer | None = None  # put together from a stream that its tenant did not ask for
    in_one_piece: str = ""  # why its instance does not stream it
    evicting: bool = False
    leave_instance: Callable[[], None] | None = None  # while an instance answers, as is the next one
    connection: Connection | None = None
    busy: ApiError | None = None  # what the last instance said that could take no more

    @property
    def has_shown(self) -> bool:
        """Whether its tenant has been sent a token, after which it cannot begin anew."""
        return self.call.stream and self.course.first_token_s > 0

    def evict(self) -> None:
        """Leave the instance, if what it emitted can be continued, or it has emitted nothing."""
        course = self.course
        at_instance = course.state in (TicketState.PLACED, TicketState.STREAMING)
        can_go_on = self.kept.can_go_on if self.kept is not None else not self.has_shown
        if not at_instance or not can_go_on or self.evicting:
            return
        self.evicting = True
        if self.leave_instance is not None:
            self.leave_instance()

    def interrupt(self, reason: Interrupt) -> None:
        """Stop whatever the request's task is doing; it finds the reason in `interrupted`."""
        if self.course.state < TicketState.DONE and self.interrupted is None and self.task is not None:
            self.interrupted = reason
            self.task.cancel()
