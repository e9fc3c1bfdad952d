"""What instances have cached by their KV events: the blocks, and the decisions that go by them."""

import random

import numpy as np
import pytest
from msgspec import structs

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.kv_caches import KvCache
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Finished, Left, Placed, ServedModels
from scheduling.fleet.profile import USUAL
from scheduling.policy import EndpointPolicy
from scheduling.routing import cached_blocks
from scheduling.routing.cached_blocks import space
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest, ReferenceEngine
from tests.dispatch.test_ordering import asked
from workers.vllm.kv_events import Cleared, Lost, Removed, Stored

SIZE = 4


def instance(number: int) -> InstanceSpec:
    return InstanceSpec(
        number, f"i{number}", f"http://i{number}", "ready", 1.0, "m", "here", "gpu", 8, 40_960, profile=USUAL
    )


def fleet(*, kv_events: bool = True, count: int = 2):
    """Return a dispatcher of two idle instances, the caches that they publish, and what it delivers."""
    policy = EndpointPolicy(routing="least_delay", follow_kv_events=kv_events, queue_bound=10)
    inventory = Inventory(
        models={"m": ModelSpec("m", 2048, 0)},
        endpoints=(EndpointSpec("m", "here", policy),),
        instances=tuple(instance(number) for number in range(count)),
    )
    delivered: list[object] = []
    dispatcher = Dispatcher(Topology(), lambda: 0.0, deliver=delivered.append)
    dispatcher.apply_inventory(inventory)
    caches = []
    for replica in dispatcher.topology.replicas.values():
        dispatcher.topology.fleet.accepting[replica.slot] = 1
        cache = KvCache(dispatcher.queue, replica)
        cache.block_tokens = SIZE
        cache.known()
        caches.append(cache)
    return dispatcher, caches, delivered, inventory


