"""Shares of tenants: one heap of virtual starts leaves as counters and queues of tenants do, and no tenant is cheated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.fair_shares import OUTPUT_WEIGHT
from scheduling.queueing.ordering import VTC, WFQ
from scheduling.queueing.waiting_set import (
    allocate_waiting,
    charge,
    claim,
    enqueue,
    free_slot,
    grow_waiting,
    leave,
    peek,
    settle,
)
from tests.oracles.fair_shares import PlainShares

WEIGHTS = (1.0, 2.0, 0.5)
"""Powers of two: sums are exact."""
steps = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.just("dispatch"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 99), st.just(0), st.just(0)),
)


class Shares:
    def __init__(self, ordering, slots=64, weights=WEIGHTS):
        self.ordering, self.weights = ordering, weights
        self.waiting = grow_waiting(allocate_waiting(1, slots), slots, tenants=len(weights))
        self.waiting.shares.ordering[0] = ordering
        self.waiting.shares.weight[:] = weights
        self.number_of = {}

    def cost(self, prompt, output):
        return prompt + OUTPUT_WEIGHT * output if self.ordering == VTC else float(prompt * output)

    def arrive(self, tenant, number, prompt, output):
        key = claim(self.waiting, 0, tenant)
        slot = enqueue(self.waiting, 0, key, float(number), np.inf, 0, prompt, output, tenant, -1, -1, -1)
        charge(self.waiting, slot, float(prompt * output))
        self.number_of[slot] = number

    def dispatch(self):
        slot = peek(self.waiting, 0)
        if slot < 0:
            return -1, -1, -1
        leave(self.waiting, slot)
        number = self.number_of.pop(slot)
        free_slot(self.waiting, slot)
        return number, int(self.waiting.tenant[slot]), int(self.waiting.output_tokens[slot])

    def give_up(self, at):
        slot = sorted(self.number_of)[at % len(self.number_of)]
        free_slot(self.waiting, slot)
        return self.number_of.pop(slot)


@given(st.sampled_from([VTC, WFQ]), st.lists(steps, max_size=50))
def test_requests_leave_as_from_a_queue_of_each_tenant(ordering, drawn):
    shares, plain = Shares(ordering), PlainShares(WEIGHTS, ordering == VTC)
    for number, (what, at, prompt, output) in enumerate(drawn):
        if what == "arrive":
            shares.arrive(at, number, prompt, output)
            plain.arrive(at, number, shares.cost(prompt, output))
        elif what == "dispatch":
            left, tenant, expected = shares.dispatch()
            assert left == plain.dispatch()
            if left >= 0 and ordering == VTC:  # it ends with *at* output tokens
                more = OUTPUT_WEIGHT * (at - expected)
                settle(shares.waiting, 0, tenant, more / WEIGHTS[tenant], -np.inf)
                plain.settle(tenant, more)
        elif shares.number_of:
            plain.leave(shares.give_up(at))
    while True:
        left, *_ = shares.dispatch()
        assert left == plain.dispatch()
        if left < 0:
            break


@given(
    st.sampled_from([VTC, WFQ]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=30, max_size=60),
    st.randoms(use_true_random=False),
)
def test_tenants_that_always_wait_are_served_by_their_weights_within_one_request(ordering, sizes, random):
    """The fairness bound: at any moment the served cost over the weight differs by one request's at the most."""
    shares, served, costs, number = Shares(ordering, slots=256), [0.0] * 3, {}, 0
    most = max(shares.cost(*size) / min(WEIGHTS) for size in sizes)

    def arrive(tenant):
        nonlocal number
        size = random.choice(sizes)
        costs[number] = shares.cost(*size) / WEIGHTS[tenant]
        shares.arrive(tenant, number, *size)
        number += 1

    for tenant in range(3):
        arrive(tenant)
        arrive(tenant)
    for _ in range(60):
        left, tenant, _ = shares.dispatch()
        served[tenant] += costs[left]
        arrive(tenant)
        assert max(served) - min(served) <= most


@pytest.mark.parametrize("ordering", [VTC, WFQ])
def test_shares_grow_with_the_waiting_set(ordering):
    shares = Shares(ordering)
    shares.arrive(1, 0, 5, 5)
    grown = grow_waiting(shares.waiting, 128, endpoints=3, tenants=7)
    assert grown.shares.counter.shape == (3, 7)
    assert grown.shares.counter[0, 1] == shares.waiting.shares.counter[0, 1] > 0
    assert grown.shares.weight.tolist() == [*WEIGHTS, 1.0, 1.0, 1.0, 1.0]
