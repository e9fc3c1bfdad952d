"""From a scenario to a simulation: the fleet and its policies as a cluster, the demand as requests."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.queueing.ordering import due_s
from scheduling.routing.regions import latency_ms
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.description import Batching, Cluster, Delays, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.measures.results import Names, Price, Promise
from scheduling.simulation.scenario import ClientOf, Group, LengthsOf, Scenario, SloClassOf
from scheduling.simulation.toml_lines import Key, ScenarioError, wrong_at
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.generator import (
    Burst,
    Client,
    EmpiricalLengths,
    LengthsByClass,
    Lognormal,
    generate,
    random_bursts,
)
from scheduling.simulation.workload.requests import Requests, make_requests
from scheduling.simulation.workload.traces import TraceError, load_trace


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a simulation of a scenario takes, and what its measures are named by."""

    cluster: Cluster
    requests: Requests
    names: Names
    promises: tuple[Promise, ...]
    prices: dict[str, Price]
    left_out: int
    """Requests of the trace that are not simulated: without a prompt or an output, or too long and dropped."""
    clipped: int
    """Requests shortened to their model's context."""


def stage(scenario: Scenario, path: Path, seed: int | None = None) -> Stage:
    """Make *scenario*, read from *path*, ready to run with *seed* (its own if None).

    Raises ScenarioError, and TraceError when a trace cannot be read.
    """
    seed = scenario.seed if seed is None else seed

    def wrong(key: Key, what: str) -> ScenarioError:
        return wrong_at(path, path.read_text(encoding="utf-8"), key, what)

    try:
        cluster = _cluster(scenario)
    except _Misfit as misfit:
        raise wrong(misfit.key, str(misfit)) from misfit
    except ValueError as error:
        raise ScenarioError(path, 0, "", str(error)) from error
    try:
        workload = (
            _from_trace(scenario, path.parent, seed) if scenario.trace else _synthetic(scenario, path.parent, seed)
        )
    except _Misfit as misfit:
        raise wrong(misfit.key, str(misfit)) from misfit
    if not len(workload):
        raise wrong(("trace",) if scenario.trace else ("clients",), "gives no requests")
    before = workload.left_out
    workload, clipped, too_long = _fit_context(scenario, workload)
    if too_long is not None:
        raise wrong(("trace",) if scenario.trace else ("clients",), too_long)
    try:
        requests = _requests(scenario, cluster, workload, seed)
    except _Misfit as misfit:
        raise wrong(misfit.key, str(misfit)) from misfit
    promises = tuple(_promise(one) for one in scenario.classes.values())
    names = Names(cluster.models, cluster.regions, list(scenario.classes), workload.tenant.names)
    return Stage(cluster, requests, names, promises, _prices(scenario), max(before, workload.left_out), clipped)


class _Misfit(ValueError):
    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key


def _promise(one: SloClassOf) -> Promise:
    ttft_s, itl_s, e2e_s = (inf if ms is None else ms / 1000 for ms in (one.ttft_ms, one.itl_ms, one.e2e_ms))
    return Promise(ttft_s, itl_s, e2e_s, inf if one.deadline_s is None else one.deadline_s)


def instance_gpu(group: Group) -> str:
    """The GPUs of one instance as one type, such as `4 x h100-80gb`: what its hours and dollars are counted by."""
    return group.gpu if group.tensor_parallel == 1 else f"{group.tensor_parallel} x {group.gpu}"


def _prices(scenario: Scenario) -> dict[str, Price]:
    prices = {}
    for group in scenario.fleet:
        gpu = scenario.gpus[group.gpu]
        count = group.tensor_parallel
        prices[instance_gpu(group)] = Price(gpu.usd_per_hour * count, gpu.spot_usd_per_hour * count)
    return prices


