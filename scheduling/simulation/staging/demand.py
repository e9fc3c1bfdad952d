"""Demand of a scenario: the requests of its trace or clients, within the models' contexts."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np

from scheduling.routing.models import targets
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.demand import ClientOf, LengthsOf, TraceOf
from scheduling.simulation.scenario.toml_lines import ScenarioProblem
from scheduling.simulation.workload.columns import NO_REQUESTS, Coded, Workload
from scheduling.simulation.workload.generator import (
    Burst,
    Client,
    EmpiricalLengths,
    LengthsByClass,
    Lognormal,
    generate,
    random_bursts,
)
from scheduling.simulation.workload.traces import TraceError, load_trace

PAST_SEED = 1_000_003
"""Added to a seed for the demand before the start."""
NO_LIMIT = np.iinfo(np.int64).max


def demand_of(
    scenario: Scenario, cluster: Cluster, folder: Path, seed: int, given: Workload | None = None
) -> tuple[Workload, int]:
    """Return the requests to *cluster* and the number of clipped ones: *given*, else of the trace or the clients; files are
    in *folder*.

    Raises ScenarioProblem, and TraceError for an invalid trace.
    """
    table = "trace" if scenario.trace else "clients"
    if given is not None:
        workload = of_the_fleet(scenario, given)
    elif scenario.trace is None and not scenario.clients:
        return NO_REQUESTS, 0  # only applications
    else:
        workload = _from_trace(scenario, folder, seed) if scenario.trace else _synthetic(scenario, folder, seed)
    if not len(workload) and not scenario.applications:
        raise ScenarioProblem((table,), "gives no requests")
    return _fit_context(scenario, cluster, _without_output(cluster, _shared(scenario, workload, seed)), table)


def _shared(scenario: Scenario, workload: Workload, seed: int) -> Workload:
    """Return *workload* with requests for public names drawn among their weighted targets, unless they are already."""
    asked, models = workload.model, list(scenario.models)
    if workload.asked is not None or not scenario.weighted_targets.keys() & set(asked.names):
        return workload
    codes = np.array([models.index(name) if name in models else -1 for name in asked.names], np.int32)[asked.codes]
    for number, (name, weights) in enumerate(scenario.weighted_targets.items()):
        if name not in asked.names:
            continue
        rows = np.flatnonzero(asked.codes == asked.names.index(name))
        served = [model for model, weight in weights.items() if weight]
        draws = 1.0 - np.random.default_rng([seed, 6, number]).random((rows.size, len(served)))
        chosen = targets(np.array([weights[model] for model in served]), draws)
        codes[rows] = np.array([models.index(model) for model in served], np.int32)[chosen]
    public = np.array([name in scenario.weighted_targets for name in asked.names], bool)[asked.codes]
    named = Coded(np.where(public, asked.codes, len(asked.names)).astype(np.int32), [*asked.names, ""])
    return replace(workload, model=Coded(codes, models), asked=named)


def _without_output(cluster: Cluster, workload: Workload) -> Workload:
    """Return *workload* with one token of output for each request to a model that pools, which ends its prefill.

    Of other models, requests without output are left out: they failed in the original system.
    """
    if not cluster.pooling:
        return workload
    pooled = np.array([name in cluster.pooling for name in workload.model.names], bool)[workload.model.codes]
    kept = pooled | (workload.output_tokens > 0)
    predicted = workload.predicted_tokens
    whole = replace(
        workload,
        output_tokens=np.where(pooled, 1, workload.output_tokens).astype(np.int32),
        predicted_tokens=None if predicted is None else np.where(pooled, 1, predicted).astype(np.int32),
        left_out=workload.left_out + int(np.count_nonzero(~kept)),
    )
    return whole if kept.all() else whole.select(kept)


def of_the_fleet(scenario: Scenario, workload: Workload) -> Workload:
    """Return *workload* without requests of a model, region or class that *scenario* lacks; they count as left out."""
    model, region = _known(workload.model, scenario.names), _known(workload.region, scenario.regions)
    slo_class = _known(workload.slo_class, scenario.classes)
    kept = (model.codes >= 0) & (region.codes >= 0) & (slo_class.codes >= 0)
    left_out = workload.left_out + int(np.count_nonzero(~kept))
    return replace(workload, model=model, region=region, slo_class=slo_class, left_out=left_out).select(kept)


def _known(column: Coded, names: Collection[str]) -> Coded:
    """Return *column* with only those of its names that are in *names*; the others have the code -1."""
    if all(name in names for name in column.names):
        return column
    known = [name for name in column.names if name in names]
    numbers = np.array([known.index(name) if name in names else -1 for name in column.names], np.int32)
    return Coded(numbers[column.codes], known)


def _synthetic(scenario: Scenario, folder: Path, seed: int) -> Workload:
    duration_s = 3600 * (scenario.demand.duration_h or 0.0)
    bursts = [
        Burst(3600 * burst.start_h, 60 * burst.duration_min, burst.factor, frozenset(burst.models))
        for burst in scenario.bursts
    ]
    if (more := scenario.demand.random_bursts) is not None:
        bursts += random_bursts(
            duration_s,
            more.count,
            60 * more.duration_min,
            factor=more.factor,
            models=frozenset(more.models),
            seed=seed,
        )
    shifts_h = {name: region.peak_shift_h for name, region in scenario.regions.items()}
    clients = [_client(scenario, one, folder, seed) for one in scenario.clients]
    return generate(clients, duration_s, shifts_h=shifts_h, bursts=bursts, seed=seed)


def _client(scenario: Scenario, one: ClientOf, folder: Path, seed: int) -> Client:
    if one.lengths is None:
        return client_of(one, list(scenario.regions))
    pooled = scenario.task_of(one.model).pools
    of = one.lengths
    trace = load_trace(folder / of.file, of.format, seed=seed, without_output=pooled, unit=of.unit)
    return client_of(one, list(scenario.regions), EmpiricalLengths(trace.prompt_tokens, trace.output_tokens))


def client_of(one: ClientOf, regions: Sequence[str], lengths: EmpiricalLengths | None = None) -> Client:
    """Return the client of *one*, alike in all of *regions* if it names none; *lengths* are those of its trace."""
    given: EmpiricalLengths | LengthsByClass | None = lengths
    if given is None:
        assert one.prompt is not None
        # A model that pools has no output: one token ends the prefill.
        output = Lognormal(1.0, 1.0, 1, 1) if one.output is None else _lognormal(one.output)
        given = LengthsByClass(_lognormal(one.prompt), output)
    return Client(
        one.tenant,
        one.model,
        one.slo_class,
        one.requests_per_s,
        given,
        regions=one.regions or dict.fromkeys(regions, 1.0),
        gaps=one.gaps,
        cv=one.cv,
        daily_swing=one.daily_swing,
        peak_h=one.peak_h,
        weekend=one.weekend,
    )


def _lognormal(lengths: LengthsOf) -> Lognormal:
    return Lognormal(lengths.median, lengths.p95, lengths.minimum, lengths.maximum)


def _from_trace(scenario: Scenario, folder: Path, seed: int) -> Workload:
    trace = scenario.trace
    assert trace is not None
    try:
        workload = load_trace(
            folder / trace.file,
            trace.format,
            seed=seed,
            limit=trace.limit,
            without_output=bool(scenario.pooling),
            unit=trace.unit,
        )
    except TraceError as error:
        if error.line == 0 and not (folder / trace.file).exists():
            raise ScenarioProblem(("trace", "file"), str(error)) from error
        raise
    return named_workload(scenario, trace, workload)


def named_workload(scenario: Scenario, trace: TraceOf, workload: Workload) -> Workload:
    """Return *workload*, read as *trace*, with the scenario's names. Raise ScenarioProblem for unknown names."""
    served = list(dict.fromkeys([*(group.model for group in scenario.fleet), *scenario.weighted_targets]))
    regions, classes = list(scenario.regions), list(scenario.classes)
    return replace(
        workload,
        arrival_s=workload.arrival_s / trace.speed if trace.speed != 1 else workload.arrival_s,
        calls=workload.calls and workload.calls._replace(took_s=workload.calls.took_s / trace.speed),
        model=_named(workload.model, served, trace.models, trace.model, "model"),
        region=_named(workload.region, regions, {}, trace.region or regions[0], "region"),
        slo_class=_named(workload.slo_class, classes, {}, trace.slo_class or classes[0], "slo_class"),
        tenant=workload.tenant._replace(names=[name or trace.tenant for name in workload.tenant.names]),
    )


