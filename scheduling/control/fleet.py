"""The fleet as the concerns of `scheduling.control` see it and act on it, live and simulated.

Its bindings are `controlplane.dispatch.fleet`, over the dispatcher, and `scheduling.simulation.simulated_fleet`, over the
compiled world. A concern keeps what it alone knows; arrays, requests and time belong to the fleet.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.prewarming import Warmable
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held_work import Release
from scheduling.queueing.ordering import Standing
from scheduling.queueing.promises import ClassTerms
from scheduling.queueing.running import Running
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.models import ModelRule
from scheduling.routing.prefix_affinity import Affinity


class RequestTable(Protocol):
    """One row per request, from its arrival until it ends; columns of equal length. Times are seconds of `Fleet.now_s`."""

    @property
    def arrival_s(self) -> NDArray[np.float64]: ...
    @property
    def since_s(self) -> NDArray[np.float64]:
        """Arrival of its work: a line of a batch is older than its request."""

    @property
    def prompt_tokens(self) -> NDArray[Any]: ...
    @property
    def predicted_tokens(self) -> NDArray[Any]:
        """Output tokens that are expected."""

    @property
    def priority(self) -> NDArray[Any]: ...
    @property
    def end_s(self) -> NDArray[np.float64]:
        """After arrival, of the last token; infinity for none."""

    @property
    def hold_s(self) -> NDArray[np.float64]:
        """After arrival, for which it is held while no instance has room."""

    @property
    def held(self) -> NDArray[Any]:
        """Of classes that are not interactive: `held.HELD`, `OPPORTUNISTIC` and `ENDS_ON_RECLAIM`, added; 0 for others."""


class FallbackTerms(NamedTuple):
    """What decides on the fallback of a request's model."""

    model: str
    fallback: str
    wait_s: float | None
    """Most wait for its model; None: however long."""
    origin: tuple[str, tuple[str, ...]]
    """The region of its caller, and the regions within which it is to be served; none: any."""
    opportunistic: bool