def _cluster(scenario: Scenario) -> Cluster:
    regions = list(scenario.regions)
    profiles = {}
    for number, one in enumerate(scenario.profiles):
        try:
            profiles[one.model, one.gpu, one.tensor_parallel] = Profile(
                one.prefill.t0_s,
                one.prefill.a_s,
                one.prefill.b_s_per_token,
                one.prefill.c_s_per_token2,
                one.decode.a_s,
                one.decode.b_s_per_sequence,
                one.decode.c_s_per_token,
            )
        except ValueError as error:
            raise _Misfit(("profiles", number), str(error)) from error
    instances: list[InstanceSpec] = []
    for group in scenario.fleet:
        engine = EngineConfig(
            max_num_seqs=group.max_num_seqs,
            max_num_batched_tokens=group.max_num_batched_tokens,
            block_size_tokens=group.block_size_tokens,
            kv_blocks=group.kv_tokens // group.block_size_tokens,
            policy=group.queue,
            max_model_len=scenario.models[group.model].context_tokens,
            profile=profiles[group.model, group.gpu, group.tensor_parallel],
            prefix_caching=group.prefix_caching,
        )
        states = [State.READY] * group.instances + [State.SPOT] * group.spot + [State.EMPTY] * group.empty
        for region in group.regions:
            instances += [
                InstanceSpec(
                    group.model, region, engine, instance_gpu(group), f"{group.model}-{region}-{number}", state
                )
                for number, state in enumerate(states, 1)
            ]
    policies = scenario.policies
    unknown = set(scenario.delays) - {each.name for each in fields(Delays)}
    if unknown:
        known = ", ".join(each.name for each in fields(Delays))
        raise _Misfit(("delays", min(unknown)), f"is no delay; there is {known}")
    try:
        delays = Delays(**scenario.delays)  # type: ignore[arg-type]  # counts among them are checked by use
    except ValueError as error:
        raise _Misfit(("delays",), str(error)) from error
    try:
        batching = Batching(**policies.batching.model_dump())
    except ValueError as error:
        raise _Misfit(("policies", "batching"), str(error)) from error
    return Cluster(
        instances,
        models=list(scenario.models),
        regions=regions,
        latency_s=_latency_s(scenario, regions),
        routing=policies.routing,
        ordering=policies.ordering,
        ordering_stretch=policies.ordering_stretch,
        dispatch_round_trip_s=policies.dispatch_round_trip_ms / 1000,
        requests_ahead_limit=policies.requests_ahead_limit,
        threshold=policies.region_threshold,
        queue_bound=policies.queue_bound,
        batching=batching,
        delays=delays,
        reactive=None if policies.reactive is None else Reactive(**policies.reactive.model_dump()),
    )