def hashes(ids: list[int], adapter: str = "", salt: str = "") -> np.ndarray:
    out = np.zeros(len(ids) // SIZE, np.int64)
    cached_blocks.chain(out, np.array(ids, np.int64), SIZE, space(adapter, salt))
    return out


def stored(ids: list[int], name: int, parent: int | None = None, **changes) -> Stored:
    """Return the event of the blocks of *ids*, named from *name* on."""
    event = Stored([name + at for at in range(len(ids) // SIZE)], parent, ids, SIZE, "GPU", None, None, 0)
    return structs.replace(event, **changes)


def prompt(number: int, ids: list[int]):
    return structs.replace(
        asked(len(ids)),
        number=number,
        token_blocks=hashes(ids).tobytes(),
        token_block_size=SIZE,
        prompt_tokens=len(ids),
    )


def placed(delivered) -> Placed:
    return next(record for record in reversed(delivered) if isinstance(record, Placed))


def cached(delivered) -> tuple[int | None, int, str]:
    why = placed(delivered).why
    return why.cached_tokens, why.prompt_tokens, why.cached_by


IDS = list(range(100, 164))


LONG = [token % 100 for token in range(1600)]


def test_a_prompt_goes_where_its_blocks_are_and_the_trace_says_so():
    dispatcher, caches, delivered, inventory = fleet()
    caches[1].take([stored(LONG[:1200], 1)])
    dispatcher.take(prompt(1, LONG))
    assert placed(delivered).instance == "i1"
    assert cached(delivered) == (1200, 1600, "kv_events")
    # what runs there is there for the next one, before the server says so
    dispatcher.take(prompt(2, LONG))
    assert cached(delivered)[0] == (1599 if placed(delivered).instance == "i1" else 0)
    caches[1].take([Removed(list(range(5, 301)), "GPU", 0)])
    for number in (1, 2):
        dispatcher.take(Finished(number, 1))
    dispatcher.take(prompt(3, LONG))
    assert cached(delivered) == (16, 1600, "kv_events")
    dispatcher.take(Left(3))
    dispatcher.apply_inventory(inventory)
    tokenizer = next(record for record in reversed(delivered) if isinstance(record, ServedModels)).models[0].tokenizer
    assert (tokenizer.block_size, tokenizer.url) == (SIZE, "http://i0")
    for cache in caches:
        cache.clear()
    assert dispatcher.queue.affinity.blocks.counters[cached_blocks.USED] == 0  # nothing is left behind


@pytest.mark.parametrize("lost", [False, True])
def test_without_events_or_tokens_the_cache_is_estimated(lost):
    dispatcher, caches, delivered, _ = fleet()
    if lost:
        for cache in caches:
            cache.take([stored(IDS, 1), Lost("events 3 to 4 are gone")])
        assert [cache.why for cache in caches] == ["events 3 to 4 are gone"] * 2
        request = prompt(1, IDS[:64])
    else:
        request = structs.replace(asked(8, prompt=64), number=1)
    request = structs.replace(request, prefix_hashes=(7,), block_tokens=64)
    dispatcher.take(request)
    dispatcher.take(Finished(1, 1))
    dispatcher.take(structs.replace(request, number=2))
    assert cached(delivered) == (63, 64, "estimate")


def test_other_routers_and_deployments_without_events_are_as_before():
    dispatcher, caches, delivered, _ = fleet(kv_events=False)
    caches[1].take([stored(IDS, 1)])
    dispatcher.take(prompt(1, IDS))
    assert placed(delivered).instance == "i0"


def cache_alone() -> KvCache:
    dispatcher, caches, _, _ = fleet(count=1)
    cache = caches[0]
    cache.dispatcher = dispatcher  # keeps it
    return cache


def has(cache: KvCache, block_hashes: np.ndarray) -> int:
    blocks = cache.queue.affinity.blocks
    return cached_blocks.leading(blocks, cache.slot, block_hashes, 0, block_hashes.size)


def relied_on(cache: KvCache) -> bool:
    return bool(cache.queue.affinity.blocks.block_tokens[cache.slot])


def test_adapters_salts_and_images_divide_the_cache():
    cache = cache_alone()
    cache.take(
        [
            stored(IDS[:8], 1),
            stored(IDS[:8], 11, lora_name="poet", extra_keys=[["poet"], ["poet"]]),
            stored(IDS[:8], 21, extra_keys=[["mine"], None]),
            stored(IDS[:8], 31, lora_name="poet", extra_keys=[["poet", "mine"], ["poet"]]),
            stored(IDS[:8], 41, extra_keys=[[["image", 0]], None]),
        ]
    )
    for adapter, salt in (("", ""), ("poet", ""), ("", "mine"), ("poet", "mine")):
        assert has(cache, hashes(IDS, adapter, salt)) == 2
        cache.take([Removed([{"": 1, "poet": 11}[adapter] + (20 if salt else 0)], "GPU", 0)])
        assert has(cache, hashes(IDS, adapter, salt)) == 0
    assert has(cache, hashes(IDS, "other")) == 0


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (stored(IDS[:4], 9, parent=77), "it stored a block after one that was not published"),
        (stored(IDS[:6], 9), "its events are of a model that caches only some blocks of a prompt"),
    ],
)
def test_a_cache_that_is_not_known_whole_is_not_relied_on_until_it_is_cleared_or_the_server_restarts(event, why):
    for again in (Cleared(), Lost("the server restarted", restarted=True)):
        cache = cache_alone()
        cache.take([stored(IDS[:8], 1), event, stored(IDS[:8], 1)])
        assert (cache.why, relied_on(cache)) == (why, False)
        cache.take([again, stored(IDS[:8], 1)])
        assert (cache.why, cache.count, has(cache, hashes(IDS))) == ("", 2, 2)


def test_after_lost_events_a_cache_is_known_again_once_it_has_turned_over():
    cache = cache_alone()
    cache.queue.topology.fleet.kv_capacity_tokens[cache.slot] = 6 * SIZE
    other = [number + 1000 for number in IDS]
    cache.take([stored(IDS[:8], 1), stored(other[:8], 11), Lost("events 3 to 4 are gone")])
    cache.take([stored(IDS[8:16], 3, parent=2), Removed([99], "GPU", 0)])  # what is before it is there
    assert cache.unknown_because == "events 3 to 4 are gone; it is estimated until 4 more blocks are stored"
    cache.take([stored(IDS[:4], 9, parent=77)])  # it was stored in the gap
    assert "until 6 more" in cache.unknown_because
    cache.take([stored(IDS[16:36], 5, parent=4)])
    assert not relied_on(cache)
    cache.take([stored([5] * 4, 21)])
    assert (cache.unknown_because, relied_on(cache)) == ("", True)
    assert (has(cache, hashes(IDS[:36])), has(cache, hashes(other))) == (9, 0)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_relied_on_after_a_gap_is_there(seed):
    """Prompts of few kinds at an engine with little memory, whose events are lost for some time, again and again."""
    draw, cache, kinds = random.Random(seed), cache_alone(), [1000 * kind for kind in range(1, 7)]
    engine = ReferenceEngine(EngineConfig(3, 64, SIZE, 40, "fcfs", 100, USUAL, prefix_caching=True))
    cache.queue.topology.fleet.kv_capacity_tokens[cache.slot] = 40 * SIZE
    events, checked, equal, losses = [], 0, 0, 0
    chains = {kind: hashes([block for block in range(kind, kind + 12) for _ in range(SIZE)]) for kind in kinds}

    def store(block):
        if isinstance(block, int):
            events.append(stored([block] * SIZE, block, block - 1 if block % 1000 else None))

    engine.watch(store, lambda block: events.append(Removed([block], "GPU", 0)) if isinstance(block, int) else None)
    for number in range(1500):
        kind, count = draw.choice(kinds), draw.randrange(1, 13)
        request = EngineRequest(
            str(number), SIZE * count + 1, draw.randrange(1, 9), 0, 0.0, tuple(range(kind, kind + count))
        )
        engine.add(request)
        while engine.waiting + engine.running > draw.randrange(4):
            engine.step(0.0)
        if number % 300 < 5:  # a gap
            losses += bool(events)
            events = [Lost("events are gone")] if events else []
        cache.take(events)
        events.clear()
        if relied_on(cache):
            for kind, chain in chains.items():
                there = len(engine._pool.find(range(kind, kind + 12)))
                assert has(cache, chain) <= there
                checked, equal = checked + 1, equal + (has(cache, chain) == there)
    assert losses >= 10
    assert checked > 2000, "it was known again after each"
    assert equal > 0.95 * checked


def test_what_is_offloaded_or_of_another_group_is_left_out():
    cache = cache_alone()
    cache.take([stored(IDS[:8], 1, medium="CPU"), stored(IDS[:8], 1, group_idx=1), Removed([1], "CPU", 0)])
    assert (cache.count, cache.why) == (0, "")


@pytest.mark.parametrize("seed", range(5))
def test_the_table_has_what_a_counter_of_copies_has(seed):
    """Random holds and drops of few hashes and instances, in a table that grows."""
    draw, copies = random.Random(seed), {}
    blocks = cached_blocks.allocate_cached_blocks(3)
    names = np.array([draw.getrandbits(62) * draw.choice((1, -1)) for _ in range(40)], np.int64)
    for _ in range(2000):
        slot, first = draw.randrange(3), draw.randrange(40)
        last = draw.randrange(first, 41)
        blocks = cached_blocks.with_room(blocks, last - first)
        if draw.random() < 0.5:
            cached_blocks.hold(blocks, slot, names, first, last)
            for at in range(first, last):
                copies[slot, at] = copies.get((slot, at), 0) + 1
        else:
            cached_blocks.drop(blocks, slot, names, first, last)
            for at in range(first, last):
                copies[slot, at] = max(0, copies.get((slot, at), 0) - 1)
    present = {key for key, count in copies.items() if count}
    assert {
        (slot, at) for slot in range(3) for at in range(40) if cached_blocks.holds(blocks, slot, names[at])
    } == present
    assert blocks.counters[cached_blocks.USED] == len(present) == np.count_nonzero(blocks.key)
    grown = cached_blocks.with_room(blocks, 1000)
    assert all(
        cached_blocks.leading(grown, slot, names, at, 40) == cached_blocks.leading(blocks, slot, names, at, 40)
        for slot in range(3)
        for at in range(40)
    )
