"""One scenario under both clocks: the live dispatcher over reference engines, and the compiled simulator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np

from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.port import Asked, RunReport
from controlplane.tuning.selectors import Values
from scheduling.applications.standings import KnownGraph
from scheduling.control.swaps import EVERY_S as SWAP_EVERY_S
from scheduling.queueing.held import ENDS_ON_RECLAIM, OPPORTUNISTIC
from scheduling.queueing.promises import ClassTerms
from scheduling.routing.adapters import TIERS
from scheduling.routing.models import RULES
from scheduling.simulation import swapping
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.result import Result
from scheduling.simulation.simulator import Simulation, TimedEvent
from scheduling.simulation.workload.requests import Requests
from scheduling.simulation.workload.runs import RunsToCome
from tests.clocks.fleet import ARRIVAL, COMMAND, Course, VirtualFleet, token_blocks
from tests.clocks.launcher import LIVE, SLEEP_S, Launcher
from tests.oracles.lookahead import noted_places

CLOSE_S = 1e-6
LONG_AGO_S = -1000.0
"""When an instance that is there at the start became ready."""


class Command(NamedTuple):
    """What an operator or a failure does: a method of `Simulation` and of `Launcher`."""

    at_s: float
    name: str
    arguments: tuple[Any, ...]


@dataclass
class Scenario:
    cluster: Cluster
    requests: Requests
    blocks: Sequence[Sequence[int]] = ()
    """Contents of the leading blocks of each prompt."""
    system_blocks: Sequence[int] = ()
    """Of these, how many are the system prompt."""
    deadlines_s: Sequence[float] | None = None
    """Of classes: how long each request is held at the most."""
    runs: RunsToCome | None = None
    graph_names: Sequence[tuple[str, KnownGraph]] = ()
    """Names of applications live, with what is known of each."""
    name_of: Callable[[Any], str] = lambda run: f"a{run.application}"
    commands: Sequence[Command] = ()
    tuned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shares(self) -> bool:
        return any(spec.sharing is not None for spec in self.cluster.instances)


@dataclass
class Both:
    scenario: Scenario
    live: VirtualFleet
    launcher: Launcher
    simulation: Simulation
    result: Result

    @property
    def counters(self) -> dict[str, int]:
        return self.result.counters

    def said(self, what: str) -> list[int]:
        """Return the requests of which the live dispatcher said *what*, or what begins so."""
        return [each.request for each in self.live.events if each.what.startswith(what)]


def inventory_of(fleet: Cluster, tuned: Mapping[str, Any] | None = None) -> Inventory:
    """Return the cluster as inventory rows, with the settings *tuned*."""
    shares = any(spec.sharing is not None for spec in fleet.instances)
    rows: dict[str, Any] = {
        "PREWARM_SHARE": fleet.prewarm_share,
        "PREWARM_K": fleet.prewarm_k,
        "MAX_HOLD_S": fleet.max_hold_s,
        "TENANT_WEIGHTS": ", ".join(f"t{number}={weight}" for number, weight in enumerate(fleet.tenant_weights)),
        **(tuned or {}),
    }
    values = Values({"": rows})
    models = {
        model: ModelSpec(model, 4096, 0, fallback=fleet.fallbacks[model].model if model in fleet.fallbacks else "")
        for model in fleet.models
    }
    return Inventory(
        models=models,
        endpoints=tuple(
            EndpointSpec(
                model, region, fleet.policy((model, region)), profile=fleet.reference_profile((model, region)),
                max_loras=max(spec.engine.max_loras for spec in fleet.instances), tuned=values.of(),
                front_end=fleet.reference_engine((model, region)).front_end, shares_gpus=shares,
                max_num_seqs=fleet.requests_at_once((model, region)),
            )
            for model, region in fleet.endpoints
        ),
        instances=tuple(
            InstanceSpec(
                number, f"i{number}", f"http://127.0.0.1:1/i{number}", LIVE[spec.state], LONG_AGO_S, spec.model,
                spec.region, spec.gpu_type, spec.dispatch_max_num_seqs or spec.engine.max_num_seqs,
                spec.dispatch_kv_tokens or spec.engine.kv_capacity_tokens,
                profile=spec.engine.profile, front_end=spec.engine.front_end,
                adapter_slots=(spec.engine.max_loras, spec.engine.max_cpu_loras),
                offload=(
                    spec.engine.offload_blocks * spec.engine.block_size_tokens, spec.engine.restore_s,
                    spec.engine.restore_s_per_token,
                ) if spec.engine.offload_blocks else (0, 0.0, 0.0),
            )
            for number, spec in enumerate(fleet.instances)
        ),
        values=values,
    )  # fmt: skip


def courses_of(scenario: Scenario) -> list[Course]:
    """Return the requests as the gateway submits them."""
    fleet, requests, publishes = scenario.cluster, scenario.requests, scenario.tuned.get("publishes", False)
    deadlines_s = scenario.deadlines_s

    def finite(value: float) -> float | None:
        return None if value == inf else float(value)

    def course(row: int) -> Course:
        model, held = fleet.models[requests.model[row]], int(requests.held[row])
        blocks = tuple(scenario.blocks[row]) if scenario.blocks else ()
        size = fleet.instances[0].engine.block_size_tokens
        terms = fleet.classes[requests.slo_class[row]] if fleet.classes else ClassTerms(str(requests.slo_class[row]))
        lower = next((each for each in fleet.classes if each.slo_class == terms.degrades_to), None)
        fallback = fleet.fallbacks.get(model)
        pools, origin = model in fleet.pooling, fleet.origins[requests.region[row]]
        submit = Asked(
            row, str(row), model, origin[0], regions=origin[1],
            tenant_id=1 + int(requests.tenant[row]), tenant=f"t{requests.tenant[row]}",
            priority=int(requests.priority[row]), due_s=finite(requests.deadline_s[row]),
            end_s=finite(requests.end_s[row]), arrived_at=float(requests.arrival_s[row]),
            arrived_s=float(requests.arrival_s[row]), prompt_tokens=int(requests.prompt_tokens[row]),
            predicted_tokens=int(requests.predicted_tokens[row]), max_tokens=1 if pools else None, sequences=1,
            streamed=not pools, evictable=not pools,
            # Those of the trace, at the places that are noted.
            prefix_hashes=tuple(blocks[place - 1] for place in noted_places(len(blocks))), block_tokens=size,
            token_blocks=token_blocks(blocks, size) if publishes else b"", token_block_size=size,
            system_blocks=scenario.system_blocks[row] if scenario.system_blocks else 0,
            deadline_s=None if deadlines_s is None else finite(deadlines_s[row]), slo_class=terms.slo_class,
            if_unreachable=terms.if_unreachable, fallbacks=() if lower is None else (lower,),
            interactive=not held and terms.interactive, opportunistic=bool(held & OPPORTUNISTIC),
            ends_on_reclaim=bool(held & ENDS_ON_RECLAIM),
            adapter=f"a{requests.adapter[row]}" if requests.adapter[row] >= 0 else "",
            fallback="" if fallback is None else fallback.model,
            fallback_wait_s=None if fallback is None else fallback.wait_s,
        )  # fmt: skip
        return Course(submit, int(requests.output_tokens[row]), blocks, pools)

    return [course(row) for row in range(requests.arrival_s.size)]


class Following:
    """Calls of application runs, each of which comes once the steps before it have ended."""

    def __init__(self, fleet: VirtualFleet, scenario: Scenario, courses: list[Course]) -> None:
        assert scenario.runs is not None
        self.fleet, self.scenario, self.runs = fleet, scenario, scenario.runs
        self.calls: dict[tuple[int, int], list[Course]] = {}
        self.step_of: dict[int, tuple[int, int]] = {}
        self.open: dict[tuple[int, int], int] = {}
        self.reports = 0
        for number, run in enumerate(self.runs.runs):
            rows = iter(np.flatnonzero(scenario.requests.run == number).tolist())
            for at, step in enumerate(run.record.steps):
                if self._is_llm(number, at):
                    self.calls[number, at] = [courses[next(rows)] for _ in range(step.parallelism)]
            fleet.at(run.began_s, ARRIVAL, self._begin, number, 0)
        fleet.expected += sum(map(len, self.calls.values()))
        fleet.on_end.append(self._ended)
        tenants = {each.submit.tenant_id for each in courses}
        for name, graph in scenario.graph_names:
            fleet.dispatcher.runs.graphs.update({(tenant, name): graph for tenant in tenants})

    def _is_llm(self, number: int, at: int) -> bool:
        run = self.runs.runs[number]
        return self.runs.applications[run.application].units[run.record.steps[at].unit].kind == "llm"

    def _begin(self, number: int, at: int) -> None:
        run = self.runs.runs[number]
        step, name = run.record.steps[at], self.scenario.name_of(run)
        if self._is_llm(number, at):
            self.open[number, at] = step.parallelism
            for course in self.calls[number, at]:
                self.step_of[course.submit.number] = number, at
                more = {"application": name, "run": str(number), "unit": step.unit, "run_due_s": run.due_in_s}
                course.submit = msgspec.structs.replace(course.submit, arrived_at=self.fleet.now_s, **more)
                self.fleet.arrive(course)
            return
        executions = range(self.reports + 1, self.reports + 1 + step.parallelism)
        self.reports += step.parallelism
        self._report("began", number, at, executions)
        self.fleet.at(self.fleet.now_s + step.duration_s, ARRIVAL, self._other_ended, number, at, executions)

    def _report(self, what: str, number: int, at: int, executions: range) -> None:
        run = self.runs.runs[number]
        step, tenant = run.record.steps[at], next(iter(self.calls[number, 0])).submit.tenant_id
        for each in executions:
            name = self.scenario.name_of(run)
            self.fleet.dispatcher.runs.report(
                RunReport(what, tenant, name, str(number), each, step.unit, step.duration_s)
            )

    def _other_ended(self, number: int, at: int, executions: range) -> None:
        self._report("ended", number, at, executions)
        self._follow(number, at)

    def _ended(self, request: int) -> None:
        number, at = self.step_of[request]
        self.open[number, at] -= 1
        if not self.open[number, at]:
            self._follow(number, at)

    def _follow(self, number: int, at: int) -> None:
        for child in self.runs.runs[number].record.children()[at]:
            self.fleet.at(self.fleet.now_s, ARRIVAL, self._begin, number, child)


def fleet_of(
    cluster: Cluster, tuned: Mapping[str, Any] | None = None, fleet: type[VirtualFleet] = VirtualFleet
) -> VirtualFleet:
    """Return the instances of *cluster*, to which nothing comes yet."""
    engines = [spec.engine for spec in cluster.instances]
    return fleet(inventory_of(cluster, tuned), engines, cluster.policy(cluster.endpoints[0]).round_trip_s)


def live_fleet(scenario: Scenario, fleet: type[VirtualFleet] = VirtualFleet) -> tuple[VirtualFleet, Launcher]:
    """Return the fleet of *scenario*, to which its requests and commands are to come."""
    cluster = scenario.cluster
    live = fleet_of(cluster, scenario.tuned, fleet)
    if scenario.tuned.get("publishes"):
        live.publish()
    launcher = Launcher(live, cluster)
    for at_s, name, arguments in scenario.commands:
        live.at(at_s, COMMAND, getattr(launcher, name), *arguments)
    courses = courses_of(scenario)
    if scenario.runs is None:
        live.expect(courses)
    else:
        Following(live, scenario, courses)
    return live, launcher


def simulation_of(scenario: Scenario) -> Simulation:
    return Simulation(scenario.cluster, scenario.requests, decisions=True, runs=scenario.runs)


GOALS = {"drain": (State.SPOT,), "stop": (State.EMPTY,), "sleep": (State.FALLING_ASLEEP, SLEEP_S)}


def run(
    simulation: Simulation, scenario: Scenario, tick: Callable[[Simulation], None] | None, tick_s: float = SWAP_EVERY_S
) -> Result:
    """Run *simulation* with the commands of *scenario*."""

    def happen(command: Command) -> Callable[[Simulation], None]:
        def carry_out(simulation: Simulation) -> None:
            lives, (number, *_) = simulation.lives, command.arguments
            if command.name in GOALS:
                lives.drain(number, *GOALS[command.name])
            elif command.name in ("start", "wake"):
                lives.start(number)
                simulation.control(simulation.endpoint_of(number))
            else:
                getattr(simulation, command.name)(*command.arguments)

        return carry_out

    return simulation.run(tick, tick_s, timed_events=[TimedEvent(at.at_s, happen(at)) for at in scenario.commands])


def run_simulation(scenario: Scenario) -> tuple[Simulation, Result]:
    simulation = simulation_of(scenario)
    return simulation, run(simulation, scenario, swapping.Swapping(simulation) if scenario.shares else None)


def serve(scenario: Scenario) -> Both:
    """Run *scenario* under both clocks."""
    live, launcher = live_fleet(scenario)
    live.run()
    return Both(scenario, live, launcher, *run_simulation(scenario))


# What both must agree on


def placements(both: Both) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return (moment, request, endpoint, instance) of each decision."""
    endpoints = both.scenario.cluster.endpoints
    live = [(at_s, *row) for at_s, *row in both.live.decisions]
    simulated = [
        (at_s, request, *endpoints[endpoint], instance)
        for at_s, request, endpoint, instance in both.result.decisions[
            ["time_s", "request", "endpoint", "instance"]
        ].tolist()
    ]
    return live, simulated


