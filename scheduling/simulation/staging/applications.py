"""Application runs of a scenario: when they begin, what each does, and what a dispatcher knows of its application."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.prewarming import HERMES
from scheduling.applications.remaining import FEWEST_MATCHES
from scheduling.applications.standings import KnownGraph, Reading, follows_runs, most_learned
from scheduling.applications.suite import SUITE, mixed
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED, ApplicationOf, demand_graph
from scheduling.simulation.scenario.toml_lines import ScenarioProblem
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.edits import merged
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome, alone_s
from scheduling.simulation.workload.traces import TraceError, load_trace

SPREAD: Final = 0.25
"""Standard deviation of the logarithm of outputs among the parallel requests of a step, around the step's mean."""
RUNS_SEED, CALLS_SEED, LEARNED_SEED, PROMPTS_SEED = 41, 42, 43, 44
USUAL_CALLS: Final = 64
"""Draws by which the calls of a run are estimated."""


class RunCalls(NamedTuple):
    """The application runs of a scenario with their calls, in the order of runs and steps."""

    calls: Workload
    run: NDArray[np.int32]
    """By call: its run."""
    runs: RunsToCome
    clipped: int
    """Calls that were shortened to their model's context."""


class _Source(NamedTuple):
    """Where the runs of an application come from."""

    suite: str
    graph: DemandGraph | None

    def backends(self, table: ApplicationOf) -> dict[str, Backend]:
        """Return the units, those that are LLMs with the model of *table* that serves them."""
        if self.graph is None:
            return SUITE[self.suite].backends(table.model)
        return {
            unit: msgspec.structs.replace(each, name=table.models.get(unit, table.model))
            if each.kind == "llm"
            else each
            for unit, each in self.graph.units.items()
        }

    def run(self, random: np.random.Generator) -> RunRecord:
        if self.graph is None:
            return SUITE[self.suite].run(random)
        records = self._parts()[0]
        return records[int(random.integers(len(records)))]

    def prompt_tokens(self, unit: str) -> int:
        """Return the length of the system prompt of *unit*, 0 if it is not known."""
        return SUITE[self.suite].prompts.get(unit, 0) if self.graph is None else 0

    def learned(self, count: int) -> list[RunRecord]:
        """Return up to *count* other runs than those of `run`."""
        if self.graph is not None:
            return self._parts()[1][-count:]
        return _suite_records(self.suite, count)

    def _parts(self) -> tuple[list[RunRecord], list[RunRecord]]:
        """Return the records to run again and those to learn from: every other one, or all where there are few."""
        assert self.graph is not None
        records = self.graph.records
        return (records[::2], records[1::2]) if len(records) >= 2 * FEWEST_MATCHES else (records, records)


@lru_cache(maxsize=64)
def _suite_records(name: str, count: int) -> list[RunRecord]:
    """Return runs of a separate seed, which are the same in every simulation."""
    random = np.random.default_rng([LEARNED_SEED, zlib.crc32(name.encode())])

    def with_longest(step: Step) -> Step:
        if step.parallelism == 1 or not step.output_tokens:
            return step
        return msgspec.structs.replace(step, longest=step.output_tokens * _spread(step.parallelism, random).max())

    runs = [SUITE[name].run(random) for _ in range(count)]
    return [RunRecord(tuple(map(with_longest, run.steps))) for run in runs]


@lru_cache(maxsize=4)
def _arrivals(file: Path, trace_format: str, unit: str, seed: int, changed_ns: int) -> NDArray[np.float64]:
    """Return the arrivals of a trace, which is read again once it has changed."""
    return load_trace(file, trace_format, seed=seed if trace_format == "servegen" else 0, unit=unit).arrival_s


def _clipped(
    record: RunRecord, units: Mapping[str, Backend], longest: Mapping[str, float]
) -> tuple[RunRecord, dict[str, int]]:
    """Return *record* with calls cut to the *longest* of their models, the prompt first, and the number cut by model."""
    cut, steps = dict[str, int](), list[Step]()
    for step in record.steps:
        if (unit := units[step.unit]).kind == "llm":
            most = longest.get(unit.name, inf)
            output = min(max(1.0, step.output_tokens), most - 1.0)
            prompt = min(max(1.0, step.input_tokens), most - output)
            if step.input_tokens + step.output_tokens > most:
                cut[unit.name] = cut.get(unit.name, 0) + step.parallelism
            last = min(step.longest, most - prompt)
            step = msgspec.structs.replace(step, input_tokens=prompt, output_tokens=output, longest=last)  # noqa: PLW2901
        steps.append(step)
    return RunRecord(tuple(steps)), cut


class Served(NamedTuple):
    """A model that serves units."""

    model: str
    longest_tokens: int
    rate: ServiceRate


