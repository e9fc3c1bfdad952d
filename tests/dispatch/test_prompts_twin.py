"""System prompts under two clocks: the same ones are computed early, at the same instances and moments."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from controlplane.dispatch.port import PrefixWarmed, WarmPrefix
from scheduling.applications.demand_graph import DemandGraph
from scheduling.applications.standings import KnownGraph
from scheduling.control.system_prompts import PromptPrewarming
from scheduling.routing.prefix_affinity import recorded
from scheduling.simulation.engine.reference import ReferenceEngine
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.dispatch.test_runs_twin import RATES, RUNS, UNITS, RunsLive, drawn_record, rows_of
from tests.dispatch.test_twin import BLOCK_TOKENS, NEVER, assert_alike, simulated_fleet
from tests.examples import at_night_but
from tests.scheduling.simulation.engine.test_warm_prefix import warm

PROMPTS = {"plan": 4, "work": 6, "check": 3}
"""Blocks of the system prompt of each unit."""


class Warmer(ReferenceEngine):
    """Warms a prefix as the compiled engine does: its prefill makes the next step that admits a request longer.

    Blocks of requests that end are free once the step is over.
    """

    def __init__(self, config):
        super().__init__(config)
        self.owed_s, self.ended = 0.0, None

    def warm(self, contents, busy):
        missing = warm(self._pool, contents)
        if missing > 0 and busy:
            tokens, profile = missing * BLOCK_TOKENS, self.config.profile
            self.owed_s += profile.prefill_b_s_per_token * tokens + profile.prefill_c_s_per_token2 * tokens**2
        return missing >= 0

    def step(self, now_s):
        ended, self.ended = self.ended or (), None
        for sequence in ended:
            self._free(sequence)
        return super().step(now_s)

    def _free(self, sequence):
        if self.ended is None:
            super()._free(sequence)
        else:
            self.ended.append(sequence)

    def _execute(self, batch, preempted, now_s):
        owed_s = self.owed_s if any(not each.decoding for each in batch.tokens) else 0.0
        self.owed_s -= owed_s
        self.ended = []
        result = super()._execute(batch, preempted, now_s)
        return replace(result, ends_s=result.ends_s + owed_s, duration_s=result.duration_s + owed_s)


class PromptedLive(RunsLive):
    """The dispatcher, whose requests for one token are answered within its look, once the instance has memory for them."""

    def __init__(self, fleet):
        super().__init__(fleet)
        self.engines = [Warmer(spec.engine) for spec in fleet.instances]
        self.asked, prewarm = [], self.dispatcher.prewarming.sweep

        def look():
            prewarm()
            for record in list(self.asked):
                slot = int(record.instance[1:])
                contents = next(
                    blocks for blocks in self.hashes.values() if recorded(np.array(blocks))[-1] == record.prefix
                )
                if self.engines[slot].warm(contents, self.steps[slot] is not None):
                    self.asked.remove(record)
                    self.dispatcher.take(PrefixWarmed(record.instance, record.ready_at, record.prefix))

        self.dispatcher.prewarming.sweep = look

    @staticmethod
    def name_of(run):
        return f"a{run.application} {run.prompts}"

    def take(self, record):
        super().take(record)
        if isinstance(record, WarmPrefix):
            self.asked.append(record)

    def arrive(self, number, *arguments, **more):
        blocks = len(recorded(np.array(self.hashes[number])))
        super().arrive(number, *arguments, system_blocks=blocks, **more)


CASES = [(adapters, share) for adapters in (0, 6) for share in (0.05, 1.0)]


@pytest.mark.parametrize(("adapters", "share"), at_night_but([CASES[1], CASES[3]], CASES))
async def test_both_clocks_warm_system_prompts_alike(monkeypatch, adapters, share):
    """Six versions of an application, each with its own adapter where there are any; memory holds a few prompts."""
    random = np.random.default_rng(5)
    fleet = simulated_fleet(random, "least_delay", "application")
    fleet.prewarming, fleet.prewarm_share = "hermes", share
    if adapters:
        fleet.instances = [
            replace(spec, engine=replace(spec.engine, max_loras=2, max_cpu_loras=4)) for spec in fleet.instances
        ]
    records = [drawn_record(random, 6) for _ in range(40)]
    graph = KnownGraph.of(DemandGraph("a0", UNITS, records), RATES)
    versions = 6
    began_s, version = np.cumsum(random.exponential(0.6, RUNS)), random.integers(0, versions, RUNS)
    units = {
        name: msgspec.structs.replace(backend, prompt=name) if name in PROMPTS else backend
        for name, backend in UNITS.items()
    }
    runs = RunsToCome(
        [ApplicationToCome("a0", units, graph)],
        [
            RunToCome(0, float(began), NEVER, drawn_record(random, 6), int(of))
            for began, of in zip(began_s, version, strict=True)
        ],
    )
    run_of, arrival_s, prompt, output = rows_of(runs)
    whose = [
        step.unit
        for run in runs.runs
        for step in run.record.steps
        for _ in range(step.parallelism)
        if step.unit in PROMPTS
    ]
    blocks = [
        [1_000_000 * (1 + int(version[run])) + 1000 * list(PROMPTS).index(unit) + at for at in range(PROMPTS[unit])]
        for run, unit in zip(run_of, whose, strict=True)
    ]
    prompt = prompt + BLOCK_TOKENS * np.array([len(each) for each in blocks])
    region = random.integers(0, 3, RUNS)[run_of]
    adapter = version[run_of] if adapters else -1
    requests = make_requests(
        arrival_s, prompt, output, region=region, run=run_of, adapter=adapter, prefix_blocks=blocks
    )
    placed, warm_prompt = [], PromptPrewarming._warm

    def recorded_warm(self, endpoint, name):
        before = set(self.warming)
        warm_prompt(self, endpoint, name)
        for instance in set(self.warming) - before:
            placed.append((self.fleet.now_s, endpoint, instance, self.known[name].blocks))

    monkeypatch.setattr(PromptPrewarming, "_warm", recorded_warm)
    live = PromptedLive(fleet)
    live.hashes = dict(enumerate(blocks))
    for number in range(versions):
        live.dispatcher.runs.graphs[1, f"a0 {number}"] = graph
    live.serve(fleet, requests, runs)
    of_live, placed[:] = placed[:], []
    result = Simulation(fleet, requests, decisions=True, runs=runs).run()

    assert placed == of_live
    assert_alike(live, result)
    counts = live.dispatcher.prewarming.counts["prefix"]
    assert {name: result.counters[f"prefix_{name}"] for name in counts} == dict(counts)
    assert min(counts["used"], counts["wasted"]) > 0
    assert len({instance for _, _, instance, _ in placed}) > 2
