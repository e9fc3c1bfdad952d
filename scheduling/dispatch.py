"""The dispatch decision: the first request in an endpoint's queue, and the instance that gets it. One compiled call."""

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import (
    EndpointArrays,
    FleetArrays,
    allocate_endpoints,
    allocate_fleet,
    assign_endpoint,
    index_members,
)
from scheduling.fleet.carried import carried
from scheduling.fleet.profile import service_time_s, step_time_s
from scheduling.lookahead import maps as lookahead
from scheduling.lookahead import outlook
from scheduling.queueing.groups import put_first
from scheduling.queueing.ordering import engine_priority, queue_key
from scheduling.queueing.virtual_queues import fit_groups, head, insert_loose, may_balance, pull, reassign
from scheduling.queueing.waiting_set import (
    WaitingArrays,
    allocate_waiting,
    enqueue,
    free_slot,
    leave,
    peek,
    pop,
    push,
    regroup,
    rekey,
    remove,
)
from scheduling.routing import adapters, predictive, requests_ahead
from scheduling.routing.candidates import COLUMNS, write_loads
from scheduling.routing.filters import allow_all, exclude
from scheduling.routing.regions import add_prefill, better_home, choose_region, pressure
from scheduling.routing.requests_ahead import close_ahead, open_ahead
from scheduling.routing.routers import (
    POLICIES,
    POLICY_CODES,
    advance,
    advance_many,
    has_room,
    place,
    release,
    route,
)


@compiled
def dispatch(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    endpoint: int,
    policy: int,
    rows: NDArray[np.float64],
) -> tuple[int, int]:
    """Dispatch the first request in the queue of *endpoint*, if an instance has room for it.

    - Consider only the head of the heap: a request that needs more room than there is blocks those behind it; otherwise
      it could wait forever behind small ones.
    - Route it by the policy with code *policy* (`routing.POLICY_CODES`): to an instance with room, or, if there is
      none, to one that may hold it ahead (`allowance`), of those that may get it (`filters.exclude`).
    - Remove it from the heap, write its instance, and place its load.

    Writes the inputs of the decision into *rows* (`routing.candidates`), if there are any. Return (slot, instance), or (-1,
    -1) if no request waits or the head has no room. The slot stays taken: free it once nothing more is read from
    it. Call repeatedly until (-1, -1).
    """
    slot = peek(waiting, endpoint)
    if slot < 0:
        return -1, -1
    prompt_tokens, output_tokens = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
    filtered = exclude(fleet, endpoints, waiting, endpoint, int(slot))
    instance = route(fleet, endpoints, policy, endpoint, prompt_tokens, output_tokens)
    opened = instance < 0 and open_ahead(fleet, endpoints, endpoint)
    if opened:
        exclude(fleet, endpoints, waiting, endpoint, int(slot))
        instance = route(fleet, endpoints, policy, endpoint, prompt_tokens, output_tokens)
    if rows.shape[0] > 0 and instance >= 0:
        write_loads(fleet, endpoints, endpoint, int(prompt_tokens), int(output_tokens), instance, rows)
    if opened:
        close_ahead(fleet, endpoints, endpoint)
    if filtered:
        allow_all(fleet, endpoints, endpoint)
    if instance < 0:
        return -1, -1
    send(fleet, endpoints, waiting, slot, instance)
    return slot, instance


@compiled
def send(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, slot: int, instance: int) -> None:
    """Remove the waiting *slot* from its heap for *instance*, and place its load there."""
    leave(waiting, slot)
    waiting.instance[slot] = instance
    place(fleet, endpoints, instance, waiting.prompt_tokens[slot], waiting.output_tokens[slot])


def warm_up() -> None:
    """Load every live kernel from the cache, or compile it (about ten seconds, on the first start only).

    Call it before serving: afterwards no call with plain `int` and `float` compiles.
    """
    fleet, endpoints, waiting = allocate_fleet(1), allocate_endpoints(1, 1), allocate_waiting(1, 2)
    rows = np.zeros((1, COLUMNS))
    assign_endpoint(fleet, endpoints, 0, 0)
    fleet.accepting[0], fleet.max_num_seqs[0], fleet.kv_capacity_tokens[0] = 1, 2, 100
    for code in (POLICY_CODES[name] for name in POLICIES):
        slot = enqueue(waiting, 0, 0.0, 0.0, 1.0, 0, 1, 1, -1, -1, -1, -1)
        rekey(waiting, slot, 1.0)
        dispatch(fleet, endpoints, waiting, 0, code, rows)
        push(waiting, 0, slot, 1.0)
        pop(waiting, 0)
        remove(waiting, slot)
        advance(fleet, 0, 2, 0, 1)
        release(fleet, 0, 2, 1)
        free_slot(waiting, slot)
        route(fleet, endpoints, code, 0, 1, 1)
    for limit in (1, 0):
        enqueue(waiting, 0, 0.0, 0.0, 1.0, 0, 1, 1, -1, -1, -1, -1)
        regroup(waiting, {0: limit})
        fit_groups(fleet, endpoints, waiting.groups, 0, 1.0)
        may_balance(fleet, endpoints, waiting, 0)
        pull(fleet, endpoints, waiting, 0, 0.0)
        write_loads(fleet, endpoints, 0, 1, 1, 0, rows)
        insert_loose(fleet, endpoints, waiting, 0)
        reassign(fleet, endpoints, waiting)
        head(waiting.groups, 0)
        put_first(waiting.groups, 0, 0)
        slot = pop(waiting, 0)
        send(fleet, endpoints, waiting, slot, 0)
        release(fleet, 0, 2, 0)
        free_slot(waiting, slot)
    for router in POLICIES.values():
        router(fleet, endpoints, 0, 1, 1)
    has_room(fleet, 0, 1, 1)
    peek(waiting, 0)
    choose_region(fleet, endpoints, np.zeros(1, np.int32), waiting.size, 0.7, 0.0)
    better_home(fleet, endpoints, np.zeros(1, np.int32), waiting.size, 0, 0.7, 0.0)
    pressure(fleet, endpoints, 0, 0, 0.0)
    add_prefill(fleet, endpoints, 0, 1, 1, 0.0)
    index_members(fleet, endpoints)
    place(fleet, endpoints, 0, 1, 1)
    advance_many(fleet, *(np.zeros(0, np.int64) for _ in range(4)))
    engine_priority(0, 0, queue_key(0, 0.0, 1.0, 0, 1.0, 1.0))
    service_time_s(0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1, 1)
    carried(fleet, 0)
    requests_ahead.warm_up(fleet)
    adapters.warm_up(fleet, endpoints)
    lookahead.warm_up()
    outlook.look(fleet, 0, np.zeros(1, np.int64), 0.0)
    outlook.waiting_tokens(waiting, 0)
    predictive.warm_up()
    step_time_s(0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1, 1, 1)
