"""The look-ahead map against the map as PreServe writes it: an element an iteration, moved by every request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.lookahead.maps import FREE, NONE, add, advance, allocate, finish, grow, peak_tokens, token
from tests.kernels import from_python
from tests.oracles.lookahead import PlainMap, projected_tokens

peak_tokens = from_python(peak_tokens)

operations = st.lists(
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(1, 40), st.integers(1, 60))
    | st.tuples(st.just("advance"), st.integers(0, 1), st.integers(1, 25))
    | st.tuples(st.just("finish"), st.integers(0, 30))
    | st.tuples(st.just("grow")),
    max_size=40,
)


@given(operations, st.sampled_from([2, 3, 8, 17, 64, 256]))
def test_equals_the_map_of_the_paper(steps, horizon):
    ahead, plain = allocate(2, 2, horizon), [PlainMap(), PlainMap()]
    for step in steps:
        match step:
            case "add", instance, prompt, predicted:
                slot = add(ahead, instance, prompt, predicted, 0)
                if slot == NONE:
                    ahead = grow(ahead, 2, 2 * ahead.instance.size)
                    slot = add(ahead, instance, prompt, predicted, 0)
                plain[instance].enter(slot, prompt, predicted)
            case "advance", instance, count:
                advance(ahead, instance, count)
                for _ in range(count):
                    plain[instance].advance()
            case "finish", number:
                slots = [(at, slot) for at, each in enumerate(plain) for slot in each.requests]
                if slots:
                    instance, slot = slots[number % len(slots)]
                    finish(ahead, slot)
                    plain[instance].leave(slot)
            case ("grow",):
                ahead = grow(ahead, 2, ahead.instance.size + 1)
        for instance, expected in enumerate(plain):
            projected = projected_tokens(ahead, instance, horizon // 2 + 1)
            plain_tokens = [expected.tokens(i) for i in range(projected.size)]
            assert projected.tolist() == plain_tokens
            assert ahead.active[instance] == len(expected.requests)
            assert peak_tokens(ahead, instance, projected.size, 0, 0) == max(plain_tokens)
    assert ahead.counters[FREE] == ahead.instance.size - sum(len(each.requests) for each in plain)


@given(st.integers(1, 50), st.integers(1, 80), st.integers(0, 60))
def test_all_is_taken_back_by_an_end_whenever_it_comes(prompt, predicted, produced):
    ahead = allocate(1, 1, 64)
    slot = add(ahead, 0, prompt, predicted, 0)
    advance(ahead, 0, produced)
    finish(ahead, slot)
    assert not ahead.ending.any()
    assert not ahead.ending_base.any()
    assert (ahead.first_due == NONE).all()
    assert ahead.base_sum[0] == ahead.active[0] == 0


def test_live_the_clock_follows_the_request_that_is_furthest_ahead():
    ahead = allocate(1, 2, 64)
    first = add(ahead, 0, 10, 50, 0)
    token(ahead, first, 1)
    second = add(ahead, 0, 20, 50, 0)
    token(ahead, first, 1)
    token(ahead, second, 1)
    token(ahead, second, 0)
    assert ahead.clock[0] == 2
    assert projected_tokens(ahead, 0, 30)[0] == 12 + 21
    token(ahead, second, 3)  # several tokens in one chunk
    assert ahead.clock[0] == 5
    finish(ahead, first)
    token(ahead, first, 1)  # too late: nothing happens
    finish(ahead, first)
    assert ahead.clock[0] == 5
    assert projected_tokens(ahead, 0, 30)[0] == 24
    assert ahead.counters[FREE] == 1


def test_one_more_request_is_only_thought_of():
    ahead = allocate(1, 1, 64)
    add(ahead, 0, 10, 5, 0)
    assert peak_tokens(ahead, 0, 20, 0, 0) == 14
    assert peak_tokens(ahead, 0, 20, 100, 8) == 14 + 104
    assert peak_tokens(ahead, 0, 20, 100, 30) == 119
    assert peak_tokens(ahead, 0, 20, 0, 0) == 14


def test_an_overfull_map_says_so_and_a_wrong_size_is_refused():
    ahead = allocate(1, 1)
    assert add(ahead, 0, 1, 1, 0) == 0
    assert add(ahead, 0, 1, 1, 0) == NONE
    with pytest.raises(ValueError, match="cannot grow to 1 and 0"):
        grow(ahead, 1, 0)
    with pytest.raises(ValueError, match="at least 2"):
        allocate(1, 1, 1)
