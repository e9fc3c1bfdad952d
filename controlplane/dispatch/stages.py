"""Stages: the features of the dispatcher. Each is a class and a place in its list; without it the rest works."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct
from numpy import int32
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.request_table import LiveRequests
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.port import Asked, Deliver, Left, Refused

MAX_ATTEMPTS: Final = 3
"""Instances that may fail a request before it is refused."""


class Arrival(Struct, gc=False):
    """A request that is being admitted: a stage may change what is asked and where it is queued, or have it held."""

    asked: Asked
    own: Endpoint | None
    """The endpoint that its caller prefers."""
    endpoint: Endpoint | None
    """Where it will be queued; None: nothing serves its model."""
    on_spot: bool = False
    """That is donated instances with room for it."""
    held: bool = False
    """By the queue manager."""


class Retry(Struct, gc=False):
    """A request that its instance failed, and that is to be placed again."""

    failed: int
    """Instances that failed it, of its present model."""
    elsewhere: bool
    """Whether another instance accepts work."""
    avoid: list[Replica]
    """Instances that get it only where no other can."""


class Stage:
    """Hooks, each called in one place of the dispatcher, in the order of its stages. By default they do nothing."""

    def admit(self, arrival: Arrival) -> Refused | None:
        """Change *arrival*, or return why it is refused."""

    def candidates(self, asked: Asked, endpoints: NDArray[int32]) -> NDArray[int32]:
        """Return those of *endpoints* that may serve *asked*."""
        return endpoints

    def queued(self, request: Request) -> None:
        """*request* is about to be queued at its endpoint."""

    def waiting(self, request: Request) -> bool:
        """*request* was queued, and no instance has room. Return whether it waits there no longer."""
        return False

    def placed(self, request: Request, replica: Replica) -> None:
        """*replica* gets *request*."""

    def progress(self, tokens: Sequence[tuple[Request, int]]) -> None:
        """Requests have emitted so many tokens in all."""

    def failed(self, request: Request, replica: Replica, left: Left) -> None:
        """*replica* failed *request*, which is still counted there."""

    def again(self, request: Request, retry: Retry) -> Refused | None:
        """Return why *request* is not placed again. A stage that queues it itself returns None."""

    def withdrawn(self, request: Request) -> None:
        """*request* leaves its instance, its queue, or the queue manager."""

    def ended(self, request: Request, output_tokens: int | None) -> None:
        """*request* was answered with *output_tokens*, or ends without an answer (None). It is where it was."""

    def sweep(self) -> None:
        """Do what is due. Called every `SWEEP_S`."""


class Core(Protocol):
    """The dispatcher, as stages act on it."""

    topology: Topology
    deliver: Deliver
    clock: Callable[[], float]
    table: LiveRequests

    def candidates(self, asked: Asked) -> NDArray[int32]: ...
    def possible(self, asked: Asked) -> int: ...
    def estimated_wait_s(self, endpoint: Endpoint) -> float | None: ...
    def is_open(self, request: Request) -> bool: ...
    def drop(self, request: Request, refused: Refused) -> None: ...
    def refuse(self, request: Request, status: int, code: str, message: str, retry_after_s: float) -> None: ...
    def evict(self, number: int) -> int | None: ...
    def guarded(self, act: Callable[[Request], object]) -> Callable[[Request], None]: ...


def hooks(stages: Iterable[Stage], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the hooks *name* of the stages that have one."""
    return tuple(getattr(stage, name) for stage in stages if getattr(type(stage), name) is not getattr(Stage, name))