STATES = {Outcome.DONE: "done", Outcome.REFUSED: "refused", Outcome.FAILED: "failed"}


def outcomes(both: Both) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return of each request the moments of its first placement, first and last token, and what became of it."""

    def moment(arrival_s: float, since_s: float | None) -> float:
        return -1.0 if since_s is None or np.isnan(since_s) else float(arrival_s + since_s)

    def or_none(at_s: float | None) -> float:
        return -1.0 if at_s is None else at_s

    live, simulated = [], []
    for number, row in enumerate(both.result.outcomes):
        course, arrival_s = both.live.courses[number], both.result.requests.arrival_s[number]
        rule = "" if course.fell_back is None else str(course.fell_back.rule)
        placed = 0 if course.placed is None else course.placed.attempt
        live.append((
            or_none(course.first_queue_s), or_none(course.first_token_s), or_none(course.finished_s), course.outcome,
            course.evictions, course.preemptions, placed, rule,
        ))  # fmt: skip
        state = Outcome(row["state"])
        simulated.append((
            moment(arrival_s, row["queue_s"]), moment(arrival_s, row["ttft_s"]), moment(arrival_s, row["e2e_s"]),
            STATES.get(state, state.name), int(row["evictions"]), int(row["preemptions"]), int(row["attempts"]),
            str(RULES[row["model_rule"]] or ""),
        ))  # fmt: skip
    return live, simulated


def changes(both: Both) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return (moment, instance, state) of each change of an instance."""
    simulated = [(at_s, number, State(after)) for at_s, number, _, _, after in both.result.changes.tolist()]
    return in_order(both.launcher.changes), in_order(simulated)


