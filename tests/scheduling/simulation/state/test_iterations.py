"""Prompts computed in chunks: progress is replayed from when tokens came, and is compared with the engine itself."""

from math import inf

import numpy as np
import pytest

from scheduling.fleet.profile import Profile
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest, ReferenceEngine
from scheduling.simulation.staging import iterations
from scheduling.simulation.staging.iterations import EnginePrompt, replay

PROFILE = Profile(0.02, 0.005, 1e-4, 0.0, 0.02, 0.0005, 1e-6)
SEQUENCES = 8


def engine_of(budget):
    return EngineConfig(
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=budget,
        block_size_tokens=16,
        kv_blocks=100_000,
        policy="fcfs",
        max_model_len=100_000,
        profile=PROFILE,
    )


class Cut:
    """An engine that has served *requests*, (arrival, prompt, output), until *at_s*, seen from outside and as it is."""

    def __init__(self, config, requests, at_s):
        engine, left = ReferenceEngine(config), sorted(requests)
        arrivals = [arrival_s for arrival_s, _, _ in left]
        self.seen_s, ended_s = -inf, {}
        now_s, step, number = 0.0, None, 0
        self.begins_s = -inf
        while True:
            while number < len(left) and left[number][0] <= now_s:
                arrival_s, prompt, output = left[number]
                engine.add(EngineRequest(str(number), prompt, output, arrival_s=arrival_s))
                number += 1
            before = {name: (each.computed_tokens, each.produced_tokens) for name, each in engine._sequences.items()}
            step = engine.step(now_s)
            ends_s = min(
                inf if step is None else step.ends_s, left[number][0] if step is None and number < len(left) else inf
            )
            if ends_s > at_s:
                break
            now_s = ends_s
            if step is not None and step.emitted:
                self.seen_s = now_s
            if step is not None and step.finished:
                ended_s |= dict.fromkeys(step.finished, now_s)
        self.begins_s = now_s - at_s if step is not None else -inf
        for at in range(number, len(left)):  # on the way while it computes
            if left[at][0] <= at_s:
                before[str(at)] = (0, 0)
        self.running, self.pending, self.true = [], [], []
        for name, (computed, produced) in before.items():
            one = EnginePrompt(left[int(name)][1], arrivals[int(name)] - at_s, produced)
            (self.running if produced else self.pending).append(one)
            if not produced:
                self.true.append(computed)
        self.seen_s -= at_s
        self.gone = [
            EnginePrompt(left[int(name)][1], arrivals[int(name)] - at_s, left[int(name)][2], left_s=moment_s - at_s)
            for name, moment_s in ended_s.items()
            if any(moment_s - at_s > one.reaches_s for one in self.pending)
        ]

    def replayed(self, config):
        return replay(config, tuple(self.running), tuple(self.pending), tuple(self.gone), self.seen_s)


def off_by(seed, cuts, outputs, many):
    """Return, for each cut of an engine in the middle of a prompt, the largest error of the replay in token budgets."""
    random, off = np.random.default_rng(seed), []
    while len(off) < cuts:
        config = engine_of(int(random.choice([256, 512, 2048])))
        requests = [
            (float(random.uniform(0, 4)), int(random.integers(1, 4000)), int(random.integers(*outputs)))
            for _ in range(random.integers(1, many + 1))
        ]
        cut = Cut(config, requests, float(random.uniform(0.5, 4)))
        begins_s, computed = cut.replayed(config)
        if any(cut.true):
            errors = [abs(one - true) for one, true in zip(computed, cut.true, strict=True)]
            off.append(max(errors) / config.max_num_batched_tokens)
            if max(errors) == 0:
                np.testing.assert_allclose(begins_s, cut.begins_s, atol=1e-6)
    return np.array(off)


def test_computed_tokens_are_known_while_no_request_ends():
    """Exact to the token, except in a few of a hundred cuts."""
    assert (off_by(3, 100, (9_000, 10_000), SEQUENCES) == 0).mean() > 0.95


@pytest.mark.nightly
def test_it_is_mostly_known_while_others_end():
    """The work when the first of them arrived is unknown: the replay is rarely off by chunks."""
    off = off_by(5, 100, (1, 40), 14)
    assert (off < 0.02).mean() > 0.75
    assert np.quantile(off, 0.9) < 1


def test_where_tokens_are_guessed_nothing_is_searched_for(monkeypatch):
    """No replay agrees with them; the computed tokens still lie within the prompts."""
    courses, course = [], iterations._PastIterations._course
    monkeypatch.setattr(iterations._PastIterations, "_course", lambda *given: courses.append(1) or course(*given))
    running = (EnginePrompt(500, -30.0, 300), EnginePrompt(3000, -2.0, 20), EnginePrompt(700, -1.5, 60))
    pending = (EnginePrompt(3000, -0.4), EnginePrompt(2000, -0.3))
    counts = []
    for guessed in (True, False):
        courses.clear()
        begins_s, computed = replay(engine_of(256), running, pending, (), -0.01, guessed)
        counts.append(len(courses))
        assert begins_s == -0.01
        assert all(0 <= tokens < one.tokens for tokens, one in zip(computed, pending, strict=True))
    assert 0 < counts[0] <= 1 + iterations.ROUNDS < counts[1]
