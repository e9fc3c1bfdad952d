"""What holds in every run of the engine, whatever is asked of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.engine.reference import EngineRequest, ReferenceEngine
from tests.examples import at_night_but
from tests.oracles.single_instance import serve
from tests.scheduling.simulation.engine.engines import config

BLOCK_SIZE_TOKENS = 4

# Small and tight: preemption, chunks and full batches must be common.
configs = st.builds(
    lambda max_num_seqs, spare_tokens, kv_blocks, policy, prefix_caching: config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_tokens,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        kv_blocks=kv_blocks,
        policy=policy,
        prefix_caching=prefix_caching,
    ),
    max_num_seqs=st.integers(1, 6),
    spare_tokens=st.integers(0, 20),
    kv_blocks=st.integers(6, 20),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
)


@st.composite
def request_lists(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 10)), min_size=1, max_size=15))
    requests = []
    for number, (prompt_tokens, output_tokens) in enumerate(lengths):
        family = draw(st.integers(0, 2))
        common = draw(st.integers(0, prompt_tokens // BLOCK_SIZE_TOKENS))
        requests.append(
            EngineRequest(
                request_id=f"r{number}",
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                priority=draw(st.integers(-1, 1)),
                arrival_s=draw(st.integers(0, 8)) * 1.25,
                prefix_hashes=tuple((family, index) for index in range(common)),
            )
        )
    return requests


class Watch:
    """Steps an engine and checks each step."""

    def __init__(self, engine_config):
        self.config = engine_config
        self.engine = ReferenceEngine(engine_config)
        self.requests = {}
        self.produced = {}
        self.admissions = []
        self.finished = set()
        self.now_s = 0.0

    def add(self, request):
        self.engine.add(request)
        self.requests[request.request_id] = request
        self.produced[request.request_id] = 0

    def step(self):
        preemptions = self.engine.preemptions_total
        result = self.engine.step(self.now_s)
        if result is None:
            assert (self.engine.running, self.engine.waiting, self.engine.kv_usage) == (0, 0, 0.0)
            return None
        assert result.duration_s > 0
        assert result.ends_s == self.now_s + result.duration_s
        assert 0 < result.prefill_tokens + result.decode_sequences <= self.config.max_num_batched_tokens
        assert result.duration_s == self.config.profile.step_time_s(
            result.prefill_tokens, result.decode_sequences, result.context_tokens
        )
        assert len(set(result.emitted)) == len(result.emitted) <= self.config.max_num_seqs
        assert self.engine.running + len(result.finished) <= self.config.max_num_seqs
        assert 0 <= self.engine.kv_usage <= 1
        assert self.engine.preemptions_total - preemptions == len(result.preempted)
        self.admissions += result.admitted
        for request_id in result.emitted:
            self.produced[request_id] += 1
            assert request_id not in self.finished
        for request_id in result.finished:
            assert self.produced[request_id] == self.requests[request_id].output_tokens
            self.finished.add(request_id)
        unfinished = len(self.requests) - len(self.finished)
        assert self.engine.running + self.engine.waiting == unfinished
        self.blocks_are_conserved()
        self.now_s = result.ends_s
        return result

    def blocks_are_conserved(self):
        """Free and held blocks add up to all blocks, and every sequence holds exactly what it needs."""
        pool = self.engine._pool
        sequences = self.engine._running.values()
        own = sum(sequence.blocks - len(sequence.published) for sequence in sequences)
        shared = {block for sequence in sequences for block in sequence.published}
        assert pool.free + own + len(shared) == pool.capacity
        for block in shared:
            assert block.holders == sum(block in sequence.published for sequence in sequences)
        for sequence in sequences:
            assert sequence.blocks == self.config.blocks_for(sequence.computed_tokens)
        for request_id in set(self.engine._sequences) - set(self.engine._running):
            sequence = self.engine._sequences[request_id]
            assert (sequence.blocks, sequence.computed_tokens, sequence.published) == (0, 0, [])


@given(engine_config=configs, requests=request_lists())
def test_every_request_gets_exactly_its_tokens_and_is_admitted_in_order(engine_config, requests):
    """In order of arrival, or of priority and then of arrival; the first of all is never preempted."""
    watch, in_order = Watch(engine_config), requests
    if engine_config.policy == "priority":
        in_order = sorted(requests, key=lambda request: (request.priority, request.arrival_s))
    for request in requests:
        watch.add(request)
    most_steps = sum(request.prompt_tokens + request.output_tokens for request in requests) * len(requests) + 10
    while (result := watch.step()) is not None:
        most_steps -= 1
        assert most_steps > 0, "the engine never ends"
        assert in_order[0].request_id not in result.preempted
    assert watch.finished == set(watch.requests)
    assert list(dict.fromkeys(watch.admissions)) == [request.request_id for request in in_order]


@given(engine_config=configs, requests=request_lists(), data=st.data())
def test_requests_may_come_and_go_at_any_time(engine_config, requests, data):
    watch = Watch(engine_config)
    for request in requests:
        watch.add(request)
        for _ in range(data.draw(st.integers(0, 3), label="steps")):
            watch.step()
        if data.draw(st.booleans(), label="abort one"):
            victim = data.draw(st.sampled_from(sorted(watch.requests)), label="victim")
            assert watch.engine.abort(victim) == (victim not in watch.finished)
            watch.finished.discard(victim)
            del watch.requests[victim], watch.produced[victim]
            watch.blocks_are_conserved()
    while watch.step() is not None:
        pass
    assert watch.finished == set(watch.requests)


@given(engine_config=configs, requests=request_lists())
def test_timelines_are_in_order(engine_config, requests):
    timelines = serve(engine_config, requests)
    for request in requests:
        timeline = timelines[request.request_id]
        assert request.arrival_s <= timeline.admitted_s < timeline.tokens_s[0]
        assert timeline.tokens_s == sorted(set(timeline.tokens_s))
        assert len(timeline.tokens_s) == request.output_tokens


@pytest.mark.parametrize("policy", at_night_but(["priority"], ["fcfs", "priority"]))
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_overload_preempts_and_still_serves_everyone(policy, prefix_caching):
    engine_config = config(
        max_num_seqs=64, max_num_batched_tokens=128, kv_blocks=60, policy=policy, prefix_caching=prefix_caching
    )
    watch = Watch(engine_config)
    for number in range(200):
        watch.add(EngineRequest(f"r{number}", 5 + number % 17, 40 + number % 23, priority=number % 4))
    while watch.step() is not None:
        pass
    assert len(watch.finished) == 200
    assert watch.engine.preemptions_total > 100
