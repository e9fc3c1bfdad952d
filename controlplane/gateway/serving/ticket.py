"""A request on its way through the gateway: what was asked, and how it goes. Where it waits and runs is the dispatcher's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from controlplane.dispatch.port import Placed, Submit

if TYPE_CHECKING:
    from controlplane.gateway.admission.keys import Grant, SloTerms
    from controlplane.gateway.admission.validation import Call
    from controlplane.gateway.errors import ApiError
    from controlplane.gateway.lengths.prediction import Prediction
    from controlplane.gateway.upstream.failures import RefusedByInstance
    from forecasting.lengths import OutputQuery


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
    _ENDS,
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


@dataclass(slots=True, eq=False)
class Course:
    """How a request goes. Times are seconds of the event loop's clock."""

    prompt_tokens: int  # predicted, until the instance says
    predicted_tokens: float  # output
    state: TicketState = TicketState.ACCEPTED
    region: str = ""  # where it waits or runs
    own_region: str = ""  # of its caller, where it counts as demand
    instance: str = ""  # the last one
    attempts: int = 0
    placed_s: float = 0.0
    first_token_s: float = 0.0
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

    def fail(self, error: ApiError | RefusedByInstance) -> None:
        """Note the error that the tenant is answered with."""
        self.error_code, self.error_message, self.status = error.code, error.message[:500], error.status


@dataclass(slots=True, eq=False)
class Ticket:
    """One request as HTTP brought it, and its course."""

    asked: Submit  # what the dispatcher needs to know of it
    grant: Grant
    terms: SloTerms
    call: Call
    query: OutputQuery
    course: Course
    raw: bytes  # the body as it came
    retry: int = 0  # by the client's SDK, as it says
    length: Prediction | None = None  # who predicted, and from what
    application: str = ""
    run: str = ""
    unit: str = ""
    task: asyncio.Task[object] | None = None
    interrupted: Interrupt | None = None
    placement: asyncio.Future[Placed] | None = None

    def interrupt(self, reason: Interrupt) -> None:
        """Stop whatever the request's task is doing; it finds the reason in `interrupted`."""
        if self.course.state < TicketState.DONE and self.interrupted is None and self.task is not None:
            self.interrupted = reason
            self.task.cancel()
