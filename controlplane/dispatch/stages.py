"""Stages: the features of the dispatcher. Each is a class and a place in its list; without it the rest works."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct
from numpy import int32
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request
from controlplane.dispatch.port import Asked, Left, Refused

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
    hold: Callable[[Request], None] | None = None
    """Holds it in place of queueing it."""
    again: bool = False
    """Another dispatcher had admitted it: it is no new demand, and goes on waiting however long that takes."""


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

    def is_wanted(self) -> bool:
        """Whether the inventory needs the feature. Once enabled it stays so: requests may carry what it counts."""
        return True

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


HOOKS: Final = tuple(name for name in vars(Stage) if not name.startswith("_") and name != "is_wanted")
