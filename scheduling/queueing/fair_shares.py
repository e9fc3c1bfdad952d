"""Fair shares of tenants: the virtual token counter (VTC, Sheng 2024) and weighted fair queueing.

Each tenant has a counter of what it was served at an endpoint, over its weight; the tenant with the lowest one goes first,
and its requests as they came. A waiting request is charged in advance, so its key is the counter that its tenant will have
once those before it have left: keys order all requests in one heap, and a tenant's first one carries its counter.

`vtc` charges prompt tokens once and output tokens twice, at first those predicted and at the end those that came (VTC
section 4.3 with length prediction). `wfq` charges the predicted service time and corrects nothing (start-time fair
queueing).
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_inline
from scheduling.queueing.ordering import VTC
from scheduling.struct_of_arrays import struct_of_arrays

NO_SHARES: Final = 0
OUTPUT_WEIGHT: Final = 2.0
"""Cost of an output token in prompt tokens, as in VTC's evaluation."""


@struct_of_arrays
class ShareArrays(NamedTuple):
    """Counters of tenants by endpoint."""

    ordering: NDArray[np.int64]
    """By endpoint: VTC or WFQ; NO_SHARES for other orderings."""
    counter: NDArray[np.float64]
    """endpoints x tenants: charged so far, over the tenant's weight."""
    clock: NDArray[np.float64]
    """By endpoint: key of the request that left last."""
    weight: NDArray[np.float64]
    """By tenant."""
    cost: NDArray[np.float64]
    """By slot of the waiting set: charged for the request there, over the tenant's weight."""


def allocate_shares(endpoints: int, slots: int, tenants: int) -> ShareArrays:
    """Return shares in which no tenant was served."""
    return ShareArrays(
        ordering=np.full(endpoints, NO_SHARES, np.int64),
        counter=np.zeros((endpoints, tenants)),
        clock=np.zeros(endpoints),
        weight=np.ones(tenants),
        cost=np.zeros(slots),
    )


def grow_shares(old: ShareArrays, endpoints: int, slots: int, tenants: int) -> ShareArrays:
    """Return a larger copy. No size may shrink."""
    grown = allocate_shares(endpoints, slots, tenants)
    for name in ("ordering", "clock", "weight", "cost"):
        array: NDArray[np.generic] = getattr(old, name)
        getattr(grown, name)[: array.size] = array
    grown.counter[: old.counter.shape[0], : old.counter.shape[1]] = old.counter
    return grown


@compiled_inline
def cost_of(shares: ShareArrays, endpoint: int, prompt_tokens: float, output_tokens: float, service_s: float) -> float:
    """Cost of a request: tokens under `vtc`, seconds under `wfq`."""
    if shares.ordering[endpoint] == VTC:
        return prompt_tokens + OUTPUT_WEIGHT * output_tokens
    return service_s
