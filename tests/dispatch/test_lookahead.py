"""The look-ahead maps of the live gateway: filled by dispatch, moved by streamed tokens, emptied by the end."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.dispatch.live_fleet.lookahead import FIRST_REQUESTS, Anticipation
from scheduling.fleet.arrays import allocate_fleet
from tests.gateway.conftest import until
from tests.oracles.lookahead import projected_tokens


def ticket(prompt_tokens: int = 100, predicted_tokens: int = 50, sequences: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        asked=SimpleNamespace(prompt_tokens=prompt_tokens, sequences=sequences),
        expected_prompt=prompt_tokens,
        expected_tokens=prompt_tokens + predicted_tokens,
        output_tokens=0,
        ahead=-1,
        ahead_tokens=0,
    )


def coming(anticipation: Anticipation, instance: int, iterations: int = 60) -> list[int]:
    return projected_tokens(anticipation.maps, instance, iterations).tolist()


def test_tokens_move_the_map_and_the_end_clears_it() -> None:
    anticipation = Anticipation(2)
    one = ticket()
    anticipation.add(one, 1)
    assert coming(anticipation, 1)[:2] == [100, 101]
    assert coming(anticipation, 1)[50] == 0  # it is expected to have ended
    one.output_tokens = 11
    anticipation.count_tokens([one])
    assert coming(anticipation, 1)[0] == 110
    anticipation.count_tokens([one])  # nothing new: nothing moves
    assert coming(anticipation, 1)[0] == 110
    assert coming(anticipation, 0) == [0] * 60
    anticipation.remove(one)
    anticipation.remove(one)
    assert coming(anticipation, 1) == [0] * 60


def test_sequences_of_one_request_go_side_by_side() -> None:
    anticipation = Anticipation(1)
    one = ticket(sequences=4)
    anticipation.add(one, 0)
    one.output_tokens = 44
    anticipation.count_tokens([one])
    assert coming(anticipation, 0)[0] == 110


def test_the_maps_grow_with_requests_and_instances() -> None:
    anticipation = Anticipation(1)
    tickets = [ticket() for _ in range(FIRST_REQUESTS + 3)]
    for number, each in enumerate(tickets):
        anticipation.add(each, number % 5)
    assert len({each.ahead for each in tickets}) == len(tickets)
    share = -(-len(tickets) // 5)
    assert coming(anticipation, 0)[0] == 100 * share
    for each in tickets:
        anticipation.remove(each)
    assert all(coming(anticipation, instance) == [0] * 60 for instance in range(5))


def test_an_instance_is_overloaded_by_what_it_has_or_what_waits_for_it() -> None:
    anticipation, fleet = Anticipation(4), allocate_fleet(4)
    fleet.accepting[:2], fleet.kv_capacity_tokens[:] = 1, 1000
    for _ in range(4):
        anticipation.add(ticket(prompt_tokens=240, predicted_tokens=100), 0)
    here = anticipation.look(fleet, [0, 1], 0)
    assert (here.overloaded_instances, here.peak_kv_sum, here.peak_kv_most) == (1, 1.356, 1.356)
    assert anticipation.look(fleet, [1], 0) == (0, 0.0, 0.0)
    assert anticipation.look(fleet, [0, 1], 2000).overloaded_instances == 2
    assert anticipation.look(fleet, [1], 300) == (0, 0.3, 0.3)
    fleet.queued_prompt_tokens[1] = 700  # given to it, and not prefilled
    assert anticipation.look(fleet, [1], 300) == (1, 1.0, 1.0)
    assert anticipation.look(fleet, [2, 3], 2000) == (0, 0.0, 0.0)  # they take no work: nobody's overload


async def test_a_live_stream_moves_the_map(served) -> None:
    script = served.backends[0].script
    script.tokens, script.token_s = 200, 0.005
    anticipation = served.gateway.dispatcher.anticipation
    asked = asyncio.create_task(served.chat(stream=True))
    await until(lambda: anticipation.maps.active.sum() == 1)
    (slot,) = np.flatnonzero(anticipation.maps.active)
    began = int(anticipation.maps.clock[slot])
    await until(lambda: anticipation.maps.clock[slot] >= began + 50)
    await (await asked).read()
    await until(lambda: anticipation.maps.active.sum() == 0)
    (replica,) = served.gateway.topology.replicas.values()
    assert (
        served.gateway.floor.observation.view(replica.endpoint, [replica], served.gateway.clock()).overloaded_instances
        == 0
    )


@pytest.mark.parametrize("gateway_options", [{"max_num_seqs": 2}])
async def test_what_waits_for_a_small_cache_is_seen_coming(served, gateway_options) -> None:
    script = served.backends[0].script
    script.hold = asyncio.Event()
    topology = served.gateway.topology
    (replica,) = topology.replicas.values()
    # In one piece, so that they count as soon as they are given out.
    asked = [asyncio.create_task(served.chat(max_tokens=50, prompt_logprobs=1)) for _ in range(6)]
    await until(lambda: served.gateway.dispatcher.waiting_count == 4)
    endpoint = replica.endpoint
    assert served.gateway.dispatcher.outlook(endpoint).overloaded_instances == 0
    topology.fleet.kv_capacity_tokens[replica.slot] = 50
    assert served.gateway.dispatcher.outlook(endpoint).overloaded_instances == 1
    script.hold.set()
    for each in asked:
        await (await each).read()
