"""Scenarios worked out by hand. A prefill of p tokens takes 1 + 0.01 p; decoding 0.5 + 0.1 a sequence + 0.001 a token."""

import math

import pytest

from scheduling.fleet.front_end import FrontEnd
from scheduling.simulation.engine.reference import ReferenceEngine
from tests.oracles.single_instance import serve
from tests.scheduling.simulation.engine.engines import config, request


def engine_with(*requests, **settings):
    engine = ReferenceEngine(config(**settings))
    for each in requests:
        engine.add(each)
    return engine


def steps(engine, count=None):
    """Return the results of the next *count* steps, or of all steps, back to back."""
    results, now_s = [], 0.0
    while count is None or len(results) < count:
        result = engine.step(now_s)
        if result is None:
            break
        results.append(result)
        now_s = result.ends_s
    return results


def test_one_request_alone():
    timeline = serve(config(), [request("a", 10, 3, arrival_s=5.0)])["a"]
    # Prefill 1 + 0.1; then contexts of 11 and 12 tokens.
    assert timeline.tokens_s == pytest.approx([6.1, 6.1 + 0.611, 6.1 + 0.611 + 0.612])
    assert timeline.admitted_s == 5.0
    assert timeline.ttft_s == pytest.approx(1.1)
    assert timeline.e2e_s == pytest.approx(2.323)


def test_an_iteration_takes_as_long_as_the_api_process_needs_for_its_tokens_and_a_request_that_waits_there():
    engine = engine_with(request("a", 10, 4), front_end=FrontEnd(requests_per_s=0.5, tokens_per_s=1.0))
    first = steps(engine, 1)  # read while nothing ran: the engine's own time
    engine.add(request("b", 10, 3))
    engine.add(request("c", 10, 1))
    assert engine.waiting == 0  # the engine sees neither
    rest = steps(engine)
    # b was read during the first iteration, c during the next one, which is longer for it.
    assert [result.admitted for result in rest] == [["b"], ["c"], []]
    assert [result.duration_s for result in first + rest] == pytest.approx([1.1, 2 / 1.0 + 1 / 0.5, 3.0, 2.0])


@pytest.mark.parametrize(("requests_per_s", "order"), [(0.5, "abcd"), (math.inf, "dcba")])
def test_priorities_order_only_what_the_api_process_has_read(requests_per_s, order):
    engine = engine_with(request("first", 10, 9), policy="priority", front_end=FrontEnd(requests_per_s))
    steps(engine, 1)
    for priority, name in zip((4, 3, 2, 1), "abcd", strict=True):
        engine.add(request(name, 10, 1, priority=priority))
    assert [name for result in steps(engine) for name in result.admitted] == list(order)


def test_a_request_can_leave_the_api_process_before_it_is_read():
    engine = engine_with(request("a", 10, 9), front_end=FrontEnd(requests_per_s=0.5))
    steps(engine, 1)
    for name in "bcd":
        engine.add(request(name, 10, 1))
    assert engine.abort("c")
    assert not engine.abort("c")
    assert [name for result in steps(engine) for name in result.admitted] == ["b", "d"]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_of_the_api_process_that_is_none_is_refused_by_name(limit):
    with pytest.raises(ValueError, match=r"front_end\.tokens_per_s must be above 0"):
        FrontEnd(tokens_per_s=limit)


def test_a_long_prompt_is_prefilled_in_chunks_and_its_first_token_comes_with_the_last():
    results = steps(engine_with(request("a", 20, 2), max_num_batched_tokens=8))
    assert [result.prefill_tokens for result in results] == [8, 8, 4, 0]
    assert [result.emitted for result in results] == [[], [], ["a"], ["a"]]
    assert results[-1].ends_s == pytest.approx(1.08 + 1.08 + 1.04 + 0.621)


def test_decoding_comes_first_and_prefill_takes_what_is_left_of_the_budget():
    engine = engine_with(request("a", 4, 9), request("b", 4, 9), max_num_batched_tokens=8)
    assert steps(engine, 1)[0].emitted == ["a", "b"]
    engine.add(request("c", 15, 2))
    third, fourth, fifth = steps(engine, 3)
    assert (third.decode_sequences, third.prefill_tokens, third.emitted) == (2, 6, ["a", "b"])
    assert (fourth.decode_sequences, fourth.prefill_tokens) == (2, 6)
    assert (fifth.decode_sequences, fifth.prefill_tokens, fifth.emitted) == (2, 3, ["a", "b", "c"])
    # One forward pass: the prefill's fixed second once, and the decode's own 0.1 a sequence + 0.001 a token.
    assert third.duration_s == pytest.approx(1 + 0.06 + 0.2 + 0.010)
    assert fifth.duration_s == pytest.approx(1 + 0.03 + 0.2 + 0.014)


