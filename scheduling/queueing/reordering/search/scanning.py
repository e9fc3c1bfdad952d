"""What it costs at least to swap a group with each of many of its model, or to put it behind each: eight at a time.

What such a bound needs of a group lies in rows of 32-bit numbers by rank (position in `Terms.movable`: by model, then due
time), which the processor's vector instructions read. Only the most promising is then priced exactly (`moves`), so rounding
to 32 bits, and bounds that say too little, cost time and nothing else.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.queueing.reordering.search.sequences import Sequences, Terms
from scheduling.struct_of_arrays import struct_of_arrays

NONE = np.int32(2**31 - 1)
"""Where nothing costs as little as it may."""
MOST_LOOKED_AT = 1024
"""Groups that one scan looks at, at the most."""
ZERO = np.float32(0.0)
PATIENCES = 4096
OFFSETS = PATIENCES - MOST_LOOKED_AT

# Rows of `Lanes.now`, by group; "behind" is what comes after it in its queue.
START, PAID, SERVED, SLOPE, RISE, RISE_WEIGHT, RISE_COST, FALL, FALL_WEIGHT, FALL_COST, SECOND, SECOND_COST = range(12)


@struct_of_arrays
class Lanes(NamedTuple):
    """R movable groups by rank, as scans read them."""

    service: NDArray[np.float32]
    """(T, R)"""
    offset: NDArray[np.float32]
    """(T, R): as in `Terms`."""
    weight: NDArray[np.float32]
    """(R,)"""
    now: NDArray[np.float32]
    """(12, R): when it begins, infinite while it is in no queue; what it costs; its service where it is. Then what it costs
    to put off all that is behind it: for each second, with the balance of the queue's end; the shift above which another one
    is late, its weight, and what its cost is from there on at a shift of 0; the shift (negative) from which on one is in
    time, and the same two; the shift from which on a second one is, and by how much the bound is lower then."""
    queue: NDArray[np.int32]
    """(R,)"""
    kind: NDArray[np.int32]
    """(R,): type of that queue."""
    patience: NDArray[np.float32]
    """(PATIENCES,): what a move may cost in temperatures, in any order: exponentially distributed (Metropolis)."""


def allocate_lanes(terms: Terms) -> Lanes:
    """Lanes of *terms*; `fill` writes what an order has to do with."""
    movable = terms.movable
    patience = -np.log1p(-(np.arange(PATIENCES) + 0.5) / PATIENCES)
    return Lanes(
        service=np.ascontiguousarray(terms.service[:, movable], np.float32),
        offset=np.ascontiguousarray(terms.offset[:, movable], np.float32),
        weight=terms.weight[movable].astype(np.float32),
        now=np.full((SECOND_COST + 1, movable.size), np.inf, np.float32),
        queue=np.full(movable.size, -1, np.int32),
        kind=np.zeros(movable.size, np.int32),
        patience=np.random.default_rng(0).permutation(patience).astype(np.float32),
    )


@compiled
def fill(terms: Terms, state: Sequences, lanes: Lanes) -> None:
    """Write what lanes have of the groups in all rows."""
    for queue in range(state.length.size):
        spread(terms, state, lanes, queue)


@compiled_inline
def spread(terms: Terms, state: Sequences, lanes: Lanes, queue: int) -> None:
    """Write what lanes have of the groups in the row *queue*, all of which are movable."""
    row, kind, far, kappa = state.row[queue], terms.kind[queue], np.float32(np.inf), np.float32(terms.kappa[0])
    slope = np.float32(2.0 * terms.balance[0] * state.end[queue])
    rise, rise_weight, rise_cost = far, ZERO, ZERO
    fall, fall_weight, fall_cost = -far, ZERO, ZERO
    late_weight, second, second_cost = ZERO, -far, ZERO
    for position in range(state.length[queue] - 1, -1, -1):
        here, after = row[position], row[position + 1]
        group = terms.group[kind, here.group]
        weight, late = np.float32(group.weight), np.float32(here.late)
        rank = np.int64(np.uint32(terms.rank[here.group]))
        lanes.now[START, rank] = np.float32(here.start)
        lanes.now[PAID, rank] = np.float32(after.cost - here.cost)
        lanes.now[SERVED, rank] = np.float32(group.service)
        lanes.now[SLOPE, rank] = slope
        lanes.now[RISE, rank] = rise
        lanes.now[RISE_WEIGHT, rank] = rise_weight
        lanes.now[RISE_COST, rank] = rise_cost
        lanes.now[FALL, rank] = fall
        lanes.now[FALL_WEIGHT, rank] = fall_weight
        lanes.now[FALL_COST, rank] = fall_cost
        lanes.now[SECOND, rank] = second
        lanes.now[SECOND_COST, rank] = second_cost
        lanes.queue[rank] = queue
        lanes.kind[rank] = kind
        if late > ZERO:
            slope += weight
            late_weight += weight
            if -late > fall:
                second, fall, fall_weight, fall_cost = fall, -late, weight, weight * (late + kappa)
            elif -late > second:
                second = -late
            second_cost = (late_weight - fall_weight) * kappa
        elif -late < rise:
            rise, rise_weight, rise_cost = -late, weight, weight * (late + kappa)


@compiled_inline
def _least(
    shift: np.float32,
    slope: np.float32,
    rise: np.float32,
    rise_weight: np.float32,
    rise_cost: np.float32,
    fall: np.float32,
    fall_weight: np.float32,
    fall_cost: np.float32,
    second: np.float32,
    second_cost: np.float32,
    balance: np.float32,
) -> np.float32:
    """A bound from below of what it costs to put off by *shift* what is behind, the balance included; exact until a second
    group comes to be late or in time."""
    later = rise_weight * shift + rise_cost if shift > rise else ZERO
    sooner = fall_weight * shift + fall_cost if shift <= fall else ZERO
    more = second_cost if shift <= second else ZERO
    return shift * (slope + balance * shift) + later - sooner - more


@compiled_inline
def _key(cost: np.float32, most: np.float32, inverse: np.float32, fits: bool, at: int) -> np.int32:
    """A number that is lower the farther *cost* is below *most*, with *at* in its last ten bits; NONE where it is above."""
    over = cost - most
    scaled = over * inverse
    scaled = scaled if scaled > np.float32(-1e6) else np.float32(-1e6)
    key = np.int32(np.int32(scaled) * MOST_LOOKED_AT + at)
    return key if (over <= ZERO) & fits else NONE


@compiled_inline
def scan_swaps(
    terms: Terms, lanes: Lanes, rank: int, first: int, end: int, kinds: tuple[int, int], temperature: float, drawn: int
) -> int:
    """With which of the groups *first* to *end* - 1 of its model, in other queues of two *kinds*, the group *rank* is best
    swapped: by cost less what it may cost, by patience from *drawn* on.

    Its place from *first* on, in the last ten bits; NONE if none costs as little as it may.
    """
    a, kind = lanes.queue[rank], np.int64(lanes.kind[rank])
    one, other = kinds
    service_1, offset_1 = lanes.service[one, rank], lanes.offset[one, rank]
    service_2, offset_2 = lanes.service[other, rank], lanes.offset[other, rank]
    one, other = np.int32(one), np.int32(other)  # type: ignore[assignment]
    mine, kappa = lanes.weight[rank], np.float32(terms.kappa[0])
    here = lanes.now[:, rank]
    start_a, paid_a, served_a, slope_a = here[START], here[PAID], here[SERVED], here[SLOPE]
    rise_a, rise_weight_a, rise_cost_a = here[RISE], here[RISE_WEIGHT], here[RISE_COST]
    fall_a, fall_weight_a, fall_cost_a = here[FALL], here[FALL_WEIGHT], here[FALL_COST]
    second_a, second_cost_a = here[SECOND], here[SECOND_COST]
    balance, degree = np.float32(terms.balance[0]), np.float32(temperature)
    inverse = np.float32(16.0 / temperature)
    service, offset, weight = lanes.service[kind, first:end], lanes.offset[kind, first:end], lanes.weight[first:end]
    start, paid, served = lanes.now[START, first:end], lanes.now[PAID, first:end], lanes.now[SERVED, first:end]
    slope, rise, rise_weight = (
        lanes.now[SLOPE, first:end],
        lanes.now[RISE, first:end],
        lanes.now[RISE_WEIGHT, first:end],
    )
    rise_cost, fall = lanes.now[RISE_COST, first:end], lanes.now[FALL, first:end]
    fall_weight, fall_cost = lanes.now[FALL_WEIGHT, first:end], lanes.now[FALL_COST, first:end]
    second, second_cost = lanes.now[SECOND, first:end], lanes.now[SECOND_COST, first:end]
    queue, types, patience = lanes.queue[first:end], lanes.kind[first:end], lanes.patience[drawn : drawn + end - first]
    chosen = NONE
    for at in range(end - first):
        is_one = types[at] == one
        shift_a = service[at] - served_a
        shift_b = (service_1 if is_one else service_2) - served[at]
        late_there = start_a + offset[at]
        late_here = start[at] + (offset_1 if is_one else offset_2)
        cost_a = late_there + kappa if late_there > ZERO else ZERO
        cost_b = late_here + kappa if late_here > ZERO else ZERO
        cost = weight[at] * cost_a + mine * cost_b - paid_a - paid[at]
        cost += _least(
            shift_a, slope_a, rise_a, rise_weight_a, rise_cost_a, fall_a, fall_weight_a, fall_cost_a, second_a,
            second_cost_a, balance,
        )  # fmt: skip
        cost += _least(
            shift_b, slope[at], rise[at], rise_weight[at], rise_cost[at], fall[at], fall_weight[at], fall_cost[at],
            second[at], second_cost[at], balance,
        )  # fmt: skip
        fits = (queue[at] != a) & (is_one | (types[at] == other))
        key = _key(cost, degree * patience[at], inverse, fits, at)
        chosen = key if key < chosen else chosen
    return chosen  # type: ignore[return-value]


@compiled_inline
def scan_places(
    terms: Terms,
    lanes: Lanes,
    rank: int,
    removed: float,
    first: int,
    end: int,
    kinds: tuple[int, int],
    temperature: float,
    drawn: int,
) -> int:
    """Behind which of the groups *first* to *end* - 1 of its model the group *rank* is best put, as `scan_swaps`.

    *removed* is what it costs that it leaves its place (`moves.price_removal`).
    """
    a = lanes.queue[rank]
    one, other = kinds
    service_1, offset_1 = lanes.service[one, rank], lanes.offset[one, rank]
    service_2, offset_2 = lanes.service[other, rank], lanes.offset[other, rank]
    one, other = np.int32(one), np.int32(other)  # type: ignore[assignment]
    mine, kappa, gone = lanes.weight[rank], np.float32(terms.kappa[0]), np.float32(removed)
    balance, degree = np.float32(terms.balance[0]), np.float32(temperature)
    inverse = np.float32(16.0 / temperature)
    start, served, slope = lanes.now[START, first:end], lanes.now[SERVED, first:end], lanes.now[SLOPE, first:end]
    rise, rise_weight = lanes.now[RISE, first:end], lanes.now[RISE_WEIGHT, first:end]
    rise_cost = lanes.now[RISE_COST, first:end]
    queue, types, patience = lanes.queue[first:end], lanes.kind[first:end], lanes.patience[drawn : drawn + end - first]
    chosen = NONE
    for at in range(end - first):
        is_one = types[at] == one
        shift = service_1 if is_one else service_2
        late_there = start[at] + served[at] + (offset_1 if is_one else offset_2)
        cost_b = late_there + kappa if late_there > ZERO else ZERO
        later = rise_weight[at] * shift + rise_cost[at] if shift > rise[at] else ZERO
        cost = gone + mine * cost_b + later + shift * (slope[at] + balance * shift)
        fits = (queue[at] != a) & (is_one | (types[at] == other))
        key = _key(cost, degree * patience[at], inverse, fits, at)
        chosen = key if key < chosen else chosen
    return chosen  # type: ignore[return-value]
