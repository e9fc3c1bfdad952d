"""Adapters of an instance against an ordered list, and the instances that are passed over for a request."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.adapter_memory import FROM_MEMORY_S, FROM_STORAGE_S
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.routing.adapters import (
    IN_MEMORY,
    NOT_LOADED,
    ON_GPU,
    drop_adapter,
    end_use,
    exclude_without_adapter,
    forget_adapters,
    takes_adapter,
    tier_of,
    use_adapter,
)
from scheduling.routing.filters import allow_all
from scheduling.routing.routers import least_request
from tests.kernels import from_python
from workers.emulator.adapters import AdapterCache

exclude_without_adapter, allow_all = map(from_python, (exclude_without_adapter, allow_all))


def fleet_of(instances=1, on_gpu=2, in_memory=4):
    fleet, endpoints = allocate_fleet(instances), allocate_endpoints(1, instances)
    fleet.endpoint[:], fleet.accepting[:] = 0, 1
    fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = 100, 1_000_000
    fleet.adapter_slots[:] = on_gpu, in_memory
    fleet.adapter_load_s[:] = FROM_STORAGE_S, FROM_MEMORY_S
    fleet.profile[:] = 0.01, 0.01, 1e-5, 0.0, 0.01, 1e-4, 0.0
    index_members(fleet, endpoints)
    return fleet, endpoints


class PlainAdapters:
    """One instance: adapters in order of use, the latest last, with the requests that use each."""

    def __init__(self, on_gpu, in_memory):
        self.on_gpu, self.in_memory, self.requests = on_gpu, in_memory, OrderedDict()

    def tier(self, adapter):
        if adapter not in self.requests:
            return NOT_LOADED
        idle = [each for each in reversed(self.requests) if not self.requests[each]]
        free = self.on_gpu - sum(1 for count in self.requests.values() if count)
        return ON_GPU if self.requests[adapter] or idle.index(adapter) < free else IN_MEMORY

    def takes(self, adapter):
        used = [each for each, count in self.requests.items() if count]
        return adapter in used or len(used) < self.on_gpu

    def use(self, adapter, requests):
        leaves = -1
        if adapter not in self.requests and len(self.requests) >= self.in_memory:
            leaves = next(each for each, count in self.requests.items() if not count)
            del self.requests[leaves]
        self.requests[adapter] = self.requests.get(adapter, 0) + requests
        self.requests.move_to_end(adapter)
        return leaves

    def end(self, adapter):
        self.requests[adapter] -= 1
        self.requests.move_to_end(adapter)


@given(
    on_gpu=st.integers(1, 3),
    more=st.integers(0, 3),
    calls=st.lists(st.tuples(st.sampled_from(["use", "warm", "end", "drop"]), st.integers(0, 7)), max_size=60),
)
def test_residency_is_the_plain_order_of_use(on_gpu, more, calls):
    fleet, _ = fleet_of(1, on_gpu, on_gpu + more)
    plain = PlainAdapters(on_gpu, on_gpu + more)
    for call, adapter in calls:
        in_use = plain.requests.get(adapter, 0)
        if call == "use" and plain.takes(adapter):
            assert use_adapter(fleet, 0, adapter, 1) == plain.use(adapter, 1)
        elif call == "warm" and plain.takes(adapter):
            assert use_adapter(fleet, 0, adapter, 0) == plain.use(adapter, 0)
        elif call == "end" and in_use:
            end_use(fleet, 0, adapter)
            plain.end(adapter)
        elif call == "drop" and not in_use:
            drop_adapter(fleet, 0, adapter)
            plain.requests.pop(adapter, None)
        for each in range(8):
            assert tier_of(fleet, 0, each) == plain.tier(each)
            assert takes_adapter(fleet, 0, each) == plain.takes(each)
        assert sum(1 for count in plain.requests.values() if count) <= on_gpu
    forget_adapters(fleet, 0)
    assert not fleet.adapters.any()
    assert not fleet.adapter_requests.any()


@given(names=st.lists(st.integers(0, 7), max_size=60))
def test_the_dispatcher_knows_where_the_adapters_of_an_idle_server_are(names):
    fleet, _ = fleet_of(1, 2, 4)
    server = AdapterCache(2, 4, FROM_STORAGE_S, FROM_MEMORY_S)
    for name in names:
        tier = tier_of(fleet, 0, name)
        leaves = use_adapter(fleet, 0, name, 1)
        end_use(fleet, 0, name)
        if leaves >= 0:
            server.unload(str(leaves))
        server.paths[str(name)] = "somewhere"
        assert server.use(str(name)) == {ON_GPU: 0.0, IN_MEMORY: FROM_MEMORY_S, NOT_LOADED: FROM_STORAGE_S}[tier]


@pytest.mark.parametrize(
    ("running", "held", "output", "passed"),
    [
        ([0, 0, 0], ["gpu", "memory", ""], 100, [0, 1, 1]),  # none is busy: where it is on the GPU
        ([2, 0, 0], ["gpu", "memory", ""], 100, [0, 1, 1]),  # 2 x 100 x 1e-4 s x 2 = 0.04 s are less than 0.06 s
        ([4, 0, 0], ["gpu", "memory", ""], 100, [0, 0, 1]),  # 0.08 s: loading from memory is sooner
        ([4, 3, 0], ["gpu", "memory", ""], 100, [0, 1, 1]),  # not there: 0.06 s + 0.06 s
        ([9, 9, 0], ["gpu", "memory", ""], 100, [0, 1, 0]),  # 0.18 s and 0.24 s against 0.12 s
        ([9, 9, 0], ["", "", ""], 100, [0, 0, 0]),  # nobody has it: the router decides by load alone
        ([0, 0, 0], ["", "memory", "memory"], 100, [1, 0, 0]),
        ([0, 0, 0], ["full", "", ""], 100, [1, 0, 0]),  # its GPU slots are in use by others
        ([0, 0, 0], ["none", "none", "none"], 100, [1, 1, 1]),  # none serves adapters
    ],
)
def test_an_instance_is_passed_over_if_one_with_the_adapter_nearer_is_sooner(running, held, output, passed):
    fleet, endpoints = fleet_of(3)
    for instance, where in enumerate(held):
        if where in {"gpu", "memory"}:
            use_adapter(fleet, instance, 7, 0)
        for other in range(2 if where in {"memory", "full"} else 0):
            use_adapter(fleet, instance, other, 1 if where == "full" else 0)
        if where == "none":
            fleet.adapter_slots[instance] = 0
    fleet.running[:] = running
    exclude_without_adapter(fleet, endpoints, 0, 7, 50, output)
    assert fleet.passed_over.tolist() == passed
    allowed = [at for at, over in enumerate(passed) if not over]
    chosen = least_request(fleet, endpoints, 0, 50, output)
    assert chosen == min(allowed, key=lambda at: (running[at], at), default=-1)
    allow_all(fleet, endpoints, 0)
    assert not fleet.passed_over.any()


def test_an_instance_without_room_does_not_draw_requests():
    """The one that has the adapter is full: the others are not passed over for it."""
    fleet, endpoints = fleet_of(2)
    use_adapter(fleet, 0, 7, 0)
    fleet.running[0] = fleet.max_num_seqs[0]
    exclude_without_adapter(fleet, endpoints, 0, 7, 50, 100)
    assert least_request(fleet, endpoints, 0, 50, 100) == 1


def test_load_is_not_weighed_without_a_profile():
    fleet, endpoints = fleet_of(2)
    fleet.profile[:] = 0.0
    use_adapter(fleet, 0, 7, 0)
    fleet.running[:] = 90, 0
    exclude_without_adapter(fleet, endpoints, 0, 7, 50, 100)
    assert fleet.passed_over.tolist() == [0, 1]
    assert np.count_nonzero(fleet.adapters) == 1