def _latency_s(scenario: Scenario, regions: list[str]) -> list[list[float]]:
    rows = scenario.latency_ms.items()
    given = {(origin, target): each_ms for origin, targets in rows for target, each_ms in targets.items()}
    return [[latency_ms(given, origin, to, unknown_ms=0.0) / 1000 for to in regions] for origin in regions]


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
    lengths: EmpiricalLengths | LengthsByClass
    if one.lengths is not None:
        trace = load_trace(folder / one.lengths.file, one.lengths.format, seed=seed)
        lengths = EmpiricalLengths(trace.prompt_tokens, trace.output_tokens)
    else:
        assert one.prompt is not None
        assert one.output is not None
        lengths = LengthsByClass(_lognormal(one.prompt), _lognormal(one.output))
    return Client(
        one.tenant,
        one.model,
        one.slo_class,
        one.requests_per_s,
        lengths,
        regions=one.regions or dict.fromkeys(scenario.regions, 1.0),
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
        workload = load_trace(folder / trace.file, trace.format, seed=seed, limit=trace.limit)
    except TraceError as error:
        if error.line == 0 and not (folder / trace.file).exists():
            raise _Misfit(("trace", "file"), str(error)) from error
        raise
    served = list(dict.fromkeys(group.model for group in scenario.fleet))
    regions, classes = list(scenario.regions), list(scenario.classes)
    return replace(
        workload,
        arrival_s=workload.arrival_s / trace.speed if trace.speed != 1 else workload.arrival_s,
        model=_named(workload.model, served, trace.models, trace.model, "model"),
        region=_named(workload.region, regions, {}, trace.region or regions[0], "region"),
        slo_class=_named(workload.slo_class, classes, {}, trace.slo_class or classes[0], "slo_class"),
        tenant=workload.tenant._replace(names=[name or trace.tenant for name in workload.tenant.names]),
    )


def _named(column: Coded, names: Sequence[str], given: dict[str, str], default: str | None, kind: str) -> Coded:
    """*column* with the scenario's names for the trace's: its own, *given*, the *default*, the only one there is."""
    if default is None and len(names) == 1:
        default = names[0]
    ours = []
    for theirs in column.names:
        name = given.get(theirs) or (theirs if theirs in names else default)
        if name is None:
            what = f"the trace's {kind} {theirs!r}" if theirs else f"a {kind}, which the trace does not name,"
            raise _Misfit(("trace", kind), f"is missing: {what} is none of {', '.join(names)}")
        if name not in names:
            raise _Misfit(("trace", kind), f"no instance of the fleet serves {name}")
        ours.append(name)
    return column._replace(names=ours)


def _fit_context(scenario: Scenario, workload: Workload) -> tuple[Workload, int, str | None]:
    """(workload, how many were clipped, what is wrong): no request longer than its model's context or KV cache."""
    limit = {name: model.context_tokens for name, model in scenario.models.items()}
    for group in scenario.fleet:
        # The last token produced is never computed, so it needs no room.
        room = group.kv_tokens // group.block_size_tokens * group.block_size_tokens + 1
        limit[group.model] = min(limit[group.model], room)
    limits = np.array([limit[name] for name in workload.model.names])[workload.model.codes]
    long = workload.prompt_tokens.astype(np.int64) + workload.output_tokens > limits
    count = int(np.count_nonzero(long))
    if not count:
        return workload, 0, None
    if scenario.demand.too_long == "drop":
        return replace(workload.select(~long), left_out=workload.left_out + count), 0, None
    at = int(np.argmax(long))
    name = workload.model.names[workload.model.codes[at]]
    tokens = int(workload.prompt_tokens[at]) + int(workload.output_tokens[at])
    if scenario.demand.too_long == "refuse":
        more = f", and {count - 1} more are too long" if count > 1 else ""
        what = f"request {at} has {tokens} tokens, {name} takes {limit[name]}{more}: set demand.too_long"
        return workload, 0, f"{what} to clip or drop, or lower the lengths' maximum"
    # The prompt goes first: at least one token stays for each.
    outputs = np.minimum(workload.output_tokens, limits - 1).astype(np.int32)
    prompts = np.minimum(workload.prompt_tokens, limits - outputs).astype(np.int32)
    return replace(workload, prompt_tokens=prompts, output_tokens=outputs), count, None


def _requests(scenario: Scenario, cluster: Cluster, workload: Workload, seed: int) -> Requests:
    classes = list(scenario.classes)
    slo_class = _codes(workload.slo_class, classes)
    of_class = list(scenario.classes.values())
    priority = np.array([one.priority for one in of_class], np.int32)
    promised = [_promise(one) for one in of_class]
    deadline_s = np.array([due_s(each.deadline_s, each.e2e_s, each.ttft_s) for each in promised])
    predicted = None
    if scenario.demand.prediction_error > 0:
        noise = np.random.default_rng([seed, 2]).standard_normal(len(workload), np.float32)
        factors = np.exp(scenario.demand.prediction_error * noise)
        predicted = np.maximum(1, np.rint(workload.output_tokens * factors)).astype(np.int32)
    requests = make_requests(
        workload.arrival_s,
        workload.prompt_tokens,
        workload.output_tokens,
        model=_codes(workload.model, cluster.models),
        region=_codes(workload.region, cluster.regions),
        predicted_tokens=predicted,
        slo_class=slo_class,
        tenant=workload.tenant.codes,
        # Where all classes are alike, one number for all takes no memory.
        priority=priority[slo_class] if np.unique(priority).size > 1 else int(priority[0]),
        deadline_s=deadline_s[slo_class] if np.unique(deadline_s).size > 1 else float(deadline_s[0]),
    )
    return _with_prefixes(scenario, workload, requests)


def _codes(column: Coded, names: Sequence[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """The numbers in *names* of the names in *column*."""
    if list(column.names) == list(names):
        return column.codes.astype(np.int16, copy=False)
    return np.array([list(names).index(name) for name in column.names], np.int16)[column.codes]


def _with_prefixes(scenario: Scenario, workload: Workload, requests: Requests) -> Requests:
    """*requests* with the trace's shared prefixes, in blocks of the engines that cache them."""
    sizes: dict[int, int] = {}
    for number, group in enumerate(scenario.fleet):
        if group.prefix_caching:
            sizes.setdefault(group.block_size_tokens, number)
    if workload.prefix_first is None or workload.prefix_hashes is None or not sizes:
        return requests
    size, *others = sizes
    for other in others:
        what = f"is {other}, that of another group which caches prefixes {size}: the trace's prefixes need one size"
        raise _Misfit(("fleet", sizes[other], "block_size_tokens"), what)
    if workload.prefix_block_tokens % size:
        what = (
            f"is {size}, and must divide the {workload.prefix_block_tokens} tokens of a block of the trace's prefixes"
        )
        raise _Misfit(("fleet", sizes[size], "block_size_tokens"), what)
    per_hash = workload.prefix_block_tokens // size
    # Hashes stand for larger blocks: each becomes as many engine blocks as it holds, as far as the prompt has full ones.
    hashes = np.diff(workload.prefix_first)
    blocks = np.minimum(hashes * per_hash, workload.prompt_tokens // size)
    first = np.concatenate(([0], np.cumsum(blocks))).astype(np.int64)
    within = np.arange(first[-1]) - np.repeat(first[:-1], blocks)
    source = np.repeat(workload.prefix_first[:-1], blocks) + within // per_hash
    return requests._replace(
        prefix_first=first, prefix_hashes=workload.prefix_hashes[source] * per_hash + within % per_hash
    )
