"""Sleeping models under two clocks: both wake one before the calls that probably follow, at the same moments."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.dispatch.test_runs_twin import RunsLive
from tests.dispatch.test_twin import NEVER, assert_alike, inventory_of

UNITS = {"plan": Backend("llm", "m"), "write": Backend("llm", "n"), "test": Backend("container", "python")}
WAKE_S = 5.0
SLEEPER = 2
"""The only instance of model n."""
RUNS = 6


class WakingLive(RunsLive):
    """The dispatcher, with an instance that sleeps until the floor, which asks every second, wakes it."""

    def __init__(self, fleet):
        super().__init__(fleet)
        self.models, self.woken_s, prewarm = {}, [], self.dispatcher.prewarming.sweep
        self.rows = inventory_of(fleet)
        self.put(InstanceState.SLEEPING)

        def look():
            prewarm()
            endpoint = self.topology.endpoint("n", "east")
            asleep = self.topology.by_slot[SLEEPER].spec.state == InstanceState.SLEEPING
            if asleep and (call := self.dispatcher.prewarming.wakes(endpoint)) is not None:
                assert self.dispatcher.prewarming.woken(endpoint, call) == "Prewarming: write will probably follow."
                self.woken_s.append(self.now_s)
                self.put(InstanceState.LOADING)
                self.events_s[SLEEPER] = self.now_s + WAKE_S

        self.dispatcher.prewarming.sweep = look

    def put(self, state):
        tuned = self.topology.tuned
        start = {"start_s": WAKE_S} if state == InstanceState.LOADING else {}
        rows = [
            replace(one, state=state, **start) if one.instance_id == SLEEPER else one for one in self.rows.instances
        ]
        self.dispatcher.apply_inventory(replace(self.rows, instances=tuple(rows)))
        self.topology.tuned = tuned

    def arrive(self, number, model, *more, **marks):
        super().arrive(number, UNITS[marks["unit"]].name, *more, **marks)

    def work(self, slot):
        if slot == SLEEPER and self.topology.by_slot[slot].spec.state == InstanceState.LOADING:
            self.events_s[slot] = NEVER
            self.put(InstanceState.READY)
            self.dispatcher.pump_all()
            self.give()
        else:
            super().work(slot)


@pytest.mark.parametrize("test_s", [0.0, 4.0])
async def test_both_clocks_wake_a_model_before_its_call(test_s):
    """The second unit runs on a model that sleeps; there may be a unit that is no LLM between them."""
    random = np.random.default_rng(3)
    engine = EngineConfig(4, 64, 4, 400, "fcfs", 400, Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5))
    specs = [
        simulated.InstanceSpec(model, "east", engine, state=state)
        for model, state in (("m", State.READY), ("m", State.READY), ("n", State.ASLEEP))
    ]
    fleet = simulated.Cluster(
        specs,
        policies=EndpointPolicy(ordering="hermes"),
        prewarming="hermes",
        delays=simulated.Delays(wake_s=WAKE_S),
    )

    def record():
        between = [Step("test", 0, duration_s=test_s)] if test_s else []
        return RunRecord((
            Step("plan", -1, 20, int(random.integers(200, 260))), *between, Step("write", len(between), 20, 15),
        ))  # fmt: skip

    graph = DemandGraph("a0", UNITS, [record() for _ in range(40)])
    rates = {
        name: ServiceRate(0.04, 1e-3, 0.04) if unit.kind == "llm" else ServiceRate() for name, unit in UNITS.items()
    }
    known = KnownGraph.of(graph, rates)
    runs = RunsToCome(
        [ApplicationToCome("a0", UNITS, known)],
        [RunToCome(0, 0.3 + 2.1 * number, NEVER, record()) for number in range(RUNS)],
    )
    calls = [
        (number, run.began_s, step.input_tokens, step.output_tokens, int(UNITS[step.unit].name == "n"))
        for number, run in enumerate(runs.runs)
        for step in run.record.steps
        if UNITS[step.unit].kind == "llm"
    ]
    run_of, arrival_s, prompt, output, model = (np.array(column) for column in zip(*calls, strict=True))
    requests = make_requests(arrival_s, prompt, output, run=run_of, model=model)
    live = WakingLive(fleet)
    live.dispatcher.runs.graphs[1, "a0"] = known
    live.serve(fleet, requests, runs)
    simulation = Simulation(fleet, requests, decisions=True, runs=runs)
    result = simulation.run()
    wakes = result.changes[(result.changes["instance"] == SLEEPER) & (result.changes["after"] == State.WAKING)]
    assert wakes["time_s"].tolist() == live.woken_s
    assert len(live.woken_s) == 1
    assert result.counters["model_warmed"] == result.counters["model_used"] == 1
    assert_alike(live, result)
    assert (result.outcomes["state"] == Outcome.DONE).all()
    asleep = Simulation(replace(fleet, prewarming="lru"), requests, runs=runs).run()
    assert (asleep.outcomes["state"][model == 1] == Outcome.REFUSED).all(), "or nothing would need to wake"