def test_the_whole_prompt_must_fit_before_a_request_is_admitted():
    # 5 blocks of 4: a holds 3 for its 9 tokens; the 12 of b need 3 although a first chunk of 4 would need only 1.
    engine = engine_with(
        request("a", 9, 2), request("b", 12, 1), kv_blocks=5, max_num_batched_tokens=13, max_num_seqs=2
    )
    first, second, third = steps(engine)
    assert (first.admitted, first.emitted) == (["a"], ["a"])
    assert (second.admitted, second.finished) == ([], ["a"])
    assert (third.admitted, third.finished) == (["b"], ["b"])


def test_the_head_that_does_not_fit_holds_up_those_behind_it():
    engine = engine_with(request("a", 9, 2), request("big", 12, 1), request("small", 1, 1), kv_blocks=5)
    assert steps(engine, 1)[0].admitted == ["a"]
    assert engine.waiting == 2


def test_fcfs_preempts_the_last_admitted_and_recomputes_what_it_had_produced():
    # Two prompts of 7 hold two blocks of 4 each, all there is. Their 8th tokens still fit; for its 9th, a needs a third.
    engine = engine_with(request("a", 7, 4), request("b", 7, 4), kv_blocks=4)
    results = steps(engine)
    assert [result.emitted for result in results] == [["a", "b"], ["a", "b"], ["a"], ["a"], ["b"], ["b"]]
    assert [result.preempted for result in results] == [[], [], ["b"], [], [], []]
    assert results[3].finished == ["a"]
    # b comes back with 7 + 2 tokens to compute again before its third.
    assert (results[4].admitted, results[4].prefill_tokens, results[4].decode_sequences) == (["b"], 9, 0)
    assert results[4].duration_s == pytest.approx(1.09)
    assert results[5].finished == ["b"]
    assert engine.preemptions_total == 1
    assert engine.kv_usage == 0


def test_none_is_admitted_in_an_iteration_that_preempted():
    engine = engine_with(
        request("low", 7, 4, priority=5),
        request("high", 7, 4, priority=1),
        policy="priority",
        kv_blocks=4,
        max_num_seqs=2,
    )
    steps(engine, 2)
    engine.add(request("urgent", 4, 1, priority=0))
    third, fourth = steps(engine, 2)
    # high takes one of the two blocks of low; the other would be enough for urgent, and a place is free.
    assert (third.preempted, third.admitted) == (["low"], [])
    assert fourth.admitted == ["urgent"]


def test_fcfs_a_preempted_request_comes_back_before_those_that_waited():
    engine = engine_with(request("a", 7, 3), request("b", 7, 3), request("c", 7, 3), kv_blocks=4)
    order = [request_id for result in steps(engine) for request_id in result.admitted]
    assert order == ["a", "b", "b", "c"]


def test_priority_preempts_the_lowest_even_if_it_was_scheduled_before():
    engine = engine_with(request("low", 6, 4, priority=5), policy="priority", kv_blocks=4)
    steps(engine, 1)
    engine.add(request("high", 8, 4, priority=1))
    second, third = steps(engine, 2)
    assert (second.admitted, second.emitted) == (["high"], ["low", "high"])
    # low, first in the batch, has its 8th token scheduled; high needs a third block, and takes that back with the blocks.
    assert (third.preempted, third.emitted) == (["low"], ["high"])
    assert (third.decode_sequences, third.prefill_tokens) == (1, 0)


def test_a_victim_of_itself_ends_the_iteration_for_those_after_it():
    engine = engine_with(
        request("a", 5, 9, priority=1), request("low", 7, 9, priority=5), policy="priority", kv_blocks=6
    )
    steps(engine, 1)
    engine.add(request("b", 5, 9, priority=1))
    second, third, fourth = steps(engine, 3)
    assert second.emitted == ["a", "low", "b"]
    assert (third.preempted, third.emitted) == (["low"], ["a"])
    assert fourth.emitted == ["a", "b"]


def test_priority_never_makes_the_running_give_way_to_the_waiting():
    engine = engine_with(request("low", 4, 3, priority=10), policy="priority", max_num_seqs=1)
    steps(engine, 1)
    engine.add(request("high", 4, 1, priority=-7))
    results = steps(engine)
    assert [result.finished for result in results] == [[], ["low"], ["high"]]
    assert engine.preemptions_total == 0


def test_an_iteration_that_would_be_empty_is_passed_over():
    engine = engine_with(request("low", 6, 9, priority=5), policy="priority", kv_blocks=4)
    steps(engine, 1)
    engine.add(request("high", 7, 5, priority=1))
    steps(engine, 2)
    # low stands first and needs a third block: it preempts itself, and vLLM schedules nothing in such an iteration.
    fourth = steps(engine, 1)[0]
    assert (fourth.preempted, fourth.emitted, fourth.prefill_tokens) == (["low"], ["high"], 0)
    assert fourth.duration_s == pytest.approx(0.5 + 0.1 + 0.009)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_says_whether_there_was_something_to_abort(policy):
    engine = engine_with(request("a", 4, 1), request("b", 4, 1), policy=policy, max_num_seqs=1)
    assert not engine.abort("unknown")
    assert engine.abort("a")
    assert not engine.abort("a")
    assert [result.finished for result in steps(engine)] == [["b"]]
    assert not engine.abort("b")


