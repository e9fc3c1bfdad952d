"""The look-ahead maps of the live gateway: filled by dispatch, moved by streamed tokens, emptied by the end."""

import asyncio
from types import SimpleNamespace

import numpy as np

from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.token_accounts import FIRST_REQUESTS, TokenAccounts
from scheduling.fleet.arrays import grow_fleet
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


def coming(accounts: TokenAccounts, instance: int, iterations: int = 60) -> list[int]:
    return projected_tokens(accounts.maps, instance, iterations).tolist()


def test_sequences_of_one_request_go_side_by_side() -> None:
    accounts = TokenAccounts(Topology(instances=1))
    one = ticket(sequences=4)
    accounts.enter(one, 0)
    one.output_tokens = 44
    accounts.move([one])
    assert coming(accounts, 0)[0] == 110


def test_the_maps_grow_with_requests_and_instances() -> None:
    topology = Topology(instances=1)
    accounts = TokenAccounts(topology)
    topology.fleet = grow_fleet(topology.fleet, 5)
    topology._grown()
    tickets = [ticket() for _ in range(FIRST_REQUESTS + 3)]
    for number, each in enumerate(tickets):
        accounts.enter(each, number % 5)
    assert len({each.ahead for each in tickets}) == len(tickets)
    share = -(-len(tickets) // 5)
    assert coming(accounts, 0)[0] == 100 * share
    for each in tickets:
        accounts.leave(each)
    assert all(coming(accounts, instance) == [0] * 60 for instance in range(5))


async def test_a_live_stream_moves_the_map(served) -> None:
    script = served.backends[0].script
    script.tokens, script.token_s = 200, 0.005
    accounts = served.gateway.dispatching.dispatcher.accounts
    asked = asyncio.create_task(served.chat(stream=True))
    await until(lambda: accounts.maps.active.sum() == 1)
    (slot,) = np.flatnonzero(accounts.maps.active)
    began = int(accounts.maps.clock[slot])
    await until(lambda: accounts.maps.clock[slot] >= began + 50)
    await (await asked).read()
    await until(lambda: accounts.maps.active.sum() == 0)
    (replica,) = served.gateway.dispatching.topology.replicas.values()
    assert served.gateway.dispatching.observation.views()[replica.endpoint.index].overloaded_instances == 0
