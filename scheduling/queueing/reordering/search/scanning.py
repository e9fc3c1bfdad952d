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

NONE = np.int32(2**31 - 1)
"""Where nothing costs as little as it may."""
MOST_LOOKED_AT = 1024
"""Groups that one scan looks at, at the most."""
ZERO = np.float32(0.0)
PATIENCES = 4096
OFFSETS = PATIENCES - MOST_LOOKED_AT

# Rows of `Lanes.now`, by group; "behind" is what comes after it in its queue.
START, PAID, SERVED, END, LATE_BEHIND, RISE, RISE_WEIGHT, FALL, FALL_WEIGHT, SECOND_FALL = range(10)


class Lanes(NamedTuple):
    """R movable groups by rank, as scans read them."""

    service: NDArray[np.float32]
    """(T, R)"""
    offset: NDArray[np.float32]
    """(T, R): as in `Terms`."""
    weight: NDArray[np.float32]
    """(R,)"""
    now: NDArray[np.float32]
    """(10, R): when it begins; what it costs; its service where it is; end of its queue; late weight behind; by how much
    what is behind may be put off until another is late, and that one's weight; by how much it may be brought forward until
    one is in time, that one's weight, and until a second is. The start is infinite while it is in no queue."""
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
        now=np.full((SECOND_FALL + 1, movable.size), np.inf, np.float32),
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
    row, kind, end, far = state.row[queue], terms.kind[queue], np.float32(state.end[queue]), np.float32(np.inf)
    late_weight, rise, rise_weight, fall, fall_weight, second = ZERO, far, ZERO, far, ZERO, far
    for position in range(state.length[queue] - 1, -1, -1):
        here, after = row[position], row[position + 1]
        group = terms.group[kind, here.group]
        weight, late = np.float32(group.weight), np.float32(here.late)
        rank = np.int64(np.uint32(terms.rank[here.group]))
        lanes.now[START, rank] = np.float32(here.start)
        lanes.now[PAID, rank] = np.float32(after.cost - here.cost)
        lanes.now[SERVED, rank] = np.float32(group.service)
        lanes.now[END, rank] = end
        lanes.now[LATE_BEHIND, rank] = late_weight
        lanes.now[RISE, rank] = rise
        lanes.now[RISE_WEIGHT, rank] = rise_weight
        lanes.now[FALL, rank] = fall
        lanes.now[FALL_WEIGHT, rank] = fall_weight
        lanes.now[SECOND_FALL, rank] = second
        lanes.queue[rank] = queue
        lanes.kind[rank] = kind
        if late > ZERO:
            late_weight += weight
            if late < fall:
                second, fall, fall_weight = fall, late, weight
            elif late < second:
                second = late
        elif -late < rise:
            rise, rise_weight = -late, weight


@compiled_inline
def _least(
    shift: np.float32,
    late: np.float32,
    rise: np.float32,
    rise_weight: np.float32,
    fall: np.float32,
    fall_weight: np.float32,
    second: np.float32,
    kappa: np.float32,
) -> np.float32:
    """A bound from below of what it costs to put off by *shift* what is behind; exact until a second group comes to be late
    or in time."""
    back = -shift
    later = rise_weight * (shift - rise + kappa) if shift > rise else ZERO
    sooner = fall_weight * (back - fall - kappa) if back >= fall else ZERO
    more = (late - fall_weight) * kappa if back >= second else ZERO
    return shift * late + later + sooner - more