class Endpoint(Protocol):
    """The terms of an endpoint."""

    @property
    def model(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def policy(self) -> EndpointPolicy: ...
    @property
    def profile(self) -> Profile: ...
    @property
    def front_end(self) -> FrontEnd: ...
    @property
    def prewarm_share(self) -> float:
        """Most of an instance's time that computing system prompts early may take (`control.system_prompts`)."""


class SwapGroup(NamedTuple):
    """Instances that share their GPUs, of which at most one is awake, by number; -1 for none."""

    name: str
    at_rest: Mapping[int, float]
    """Those asleep or stopped, in order, with the duration of a swap to each once the awake one runs nothing."""
    awake: int
    """The one that has the GPUs."""
    is_ready: bool
    """Whether that serves."""
    ready_s: float
    """For how long it has been in its state."""
    in_progress: bool
    """Whether a swap is in progress."""
    target: int
    """The instance to which that leads."""


class Fleet(Protocol):
    """What a concern reads and does. Requests are rows of the table; endpoints and instances are numbers of the arrays."""

    # Time and arrays

    @property
    def now_s(self) -> float: ...
    @property
    def instances(self) -> FleetArrays: ...
    @property
    def members(self) -> EndpointArrays: ...
    @property
    def waiting(self) -> WaitingArrays: ...
    @property
    def requests(self) -> RequestTable: ...
    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """By number; of donated instances, too."""

    @property
    def affinity(self) -> Affinity:
        """The index of cached prefixes."""

    # Reading

    def row_at(self, slot: int) -> int:
        """Return the row of the request that waits in *slot* of the waiting set."""

    def preferred(self, model: str, region: str, within: tuple[str, ...] = ()) -> int:
        """Return the endpoint of *model* that callers in *region* prefer, *within* regions or any; -1 for none."""

    def origin(self, row: int) -> tuple[str, tuple[str, ...]]:
        """Return the region of the caller of the request of *row*, and the regions within which it is served; none: any."""

    def serves(self, endpoint: int) -> bool:
        """Whether *endpoint* gets requests; False for one of donated instances, which opportunistic ones alone reach."""

    def spot_with_room(self, row: int) -> int:
        """Return the endpoint of the nearest donated instances with room for the request of *row*; -1 for none."""

    def occupancy(self) -> NDArray[np.int64]:
        """Return what the instances of each endpoint have and hold, endpoints x 10, valid until the next call.

        Of the instances that accept work: KV tokens, requests that run at once; expected KV tokens of requests that run or
        wait there, of interactive classes and of others; these requests, likewise; the instances; of these, the ones that
        were given a request, and the smoothed lengths of the prompts and outputs that they were given, summed.
        """

    # Application runs

    def produced(self, rows: Collection[int] | None = None) -> Callable[[int], int]:
        """Return a function of rows, of *rows* alone if given, that returns the output tokens so far of each whose request
        an instance has, and 0 of others and for negative numbers. It is valid until time passes.
        """

    def record_standing(self, rows: Sequence[int], standing: Standing) -> None:
        """Record the standing of the run of the requests of *rows*."""

    # Prewarming

    @property
    def prewarm_k(self) -> float:
        """The least effectiveness for which a likely call is prewarmed (`applications.prewarming.start_in_s`)."""

    @property
    def any_cold(self) -> bool:
        """Whether adapters, containers or DNN models can be cold."""

    def system_prompt(self, row: int) -> Hashable | None:
        """Return the name of the system prompt of the request of *row*, None without one that can be cached."""

    def warm_s(self, kind: str, name: str) -> float | None:
        """Return the seconds to warm the backend *name*, a container or DNN model; None where it is not kept warm."""

    def sleeping(self) -> Mapping[int, float]:
        """Return the seconds to wake an instance of each endpoint that has none awake or starting, where one sleeps."""

    # Waits, admission, fallbacks

    def slot(self, row: int) -> int:
        """Return the slot of the waiting set in which the request of *row* waits; -1 if it does not."""

    def slo_class(self, row: int) -> str: ...
    def max_tokens(self, row: int) -> float:
        """Return the most output tokens that the caller of *row* allows; infinity for no limit."""

    def terms(self, row: int) -> tuple[ClassTerms, tuple[ClassTerms, ...]]:
        """Return the terms of the request of *row*, and those of the classes to which it may be degraded, in order."""

    def running(self, endpoint: int) -> tuple[int, int]:
        """Return the sequences that run at *endpoint*, and the output tokens that they have so far."""

    def serves_in(self, instance: int) -> tuple[float, float] | None:
        """Return the seconds until *instance*, which starts or is away for a moment, accepts work, and their standard
        deviation as a share of them; None otherwise.
        """

    def serving(self, model: str, origin: tuple[str, tuple[str, ...]], opportunistic: bool = False) -> int:
        """Return the endpoint of *model* that serves a new request of *origin* now; -1 without one."""

    def fallback_of(self, row: int) -> FallbackTerms | None:
        """Return the terms of the fallback of the request of *row*; None where none may serve it any longer."""

    # Global scheduler and swaps

    def running_requests(self) -> Running:
        """Return the requests on instances of endpoints with request groups, in order of dispatch at each."""

    def swap_groups(self) -> Iterable[SwapGroup]:
        """Return the groups of instances that share GPUs."""

    def name(self, instance: int) -> str: ...
    def is_served(self, endpoint: int) -> bool:
        """Whether an instance of *endpoint* serves, or starts."""

    def pump(self, endpoint: int) -> None:
        """Give out what has room at *endpoint*."""

    def evict(self, row: int) -> None:
        """Have the request of *row* leave its instance; it waits again with its output so far."""

    # Acting

    def queue_on(self, row: int, terms: ClassTerms) -> None:
        """Queue the request of *row*, which waits, again on *terms*, or hold it where its class is held."""

    def fall_back(self, row: int, endpoint: int, rule: ModelRule) -> None:
        """Queue the request of *row*, which waits or has left its instance, at *endpoint* as one of the model there."""

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        """Queue the request of *row* at *endpoint*, and give out what has room there. *release*: by the queue manager."""

    def expire(self, row: int) -> None:
        """Refuse the request of *row*, which was held too long, or hold it on."""

    def warm(self, instance: int, target: Warmable, leaves: int = -1, *, again: bool = False) -> None:
        """Warm an adapter, which *instance* has in CPU memory or not (*again*) and for which the adapter *leaves* it, or a
        system prompt there.
        """