def _named(column: Coded, names: Sequence[str], given: dict[str, str], default: str | None, kind: str) -> Coded:
    """Return *column* with the scenario's names for the trace's: its own, *given*, the *default*, or the only one."""
    if default is None and len(names) == 1:
        default = names[0]
    ours = []
    for theirs in column.names:
        name = given.get(theirs) or (theirs if theirs in names else default)
        if name is None:
            what = f"the trace's {kind} {theirs!r}" if theirs else f"a {kind}, which the trace does not name,"
            raise ScenarioProblem(("trace", kind), f"is missing: {what} is none of {', '.join(names)}")
        if name not in names:
            raise ScenarioProblem(("trace", kind), f"no instance of the fleet serves {name}")
        ours.append(name)
    return column._replace(names=ours)


def past_of(scenario: Scenario, cluster: Cluster, folder: Path, seed: int) -> Workload:
    """Return the clients' demand in the whole weeks before, at least `history_days`: other draws, without bursts."""
    weeks = ceil(scenario.forecast.history_days / 7)
    quiet = scenario.model_copy(
        update={
            "demand": scenario.demand.model_copy(update={"duration_h": 168.0 * weeks, "random_bursts": None}),
            "bursts": [],
        }
    )
    past_seed = seed + PAST_SEED
    workload = _without_output(cluster, _shared(quiet, _synthetic(quiet, folder, past_seed), past_seed))
    return _fit_context(quiet, cluster, workload, "clients")[0]