def known_graph(
    name: str,
    units: dict[str, Backend],
    records: Sequence[RunRecord],
    served: Sequence[Served],
    known: str,
    by: str = "learned",
) -> KnownGraph:
    """Return what is known of an application from *records*, whose units the models *served* serve."""
    longest: dict[str, float] = {each.model: each.longest_tokens for each in served}
    graph = DemandGraph(name, units, [_clipped(each, units, longest)[0] for each in records])
    of_model = {each.model: each.rate for each in served}
    rates = {unit: of_model.get(each.name if each.kind == "llm" else "", ServiceRate()) for unit, each in units.items()}
    return KnownGraph.of(graph, rates, refined=known == "graph", whole=known == "whole", by=by)


@lru_cache(maxsize=64)
def _suite_graph(name: str, served: Served, count: int, known: str, by: str) -> KnownGraph:
    return known_graph(name, SUITE[name].backends(served.model), _suite_records(name, count), [served], known, by)


def runs_of(scenario: Scenario, cluster: Cluster, folder: Path, seed: int) -> RunCalls:
    """Return the application runs of *scenario*; files are in *folder*.

    Raises ScenarioProblem, and TraceError for an invalid trace of arrivals.
    """
    return _Drawing(scenario, cluster, folder, seed).drawn()


def joined(
    workload: Workload, run: NDArray[np.int32], recorded: RunsToCome | None, drawn: RunCalls
) -> tuple[Workload, NDArray[np.int32], RunsToCome]:
    """Return the requests of both in order of arrival, the run of each, -1 for none, and the runs: first *recorded*."""
    try:
        both = merged(workload, drawn.calls)
    except ValueError as error:
        raise ScenarioProblem(("applications",), f"{error} Give no prompts with this trace.") from error
    order = np.argsort(both.arrival_s, kind="stable")
    first, known = ((), ()) if recorded is None else (recorded.runs, recorded.applications)
    runs = [*first, *(each._replace(application=each.application + len(known)) for each in drawn.runs.runs)]
    to_come = replace(drawn.runs, applications=[*known, *drawn.runs.applications], runs=runs)
    own = np.where(drawn.run >= 0, drawn.run + len(first), -1)
    return both.select(order), np.concatenate([run, own])[order].astype(np.int32), to_come


def graphs_wanted(scenario: Scenario, cluster: Cluster) -> bool:
    """Return whether an order or prewarming asks what is known of applications."""
    warms = cluster.prewarming == HERMES and (
        bool(cluster.backends)
        or any(one.adapters for one in scenario.models.values())
        or any(one.prompts for one in scenario.applications)
        or any(spec.sharing or spec.state == State.ASLEEP for spec in cluster.instances)
    )
    return warms or any(follows_runs(cluster.policy(key)) for key in cluster.endpoints)


def expected_calls(scenario: Scenario) -> float:
    """Return the expected requests of the scenario's runs; of graphs in files nothing is known."""
    total = 0.0
    for table in scenario.applications:
        if isinstance(table.graph, str):
            continue
        names = mixed(USUAL_CALLS, np.random.default_rng(0)) if table.suite == MIXED else [table.suite] * USUAL_CALLS
        graph = None if table.graph is None else demand_graph(msgspec.json.encode(table.graph))
        random, calls = np.random.default_rng(0), 0
        for name in names:
            source = _Source(name or "", graph)
            units = source.backends(table)
            calls += sum(step.parallelism for step in source.run(random).steps if units[step.unit].kind == "llm")
        total += _expected_runs(scenario, table) * calls / USUAL_CALLS
    return total


def _window_s(scenario: Scenario, table: ApplicationOf) -> float:
    given = (table.window_h, scenario.demand.duration_h, scenario.until_h)
    return 3600 * next((hours for hours in given if hours is not None), 0.0)


def _expected_runs(scenario: Scenario, table: ApplicationOf) -> float:
    return (
        float(table.runs) if table.runs is not None else (table.runs_per_h or 0.0) * _window_s(scenario, table) / 3600
    )


