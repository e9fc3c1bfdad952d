"""Application runs under two clocks: the live dispatcher and the simulator rank them alike, decision for decision."""

import heapq

import msgspec
import numpy as np
import pytest

from controlplane.dispatch.port import Finished
from controlplane.dispatch.runs import RunReport
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph, Reading
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.dispatch.test_twin import NEVER, Live, assert_alike, simulated_fleet
from tests.examples import at_night_but

RUNS = 50
WEIGHTS = (1.0, 2.0, 0.5)
"""Of tenants. Powers of two: sums are exact."""
UNITS = {name: Backend("llm", "m") for name in ("plan", "work", "check")} | {"test": Backend("container", "python")}
RATES = {name: ServiceRate(0.04, 1e-3, 0.04) if unit.kind == "llm" else ServiceRate() for name, unit in UNITS.items()}


def rows_of(runs):
    """Return the run, its beginning, and the tokens of each call of *runs*, as columns."""
    rows = [
        (number, run.began_s, step.input_tokens, step.output_tokens)
        for number, run in enumerate(runs.runs)
        for step in run.record.steps
        for _ in range(step.parallelism)
        if UNITS[step.unit].kind == "llm"
    ]
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def drawn_record(random, loops):
    """A plan, work in parallel, its tests, and checks, of which each leads to more work with a chance of one half."""
    steps = [Step("plan", -1, int(random.integers(5, 40)), int(random.integers(2, 30)))]
    for _ in range(1 + random.binomial(loops, 0.5)):
        prompt = int(random.integers(5, 40))
        steps.append(
            Step("work", len(steps) - 1, prompt, int(random.integers(2, 40)), parallelism=int(random.integers(1, 4)))
        )
        if random.random() < 0.5:
            duration_s = float(random.uniform(0.05, 1.5))
            steps.append(Step("test", len(steps) - 1, duration_s=duration_s, parallelism=int(random.integers(1, 3))))
        steps.append(Step("check", len(steps) - 1, 10, int(random.integers(1, 10))))
    return RunRecord(tuple(steps))


class RunsLive(Live):
    """The live dispatcher, with calls that come once the steps before them have ended."""

    def weigh(self, weights):
        """Give tenants their weights, by number."""
        named = ", ".join(f"t{number}={weight}" for number, weight in enumerate(weights))
        self.topology.tuned = self.topology.tuned.model_copy(update={"TENANT_WEIGHTS": named})

    @staticmethod
    def name_of(run):
        """Return the name of the application of *run*."""
        return f"a{run.application}"

    @staticmethod
    def promised(requests, row):
        """Return the priority, and the promised seconds until the first and the last token; None for no promise."""
        columns = (np.broadcast_to(each, requests.run.shape) for each in (requests.deadline_s, requests.end_s))
        promises = (None if each[row] == NEVER else float(each[row]) for each in columns)
        return int(np.broadcast_to(requests.priority, requests.run.shape)[row]), *promises

    def serve(self, fleet, requests, runs):
        rows = [np.flatnonzero(requests.run == number).tolist() for number in range(len(runs.runs))]
        due, open_calls, step_of, ended = [], {}, {}, []
        for number, run in enumerate(runs.runs):
            heapq.heappush(due, (run.began_s, len(due), number, 0))
        taken, pushed, take = [0] * len(runs.runs), len(due), self.dispatcher.take
        calls = {}
        for number, run in enumerate(runs.runs):
            for at, step in enumerate(run.record.steps):
                if runs.applications[run.application].units[step.unit].kind == "llm":
                    calls[number, at] = rows[number][taken[number] : taken[number] + step.parallelism]
                    taken[number] += step.parallelism
        others, reports = {}, 0

        def follow(number, at):
            nonlocal pushed
            for child in runs.runs[number].record.children()[at]:
                heapq.heappush(due, (self.now_s, pushed, number, child))
                pushed += 1

        def report(what, number, at, execution):
            run, tenant = runs.runs[number], int(requests.tenant[rows[number][0]])
            step, name = run.record.steps[at], self.name_of(run)
            self.dispatcher.runs.report(
                RunReport(what, 1 + tenant, name, str(number), execution, step.unit, step.duration_s)
            )

        def heard(record):
            take(record)
            if isinstance(record, Finished):
                ended.append(record.number)

        self.dispatcher.take = heard
        while True:
            event_s, slot = min((event_s, slot) for slot, event_s in enumerate(self.events_s))
            come_s = due[0][0] if due else NEVER
            if min(event_s, come_s) == NEVER:
                return
            look_s = self.now_s // 1.0 + 1.0
            if look_s < come_s and look_s <= event_s:
                self.now_s = look_s
                self.dispatcher.runs.sweep()
                self.dispatcher.prewarming.sweep()
                self.dispatcher.reordering.sweep()
                self.give()
                continue
            if come_s <= event_s:
                self.now_s, _, number, at = heapq.heappop(due)
                run = runs.runs[number]
                if (number, at) in others:
                    for execution in others.pop((number, at)):
                        report("ended", number, at, execution)
                    follow(number, at)
                    continue
                if (number, at) not in calls:
                    step = run.record.steps[at]
                    others[number, at] = range(reports + 1, reports + 1 + step.parallelism)
                    reports += step.parallelism
                    for execution in others[number, at]:
                        report("began", number, at, execution)
                    heapq.heappush(due, (self.now_s + step.duration_s, pushed, number, at))
                    pushed += 1
                    continue
                open_calls[number, at] = len(calls[number, at])
                for row in calls[number, at]:
                    step_of[row] = number, at
                    self.arrive(
                        row, "m", fleet.regions[requests.region[row]], int(requests.prompt_tokens[row]),
                        int(requests.predicted_tokens[row]), int(requests.output_tokens[row]),
                        *self.promised(requests, row), None, tenant=int(requests.tenant[row]),
                        application=self.name_of(run), run=str(number), unit=run.record.steps[at].unit,
                        run_due_s=run.due_in_s,
                        adapter=f"a{requests.adapter[row]}" if requests.adapter[row] >= 0 else "",
                    )  # fmt: skip
                continue
            self.now_s = event_s
            self.work(slot)
            for row in ended:
                number, at = step_of[row]
                open_calls[number, at] -= 1
                if not open_calls[number, at]:
                    follow(number, at)
            ended.clear()


