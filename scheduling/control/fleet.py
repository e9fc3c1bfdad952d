"""The fleet as the concerns of `scheduling.control` see it and act on it, live and simulated.

Its bindings are `controlplane.dispatch.fleet`, over the dispatcher, and `scheduling.simulation.simulated_fleet`, over the
compiled world. A concern keeps what it alone knows; arrays, requests and time belong to the fleet.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held_work import Release
from scheduling.queueing.waiting_set import WaitingArrays


class RequestTable(Protocol):
    """One row per request, from its arrival until it ends; columns of equal length. Times are seconds of `Fleet.now_s`."""

    arrival_s: NDArray[np.float64]
    since_s: NDArray[np.float64]
    """Arrival of its work: a line of a batch is older than its request."""
    model: NDArray[Any]
    """Number of the model that serves it (`Fleet.models`)."""
    prompt_tokens: NDArray[Any]
    predicted_tokens: NDArray[Any]
    """Output tokens that are expected."""
    priority: NDArray[Any]
    end_s: NDArray[np.float64]
    """After arrival, of the last token; infinity for none."""
    hold_s: NDArray[np.float64]
    """After arrival, for which it is held while no instance has room."""
    held: NDArray[Any]
    """Of classes that are not interactive: `held.HELD`, `OPPORTUNISTIC` and `ENDS_ON_RECLAIM`, added; 0 for others."""


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
    def models(self) -> Sequence[str]:
        """Names of models by number."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """By number; of donated instances, too."""

    # Reading

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

    # Acting

    def queue(self, row: int, endpoint: int, release: Release | None = None) -> None:
        """Queue the request of *row* at *endpoint*, and give out what has room there. *release*: by the queue manager."""

    def expire(self, row: int) -> None:
        """Refuse the request of *row*, which was held too long, or hold it on."""