class _Drawing:
    def __init__(self, scenario: Scenario, cluster: Cluster, folder: Path, seed: int) -> None:
        self.scenario, self.cluster, self.folder, self.seed = scenario, cluster, folder, seed
        self.longest = dict(zip(cluster.models, cluster.longest_tokens(), strict=True))
        self.applications: list[ApplicationToCome] = []
        self.numbers: dict[str, tuple[int, _Source, dict[str, Backend]]] = {}
        """By name: number, source and units of an application."""
        self.clipped = 0

    def drawn(self) -> RunCalls:
        runs: list[tuple[RunToCome, int, int, str]] = []
        """With the number of the table, the region and the tenant."""
        for number, table in enumerate(self.scenario.applications):
            random = np.random.default_rng([self.seed, RUNS_SEED, number])
            began_s = self._began_s(number, table, random)
            source = self._source(number, table)
            names = mixed(began_s.size, random) if table.suite == MIXED else []
            versions = np.random.default_rng([self.seed, PROMPTS_SEED, number]).integers(
                table.prompts or 1, size=began_s.size
            )
            shares = np.array([table.regions.get(name, 0.0) for name in self.scenario.regions])
            shares = shares if shares.any() else np.ones(shares.size)
            regions = random.choice(shares.size, began_s.size, p=shares / shares.sum())
            for at, moment_s in enumerate(began_s.tolist()):
                of_run = _Source(names[at], None) if names else source
                name = names[at] if names else table.name or table.suite or (source.graph and source.graph.application)
                application = self._application(number, str(name), of_run, table)
                record = of_run.run(random)
                record = self._fitted(record, number, application)
                due_in_s = self._due_in_s(record, application, table, random)
                tenant = table.tenant if table.tenants == 1 else f"{table.tenant} {at % table.tenants + 1}"
                run = RunToCome(application, moment_s, due_in_s, record, int(versions[at]))
                runs.append((run, number, int(regions[at]), tenant))
        if not runs:
            raise ScenarioProblem(("applications",), "no run begins within its window")
        runs.sort(key=lambda each: each[0].began_s)
        predictions = self.scenario.predictions
        to_come = RunsToCome(
            self.applications,
            [each[0] for each in runs],
            exact=predictions.runs == "exact",
            reading=Reading(predictions.buckets, predictions.worst, self.scenario.policies.late_runs_last),
        )
        return self._calls(runs, to_come)

    def _source(self, number: int, table: ApplicationOf) -> _Source:
        if table.graph is None:
            return _Source(table.suite or "", None)
        try:
            if isinstance(table.graph, dict):
                return _Source("", demand_graph(msgspec.json.encode(table.graph)))
            return _Source("", demand_graph((self.folder / table.graph).read_bytes()))
        except OSError as error:
            raise ScenarioProblem(("applications", number, "graph"), f"{table.graph}: {error.strerror}") from error
        except ValueError as error:
            raise ScenarioProblem(("applications", number, "graph"), str(error)) from error

    def _began_s(self, number: int, table: ApplicationOf, random: np.random.Generator) -> NDArray[np.float64]:
        """Return when runs begin."""
        from_s, window_s = 3600 * table.from_h, _window_s(self.scenario, table)
        count = round(_expected_runs(self.scenario, table))
        if table.arrivals is not None:
            file = self.folder / table.arrivals.file
            try:
                changed_ns = file.stat().st_mtime_ns if file.exists() else 0
                trace_s = _arrivals(file, table.arrivals.format, table.arrivals.unit, self.seed, changed_ns)
            except TraceError as error:
                if error.line == 0 and not file.exists():
                    raise ScenarioProblem(("applications", number, "arrivals", "file"), str(error)) from error
                raise
            first = int(random.integers(max(1, trace_s.size - count + 1)))
            chosen = trace_s[first : first + count]
            if count > trace_s.size:
                chosen = np.sort(random.choice(trace_s, count))
            span_s = float(chosen[-1] - chosen[0]) or 1.0
            return np.asarray(from_s + window_s * (chosen - chosen[0]) / span_s * (1 - 1e-9))

        def gaps(size: int) -> NDArray[np.float64]:
            return random.gamma(1 / table.cv**2, table.cv**2, size)

        if table.runs is not None:
            moments = np.cumsum(gaps(count + 1))
            return np.asarray(from_s + window_s * moments[:-1] / moments[-1])
        assert table.runs_per_h is not None
        mean_s, moments = 3600 / table.runs_per_h, np.zeros(0)
        while not moments.size or moments[-1] < window_s:
            more = np.cumsum(gaps(count + 10)) * mean_s
            moments = np.concatenate([moments, more + (moments[-1] if moments.size else 0.0)])
        return np.asarray(from_s + moments[moments < window_s])

    def _application(self, number: int, name: str, source: _Source, table: ApplicationOf) -> int:
        """Return the number of the application *name*. Raise ScenarioProblem if another one has that name."""
        if (known := self.numbers.get(name)) is not None:
            if known[1:] != (source, source.backends(table)):
                raise ScenarioProblem(("applications", number), f"another application has the name {name!r}: give name")
            return known[0]
        units = source.backends(table)
        self.numbers[name] = len(self.applications), source, units
        self.applications.append(ApplicationToCome(name, units, self._known(name, source, units, table)))
        return len(self.applications) - 1

    def _known(self, name: str, source: _Source, units: dict[str, Backend], table: ApplicationOf) -> KnownGraph | None:
        """Return what a dispatcher knows of an application; None for nothing, or where no order or prewarming asks."""
        predictions = self.scenario.predictions
        if predictions.runs in ("exact", "none") or not graphs_wanted(self.scenario, self.cluster):
            return None
        by = most_learned(self.cluster.policy(key).run_demand for key in self.cluster.endpoints)
        served = [
            Served(model, self.longest[model], ServiceRate.of(self._profile(model)))
            for model in dict.fromkeys([table.model, *table.models.values()])
        ]
        if source.graph is None:
            return _suite_graph(source.suite, served[0], predictions.recorded_runs, predictions.runs, by)
        return known_graph(name, units, source.learned(predictions.recorded_runs), served, predictions.runs, by)

    def _profile(self, model: str) -> Any:
        return self.cluster.reference_profile(next(key for key in self.cluster.endpoints if key[0] == model))

    def _fitted(self, record: RunRecord, number: int, application: int) -> RunRecord:
        """Return *record* with calls that fit their models' contexts. Raise ScenarioProblem if they must not be cut."""
        units = self.applications[application].units
        fitted, cut = _clipped(record, units, self.longest)
        if cut and self.scenario.demand.too_long == "refuse":
            model = next(iter(cut))
            mine = (step for step in record.steps if units[step.unit].kind == "llm" and units[step.unit].name == model)
            longest = max(step.input_tokens + step.output_tokens for step in mine)
            what = f"a call has {longest:,.0f} tokens, {model} takes {self.longest[model]}: set demand.too_long to clip"
            raise ScenarioProblem(("applications", number), what)
        self.clipped += sum(cut.values())
        return fitted

    def _due_in_s(
        self, record: RunRecord, application: int, table: ApplicationOf, random: np.random.Generator
    ) -> float:
        if table.deadline_factor is None:
            return table.deadline_s or inf
        factor = float(random.choice(table.deadline_factor))
        return factor * alone_s(record, self.applications[application].units, self._instance)

    def _instance(self, model: str) -> tuple[Profile, int]:
        """Return the profile and the KV tokens of the first instance of *model*."""
        engine = next(spec.engine for spec in self.cluster.instances if spec.model == model)
        return engine.profile, engine.kv_blocks * engine.block_size_tokens

    def _calls(self, runs: Sequence[tuple[RunToCome, int, int, str]], to_come: RunsToCome) -> RunCalls:
        random = np.random.default_rng([self.seed, CALLS_SEED])
        rows: list[tuple[float, int, int, int]] = []
        prefixes: list[list[int]] = []
        block = max((group.block_size_tokens for group in self.scenario.fleet if group.prefix_caching), default=0)
        whose: list[tuple[str, str, str]] = []
        regions: list[int] = []
        for number, (run, at_table, region, tenant) in enumerate(runs):
            table = self.scenario.applications[at_table]
            units = self.applications[run.application].units
            _, source, _ = self.numbers[self.applications[run.application].name]
            for step in run.record.steps:
                if units[step.unit].kind != "llm":
                    continue
                model = units[step.unit].name
                most = self.longest[model]
                outputs = step.output_tokens * _spread(step.parallelism, random)
                for output in np.clip(np.rint(outputs), 1, most - 1).astype(int).tolist():
                    prompt = min(max(1, round(step.input_tokens)), most - output)
                    rows.append((run.began_s, prompt, output, number))
                    shared = min(prompt, source.prompt_tokens(step.unit)) // block if block and table.prompts else 0
                    content = zlib.crc32(f"{units[step.unit].prompt}, {run.prompts}".encode()) << 20
                    prefixes.append([content + at for at in range(shared)])
                    whose.append((model, table.slo_class, tenant))
                    regions.append(region)
        if not rows:
            raise ScenarioProblem(("applications",), "has runs without any LLM call")
        began_s, prompts, outputs_of, run_of = (np.array(each) for each in zip(*rows, strict=True))
        models, classes, tenants = (Coded.of(each) for each in zip(*whose, strict=True))
        calls = Workload(
            arrival_s=began_s.astype(np.float64),
            prompt_tokens=prompts.astype(np.int32),
            output_tokens=outputs_of.astype(np.int32),
            model=models,
            region=Coded(np.array(regions, np.int32), list(self.scenario.regions)),
            slo_class=classes,
            tenant=tenants,
            prefix_first=np.cumsum([0, *map(len, prefixes)], dtype=np.int64) if any(prefixes) else None,
            prefix_hashes=np.array(list(chain(*prefixes)), np.int64) if any(prefixes) else None,
            prefix_block_tokens=block if any(prefixes) else 0,
        )
        return RunCalls(calls, run_of.astype(np.int32), to_come, self.clipped)


def _spread(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return *count* factors with a mean of 1."""
    if count == 1:
        return np.ones(1)
    factors = np.exp(SPREAD * random.standard_normal(count))
    return np.asarray(factors / factors.mean())