def in_order(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return *rows* such that those of one moment are in order of their instance."""
    return sorted(rows, key=lambda row: (round(row[0], 5), row[1]))


def counts(both: Both) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often what has no moment in a result happened."""
    said, tiers = both.live.events, both.live.dispatcher.adapters.tiers
    names = "not_loaded", "in_memory", "on_gpu"
    live = {
        "released": sum(each.what.startswith("released") for each in said),
        "rehomed": sum(each.what == "moved" for each in said),
        "expired": sum(each.what == "refused" and each.where == "hold_expired" for each in said),
        "evictions": sum(each.evictions for each in both.live.courses.values()),
        **{f"adapter_{name}": tiers[tier] for name, tier in zip(names, TIERS, strict=True)},
    }
    return live, {name: both.counters[name] for name in live}


def assert_equal_events(both: Both) -> None:
    """Assert that everything happened to the same requests and instances, in the same order, at the same moments."""
    for of in (placements, changes, outcomes):
        live, simulated = of(both)
        for number, (one, other) in enumerate(zip(live, simulated, strict=False)):
            assert alike(one, other), f"{of.__name__} {number}: {one} live, {other} simulated"
        assert len(live) == len(simulated), f"{of.__name__}: {len(live)} live, {len(simulated)} simulated"
    live, simulated = counts(both)
    assert live == simulated
    assert_nothing_left(both)


def assert_nothing_left(both: Both) -> None:
    """Assert that whatever was placed was released."""
    dispatcher, engines = both.live.dispatcher, both.simulation.world.engines
    for fleet in (both.live.topology.fleet, both.simulation.fleet):
        for name in ("running", "kv_tokens", "remaining_tokens", "queued_prompt_tokens"):
            assert not getattr(fleet, name).any(), name
    assert not engines.ahead.active.any()
    assert (engines.instances["free_blocks"] == engines.instances["kv_blocks"]).all()
    assert not len(dispatcher.requests) + len(dispatcher.queue) + len(dispatcher.holding)


def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two rows are equal, moments but for `CLOSE_S`."""
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= CLOSE_S if isinstance(a, float) and isinstance(b, float) else a == b for a, b in pairs)