ORDERS = ("application", "srpt", "hermes", "run_deadline", "run_slack", "vtc", "wfq", "qlm by hermes", "qlm by arrival")
CLASSES = ((0, 3.0, NEVER), (1, NEVER, 30.0), (2, NEVER, NEVER))
"""Priority, promised first token and promised end, by tenant, where requests are in groups."""


@pytest.mark.parametrize("ordering", at_night_but(["hermes", "run_slack", "vtc", "qlm by hermes"], ORDERS))
async def test_both_clocks_serve_runs_alike(ordering):
    ordering, _, within = ordering.partition(" by ")
    random = np.random.default_rng([7, len(ordering)])
    fleet = simulated_fleet(random, "join_shortest_queue", ordering)
    fleet.policies = msgspec.structs.replace(fleet.policies, group_order=within or "arrival", group_batches=1.0)
    applications, graphs = [], []
    for number, (loops, recorded) in enumerate(((0, 40), (6, 3))):
        graph = DemandGraph(f"a{number}", UNITS, [drawn_record(random, loops) for _ in range(recorded)])
        graphs.append(KnownGraph.of(graph, RATES))
        applications.append(ApplicationToCome(graph.application, UNITS, graphs[-1]))
    began_s = np.cumsum(random.exponential(0.15, RUNS))
    late_last = ordering in ("run_deadline", "run_slack")
    runs = RunsToCome(
        applications,
        reading=Reading(late_last=late_last),
        runs=[
            RunToCome(
                kind := int(random.integers(0, 2)),
                float(began),
                float(random.integers(5, 60)),
                drawn_record(random, 6 * kind),
            )
            for began in began_s
        ],
    )
    run_of, arrival_s, prompt, output = rows_of(runs)
    region, tenant = random.integers(0, 3, RUNS)[run_of], random.integers(0, 3, RUNS)[run_of]
    predicted = np.clip(output + random.integers(-15, 15, output.size), 1, None)
    classes = CLASSES if within else [(0, NEVER, NEVER)] * 3
    priority, due_s, end_s = (np.array(column)[tenant] for column in zip(*classes, strict=True))
    requests = make_requests(
        arrival_s, prompt, output, predicted_tokens=predicted, region=region, tenant=tenant, run=run_of,
        priority=priority, deadline_s=due_s, end_s=end_s,
    )  # fmt: skip

    fleet.tenant_weights = WEIGHTS
    live = RunsLive(fleet)
    live.weigh(WEIGHTS)
    live.topology.tuned = live.topology.tuned.model_copy(update={"LATE_RUNS_LAST": late_last})
    live.dispatcher.runs.graphs.update(
        {(1 + who, each.name): graph for who in range(3) for each, graph in zip(applications, graphs, strict=True)}
    )
    live.serve(fleet, requests, runs)
    result = Simulation(fleet, requests, decisions=True, runs=runs).run()
    live_decisions = assert_alike(live, result)
    assert len(live_decisions) == requests.count
    assert np.isfinite(result.runs.ended_s).all()
    assert (result.outcomes["queue_s"] > 0).sum() >= 20, "or order would hardly matter"
    if ordering == "hermes":
        traces = [placed.why.run for placed in live.placed.values()]
        assert all(each.rank_s > 0 for each in traces)
        assert any(each.attained_s > 0 for each in traces)
