import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.dispatch import dispatch
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, in_order
from scheduling.routing.candidates import COLUMNS, INSTANCE, KV, REMAINING, ROOM, RUNNING
from scheduling.routing.routers import POLICIES, POLICY_CODES
from tests.oracles import dispatch as reference
from tests.scheduling.fleets import ENDPOINTS, as_arrays, plain_fleets


def arrive(waiting, endpoint, key, prompt_tokens=1, output_tokens=1):
    return enqueue(waiting, endpoint, key, key, np.inf, 0, prompt_tokens, output_tokens, -1, -1, -1, -1)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    plain=plain_fleets,
    requests=st.lists(
        st.tuples(
            st.integers(0, ENDPOINTS - 1), st.sampled_from([0.0, 1.0, 2.0]), st.integers(1, 6), st.integers(1, 6)
        ),
        max_size=15,
    ),
)
def test_the_queue_is_dispatched_in_order_until_the_head_has_no_room(policy, plain, requests):
    fleet, endpoints = as_arrays(plain)
    waiting = allocate_waiting(ENDPOINTS, 15)
    slots = [arrive(waiting, *request) for request in requests]
    for endpoint in range(ENDPOINTS):
        queue = sorted(
            (slot for slot, request in zip(slots, requests, strict=True) if request[0] == endpoint),
            key=lambda slot: requests[slots.index(slot)][1],
        )
        while True:
            expected = (-1, -1)
            loads = [(each.running, each.kv_tokens, each.remaining_tokens) for each in plain.instances]
            rows = np.full((2, COLUMNS), np.nan)
            if queue:
                _, _, prompt_tokens, output_tokens = requests[slots.index(queue[0])]
                twin = reference.POLICIES[policy]
                chosen = plain.dispatch(partial(twin, plain, endpoint, prompt_tokens, output_tokens), endpoint)
                if chosen >= 0:
                    plain.place(chosen, prompt_tokens, output_tokens)
                    expected = (queue.pop(0), chosen)
            assert dispatch(fleet, endpoints, waiting, endpoint, POLICY_CODES[policy], rows) == expected
            if expected == (-1, -1):
                assert np.isnan(rows).all()
                break
            rows = rows[rows[:, INSTANCE] >= 0]
            assert rows[rows[:, INSTANCE] == expected[1], ROOM].tolist() == [1.0]
            assert [tuple(row) for row in rows[:, [RUNNING, KV, REMAINING]].tolist()] == [
                loads[int(instance)] for instance in rows[:, INSTANCE]
            ]
            assert waiting.instance[expected[0]] == expected[1]
        assert in_order(waiting, endpoint).tolist() == queue
    assert fleet.running.tolist() == [instance.running for instance in plain.instances]
    assert fleet.kv_tokens.tolist() == [instance.kv_tokens for instance in plain.instances]
    assert fleet.remaining_tokens.tolist() == [instance.remaining_tokens for instance in plain.instances]


AFTER_WARM_UP = """
import numpy as np
from scheduling import dispatch
from scheduling.fleet import arrays as fleet
from scheduling.queueing import waiting_set as ordering
from scheduling.routing import candidates, regions, requests_ahead, routers as routing

def compiled():
    modules = (requests_ahead, dispatch, candidates, fleet, ordering, regions, routing)
    kernels = {id(k): k for m in modules for k in vars(m).values() if hasattr(k, "signatures")}
    return {k.__name__: len(k.signatures) for k in kernels.values()}

dispatch.warm_up()
before = compiled()
arrays, endpoints, waiting = fleet.allocate_fleet(8), fleet.allocate_endpoints(2, 8), ordering.allocate_waiting(2, 4)
rows = np.zeros((8, candidates.COLUMNS))
for slot in range(8):
    fleet.assign_endpoint(arrays, endpoints, slot, slot % 2)
arrays.accepting[:], arrays.max_num_seqs[:], arrays.kv_capacity_tokens[:] = 1, 4, 10_000
fleet.index_members(arrays, endpoints)
grown = fleet.grow_fleet(arrays, 16)
fleet.grow_endpoints(grown, endpoints, 3)
for name, router in routing.POLICIES.items():
    router(arrays, endpoints, 1, 100, 10)
    slot = ordering.enqueue(waiting, 1, 12.5, 12.5, float("inf"), -3, 100, 10, 7, -1, -1, -1)
    ordering.rekey(waiting, slot, 3.5)
    slot, instance = dispatch.dispatch(arrays, endpoints, waiting, 1, routing.POLICY_CODES[name], rows)
    assert instance >= 0
    ordering.push(waiting, 0, slot, 1.5)
    assert ordering.pop(waiting, 0) == slot
    ordering.remove(waiting, slot)
    ordering.free_slot(waiting, slot)
    routing.advance(arrays, instance, 110, 0, 101)
    routing.release(arrays, instance, 110, 101)
requests_ahead.note_round_trip(arrays, instance, 0.01, 0.125)
requests_ahead.note_end(arrays, instance, 12.5)
requests_ahead.requests_ahead(arrays, instance)
many = np.zeros(3, np.int64)
routing.advance_many(arrays, many, many, many, many)
routing.has_room(arrays, 0, 1, 1)
assert compiled() == before, (before, compiled())
print("nothing was compiled")
"""


def test_after_warming_up_plain_calls_compile_nothing():
    done = subprocess.run(
        [sys.executable, "-c", AFTER_WARM_UP], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was compiled" in done.stdout
