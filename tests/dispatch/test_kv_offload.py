"""KV in CPU memory, live: what a restore takes is learned, and prompts go where one is worth it."""

import json
from dataclasses import replace

import pytest
from msgspec import structs

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Finished, Placed
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.upstream.bodies import body_for
from scheduling.fleet.kv_cost import RESTORE_S_PER_TOKEN
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from tests.dispatch.test_kv_caches import instance
from tests.dispatch.test_ordering import asked
from workers.vllm.metrics import VllmMetrics

PROFILE = Profile(0.01, 0.0, 1e-4, 0.0, 0.01, 0.0, 0.0)
FAST, SLOW = 1e-5, 1e-3
"""Seconds of a token over the link: a tenth of its prefill, and ten times that."""
BLOCK = 64


def fleet(link_s, offloaded=100_000, memory=4_000):
    """Return a dispatcher of two instances of which the second offloads KV over a link, and what it delivers."""
    specs = [replace(instance(number), profile=PROFILE, kv_capacity_tokens=memory) for number in range(2)]
    specs[1] = replace(specs[1], offload=(offloaded, 0.002, link_s) if offloaded else (0, 0.0, 0.0))
    endpoint = EndpointSpec("m", "here", EndpointPolicy(routing="least_delay", queue_bound=10), profile=PROFILE)
    delivered = []
    dispatcher = Dispatcher(Topology(), lambda: 0.0, deliver=delivered.append)
    dispatcher.apply_inventory(
        Inventory(models={"m": ModelSpec("m", 4096, 0)}, endpoints=(endpoint,), instances=tuple(specs))
    )
    for replica in dispatcher.topology.replicas.values():
        dispatcher.topology.fleet.accepting[replica.slot] = 1
    return dispatcher, delivered


def serve(dispatcher, delivered, number, kind):
    """Have a prompt of *kind* served to its end; return how it was placed."""
    hashes = tuple(1000 * kind + at for at in range(1, 17))
    call = structs.replace(
        asked(1),
        number=number,
        prompt_tokens=16 * BLOCK + 1,
        predicted_tokens=1,
        prefix_hashes=hashes,
        block_tokens=BLOCK,
    )
    dispatcher.take(call)
    placed = next(record for record in reversed(delivered) if isinstance(record, Placed))
    dispatcher.take(Finished(number, 1))
    return placed


@pytest.mark.parametrize(("link_s", "returns"), [(FAST, True), (SLOW, False)])
def test_a_prompt_returns_to_the_cpu_memory_that_has_it_where_that_is_faster(link_s, returns):
    dispatcher, delivered = fleet(link_s)
    slots = {replica.spec.name: replica.slot for replica in dispatcher.topology.replicas.values()}
    accepting = dispatcher.topology.fleet.accepting
    accepting[slots["i0"]] = 0
    for number in range(1, 6):  # five prompts of a quarter of the GPU's memory: the first has left it
        assert serve(dispatcher, delivered, number, number).instance == "i1"
    accepting[slots["i0"]] = 1
    assert serve(dispatcher, delivered, 6, 1).instance == ("i1" if returns else "i0")  # the first of equals


@pytest.mark.parametrize(
    ("link_s", "offloaded", "recompute"), [(FAST, 100_000, False), (SLOW, 100_000, True), (0.0, 0, False)]
)
def test_an_instance_is_told_to_compute_what_is_slower_to_restore(link_s, offloaded, recompute):
    dispatcher, delivered = fleet(link_s, offloaded)
    dispatcher.topology.fleet.accepting[0] = 0
    placed = serve(dispatcher, delivered, 1, 1)
    assert (placed.instance, placed.recompute) == ("i1", recompute)
    raw = b'{"model": "m", "prompt": "hi", "max_tokens": 1}'
    call = Call.read(raw, Kind.COMPLETION, max_depth=9)
    sent = json.loads(b"".join(map(bytes, body_for(call, placed, None))))
    assert sent.get("kv_transfer_params") == ({"kv_load_tiers": []} if recompute else None)


def test_the_time_of_a_restore_is_as_measured():
    dispatcher, _ = fleet(FAST)
    first, second = dispatcher.topology.replicas.values()
    row = dispatcher.topology.fleet.offload
    for replica in (first, second):
        replica.metrics = VllmMetrics(restored_tokens_total=2000.0, restore_s_total=0.5)
        dispatcher.topology.time_restores(replica)
    assert row[second.slot, RESTORE_S_PER_TOKEN] == 0.5 / 2000
    assert not row[first.slot].any()
    second.metrics = VllmMetrics(restored_tokens_total=10.0, restore_s_total=0.5)  # too few to say anything
    dispatcher.topology.time_restores(second)
    assert row[second.slot, RESTORE_S_PER_TOKEN] == FAST
