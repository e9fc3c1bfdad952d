"""How many requests an instance carries at once: the kernel against its twin, and the first token by its definition."""

import math
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, at_once, index_members
from scheduling.fleet.carried import first_token_s, most_at_once, set_front_end
from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.routing.routers import place
from tests.oracles.dispatch import PlainFleet, PlainInstance

H100 = Profile(0.0176, 0.012, 2.07e-5, 6.2e-10, 0.00638, 1.78e-5, 3.14e-8)
API = FrontEnd(requests_per_s=63.0, tokens_per_s=18_500.0)
front_ends = st.builds(
    FrontEnd, st.sampled_from([math.inf, 5.0, 63.0, 500.0]), st.sampled_from([math.inf, 900.0, 18_500.0])
)
lengths = st.tuples(st.integers(1, 4000), st.integers(1, 2000))


def one(front_end=API, margin=1.5, max_num_seqs=256):
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(1, 1)
    fleet.endpoint[:], fleet.accepting[:], fleet.kv_capacity_tokens[:] = 0, 1, 10**9
    fleet.max_num_seqs[:], fleet.profile[:] = max_num_seqs, astuple(H100)
    index_members(fleet, endpoints)
    set_front_end(fleet, 0, front_end, margin)
    return fleet, endpoints


@given(
    st.lists(lengths, min_size=1, max_size=12),
    front_ends,
    st.sampled_from([0.1, 1.0, 1.5]),
    st.sampled_from([1, 16, 256]),
)
def test_what_an_instance_carries_is_that_of_the_twin(given_out, front_end, margin, max_num_seqs):
    fleet, endpoints = one(front_end, margin, max_num_seqs)
    limits = front_end.requests_per_s, front_end.tokens_per_s, margin
    known = not all(map(math.isinf, limits[:2]))
    plain = PlainInstance(
        endpoint=0, accepting=True, max_num_seqs=max_num_seqs, profile=astuple(H100), front_end=limits if known else ()
    )
    assert at_once(fleet, 0) == plain.at_once() == max_num_seqs, "nothing is known of its requests yet"
    for prompt, output in given_out:
        place(fleet, endpoints, 0, prompt, output)
        PlainFleet([plain]).place(0, prompt, output)
        assert at_once(fleet, 0) == plain.at_once()
        assert 1 <= at_once(fleet, 0) <= max_num_seqs


@pytest.mark.parametrize(("prompt", "output", "margin", "carried"), [
    (281, 211, 1.0, 142),  # the burst of docs/plan/gpu.md: 256 running give no more tokens a second
    (281, 211, 1.5, 213),
    (281, 26, 1.5, 48),  # many short answers: the process reads
    (1200, 210, 1.0, 256),  # long prompts: the engine is the slower of the two
])  # fmt: skip
def test_the_process_of_a_small_model_carries_fewer_than_its_engine(prompt, output, margin, carried):
    fleet, endpoints = one(margin=margin)
    place(fleet, endpoints, 0, prompt, output)
    assert at_once(fleet, 0) == pytest.approx(carried, abs=3)
    set_front_end(fleet, 0, NO_LIMIT, margin)
    assert at_once(fleet, 0) == 256


def test_lengths_are_those_of_the_last_hundred_or_so():
    fleet, endpoints = one()
    assert not fleet.given_tokens[0].any()
    place(fleet, endpoints, 0, 100, 10)
    assert fleet.given_tokens[0].tolist() == [100, 10]
    for _ in range(1000):
        place(fleet, endpoints, 0, 300, 50)
    assert fleet.given_tokens[0].tolist() == [pytest.approx(300, abs=1), pytest.approx(50, abs=1)]


def test_a_first_token_takes_longer_the_busier_the_engine_and_the_process():
    times_s = [first_token_s(H100, API, running, 281, 211) for running in (0, 11, 69, 120)]
    assert times_s == sorted(times_s)
    assert times_s[0] == pytest.approx(1.5 * 0.00638 + (0.0179 - 0.00638) + 1 / 63, rel=0.01)
    assert first_token_s(H100, API, 256, 281, 211) == math.inf
    assert first_token_s(H100, NO_LIMIT, 256, 281, 211) < 0.1


@given(front_ends, st.floats(0, 40), lengths, st.sampled_from([1.0, 1.2, 1.5, 3.0]), st.integers(40, 256))
def test_the_most_at_once_is_the_last_within_the_slowdown(front_end, interactive, each, slowdown, most):
    chosen = most_at_once(H100, front_end, interactive, *each, slowdown, most)
    least = math.ceil(interactive)
    limit_s = slowdown * first_token_s(H100, front_end, interactive, *each)
    within = [n for n in range(least, most + 1) if first_token_s(H100, front_end, n, *each) <= limit_s < math.inf]
    assert chosen == max(within, default=least)