@compiled_inline
def _key(cost: np.float32, most: np.float32, inverse: np.float32, fits: bool, at: int) -> np.int32:
    """A number that is lower the farther *cost* is below *most*, with *at* in its last ten bits; NONE where it is above."""
    over = cost - most
    scaled = over * inverse
    scaled = scaled if scaled > np.float32(-1e6) else np.float32(-1e6)
    key = np.int32(scaled) * np.int32(MOST_LOOKED_AT) + np.int32(at)
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
    mine, kappa, twice = lanes.weight[rank], np.float32(terms.kappa[0]), np.float32(2.0)
    here = lanes.now[:, rank]
    start_a, paid_a, served_a, end_a, late_a = here[START], here[PAID], here[SERVED], here[END], here[LATE_BEHIND]
    rise_a, rise_weight_a, fall_a, fall_weight_a = here[RISE], here[RISE_WEIGHT], here[FALL], here[FALL_WEIGHT]
    second_a = here[SECOND_FALL]
    balance, degree = np.float32(terms.balance[0]), np.float32(temperature)
    inverse = np.float32(16.0 / temperature)
    service, offset, weight = lanes.service[kind, first:end], lanes.offset[kind, first:end], lanes.weight[first:end]
    start, paid, served = lanes.now[START, first:end], lanes.now[PAID, first:end], lanes.now[SERVED, first:end]
    ends, late, rise = lanes.now[END, first:end], lanes.now[LATE_BEHIND, first:end], lanes.now[RISE, first:end]
    rise_weight, fall = lanes.now[RISE_WEIGHT, first:end], lanes.now[FALL, first:end]
    fall_weight, second = lanes.now[FALL_WEIGHT, first:end], lanes.now[SECOND_FALL, first:end]
    queue, types, patience = lanes.queue[first:end], lanes.kind[first:end], lanes.patience[drawn : drawn + end - first]
    chosen = NONE
    for at in range(end - first):
        is_one = types[at] == one
        begins, theirs, ends_b = start[at], weight[at], ends[at]
        shift_a = service[at] - served_a
        shift_b = (service_1 if is_one else service_2) - served[at]
        late_there = start_a + offset[at]
        late_here = begins + (offset_1 if is_one else offset_2)
        cost_a = late_there + kappa if late_there > ZERO else ZERO
        cost_b = late_here + kappa if late_here > ZERO else ZERO
        cost = theirs * cost_a + mine * cost_b - paid_a - paid[at]
        cost += _least(shift_a, late_a, rise_a, rise_weight_a, fall_a, fall_weight_a, second_a, kappa)
        cost += _least(shift_b, late[at], rise[at], rise_weight[at], fall[at], fall_weight[at], second[at], kappa)
        cost += balance * (shift_a * (twice * end_a + shift_a) + shift_b * (twice * ends_b + shift_b))
        fits = (queue[at] != a) & (is_one | (types[at] == other))
        chosen = min(chosen, _key(cost, degree * patience[at], inverse, fits, at))
    return chosen  # type: ignore[return-value]


@compiled_inline
def scan_places(
    terms: Terms,
    lanes: Lanes,
    rank: int,
    removed: tuple[float, float],
    first: int,
    end: int,
    kinds: tuple[int, int],
    temperature: float,
    drawn: int,
) -> int:
    """Behind which of the groups *first* to *end* - 1 of its model the group *rank* is best put, as `scan_swaps`.

    *removed* is what it costs that it leaves its place, and by how much what is behind it is put off then.
    """
    a = lanes.queue[rank]
    one, other = kinds
    service_1, offset_1 = lanes.service[one, rank], lanes.offset[one, rank]
    service_2, offset_2 = lanes.service[other, rank], lanes.offset[other, rank]
    one, other = np.int32(one), np.int32(other)  # type: ignore[assignment]
    mine, kappa, twice = lanes.weight[rank], np.float32(terms.kappa[0]), np.float32(2.0)
    balance, degree = np.float32(terms.balance[0]), np.float32(temperature)
    inverse = np.float32(16.0 / temperature)
    shift_a = np.float32(removed[1])
    gone = np.float32(removed[0]) + balance * shift_a * (twice * lanes.now[END, rank] + shift_a)
    start, served, ends = lanes.now[START, first:end], lanes.now[SERVED, first:end], lanes.now[END, first:end]
    late, rise, rise_weight = (
        lanes.now[LATE_BEHIND, first:end],
        lanes.now[RISE, first:end],
        lanes.now[RISE_WEIGHT, first:end],
    )
    queue, types, patience = lanes.queue[first:end], lanes.kind[first:end], lanes.patience[drawn : drawn + end - first]
    chosen = NONE
    for at in range(end - first):
        is_one = types[at] == one
        until, weight, ends_b = rise[at], rise_weight[at], ends[at]
        shift = service_1 if is_one else service_2
        late_there = start[at] + served[at] + (offset_1 if is_one else offset_2)
        cost_b = late_there + kappa if late_there > ZERO else ZERO
        later = weight * (shift - until + kappa) if shift > until else ZERO
        cost = gone + mine * cost_b + shift * late[at] + later + balance * shift * (twice * ends_b + shift)
        fits = (queue[at] != a) & (is_one | (types[at] == other))
        chosen = min(chosen, _key(cost, degree * patience[at], inverse, fits, at))
    return chosen  # type: ignore[return-value]