def _fit_context(scenario: Scenario, cluster: Cluster, workload: Workload, table: str) -> tuple[Workload, int]:
    """Return the workload, with no request longer than its model's context or KV cache, and the number of clipped ones."""
    if not len(workload):
        return workload, 0
    limit = dict(zip(cluster.models, cluster.longest_tokens(), strict=True))
    # A model without an instance is refused later.
    limits = np.array([limit[name] or NO_LIMIT for name in workload.model.names])[workload.model.codes]
    long = workload.prompt_tokens.astype(np.int64) + workload.output_tokens > limits
    count = int(np.count_nonzero(long))
    if not count:
        return workload, 0
    if scenario.demand.too_long == "drop":
        return replace(workload.select(~long), left_out=workload.left_out + count), 0
    at = int(np.argmax(long))
    name = workload.model.names[workload.model.codes[at]]
    tokens = int(workload.prompt_tokens[at]) + int(workload.output_tokens[at])
    if scenario.demand.too_long == "refuse":
        more = f", and {count - 1} more are too long" if count > 1 else ""
        what = f"request {at} has {tokens} tokens, {name} takes {limit[name]}{more}: set demand.too_long"
        raise ScenarioProblem((table,), f"{what} to clip or drop, or lower the lengths' maximum")
    # The prompt goes first: at least one token stays for each.
    outputs = np.minimum(workload.output_tokens, limits - 1).astype(np.int32)
    prompts = np.minimum(workload.prompt_tokens, limits - outputs).astype(np.int32)
    return replace(workload, prompt_tokens=prompts, output_tokens=outputs), count