def test_an_id_can_be_used_again_once_its_request_is_gone():
    engine = engine_with(request("a", 4, 1))
    with pytest.raises(ValueError, match="'a' is in the engine already"):
        engine.add(request("a", 4, 1))
    steps(engine)
    engine.add(request("a", 4, 1))
    engine.abort("a")
    engine.add(request("a", 4, 1))
    assert engine.waiting == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request("x", 0, 1), "prompt_tokens must be at least 1"),
        (request("x", 1, 0), "output_tokens must be at least 1"),
        (request("x", 60, 41), "101 tokens .* more than max_model_len, 100"),
        (request("x", 30, 4), "needs 9 KV blocks of 4 tokens; there are 8"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(wrong, message):
    engine = engine_with(max_model_len=100, kv_blocks=8)
    with pytest.raises(ValueError, match=message):
        engine.add(wrong)
    assert engine.step(0.0) is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"kv_blocks": -1}, "kv_blocks must be at least 1"),
        ({"max_num_batched_tokens": 7}, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, not 'lifo'"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ValueError, match=message):
        config(**setting)


def test_the_last_token_needs_no_room():
    # 4 + 13 tokens, of which the last is never computed: 16 fill the 4 blocks exactly.
    assert len(serve(config(kv_blocks=4), [request("a", 4, 13)])["a"].tokens_s) == 13
    with pytest.raises(ValueError, match="needs 5 KV blocks"):
        serve(config(kv_blocks=4), [request("a", 4, 14)])


def test_a_shared_prefix_is_computed_once():
    shared = {"prefix_hashes": ("x", "y", "z")}
    engine = engine_with(request("a", 14, 2, **shared), prefix_caching=True)
    assert steps(engine, 1)[0].prefill_tokens == 14
    engine.add(request("b", 13, 1, **shared))
    second = steps(engine, 1)[0]
    assert (second.prefill_tokens, second.decode_sequences) == (1, 1)  # 12 of b's 13 tokens are a's blocks
    assert engine.kv_usage == 0  # both finished; their blocks are free though still known
    engine.add(request("c", 9, 1, prefix_hashes=("x", "w")))
    assert steps(engine, 1)[0].prefill_tokens == 5
    assert (engine.prefix_queried_tokens_total, engine.prefix_hit_tokens_total) == (14 + 13 + 9, 0 + 12 + 4)


def test_the_last_token_of_a_known_prompt_is_computed_all_the_same():
    shared = {"prefix_hashes": ("x", "y")}
    engine = engine_with(request("a", 8, 1, **shared), request("b", 8, 1, **shared), prefix_caching=True)
    # Admitted in one iteration: b shares the block that a is about to compute, and computes the last one itself.
    assert steps(engine, 1)[0].prefill_tokens == 8 + 4


def test_without_the_cache_hashes_mean_nothing():
    engine = engine_with(request("a", 8, 1, prefix_hashes=("x", "y")), request("b", 8, 1, prefix_hashes=("x", "y")))
    assert steps(engine, 1)[0].prefill_tokens == 16
    assert engine.prefix_queried_tokens_total == 0


def test_known_blocks_give_way_when_room_is_needed_the_oldest_first():
    engine = engine_with(request("a", 9, 1, prefix_hashes=("a0", "a1")), kv_blocks=4, prefix_caching=True)
    steps(engine)
    engine.add(request("b", 5, 1, prefix_hashes=("b0",)))
    steps(engine)  # a's two known blocks are idle, b takes the two blank ones and leaves one of them known
    engine.add(request("c", 9, 1, prefix_hashes=("b0",)))
    assert steps(engine, 1)[0].prefill_tokens == 5  # b0 is shared; a's last block gave way, not its first
    engine.add(request("d", 9, 1, prefix_hashes=("a0", "a1")))
    assert steps(engine, 1)[0].prefill_tokens == 5


def test_a_preempted_request_finds_its_own_blocks_again():
    engine = engine_with(request("a", 7, 4), request("b", 7, 4), kv_blocks=4, prefix_caching=True)
    results = steps(engine)
    assert results[2].preempted == ["b"]
    # a took one of b's two full blocks: of the 9 tokens that b has to compute, 4 are still there.
    assert (results[4].admitted, results[4].prefill_tokens) == (["b"], 5)


def test_blocks_without_a_hash_are_never_shared():
    engine = engine_with(request("a", 9, 1), prefix_caching=True)
    steps(engine)
    engine.add(request("b", 9, 1, prefix_hashes=((0, 0), (0, 1))))
    assert steps(engine, 1)[0].prefill_tokens == 9
