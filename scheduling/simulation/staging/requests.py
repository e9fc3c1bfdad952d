"""The demand of a scenario as requests to a cluster."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.queueing.held import HELD
from scheduling.queueing.ordering import hold_s
from scheduling.queueing.promises import ADMIT
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.holding import held_where_held, models_held
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import ScenarioProblem
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.requests import Requests, make_requests


def requests_of(
    scenario: Scenario, cluster: Cluster, workload: Workload, seed: int, run: NDArray[np.int32] | None = None
) -> Requests:
    """Return *workload* by the numbers of *cluster*, with the dispatcher's predictions and the application *run* of each.

    Raises ScenarioProblem.
    """
    slo_class = _codes(workload.slo_class, list(scenario.classes))
    judges = any(one.if_unreachable != ADMIT for one in cluster.classes)

    def column(of_classes: Iterable[float], dtype: type[np.generic] = np.float64) -> Any:
        """By request; one number for all, which takes no memory, where classes are alike and stay so."""
        values = np.array(list(of_classes), dtype)
        return values[slo_class] if judges or np.unique(values).size > 1 else values[0].item()

    held = _held(cluster, workload, slo_class)
    holds_s = [hold_s(one.deadline_s, cluster.max_hold_s) for one in cluster.promises]
    prefix_first, prefix_hashes = _prefixes(scenario, workload)
    requests = make_requests(
        workload.arrival_s,
        workload.prompt_tokens,
        workload.output_tokens,
        model=_codes(workload.model, cluster.models),
        region=_origins(scenario, cluster, workload),
        predicted_tokens=_predicted(scenario, cluster, workload, seed),
        slo_class=slo_class,
        tenant=workload.tenant.codes,
        priority=column((one.priority for one in cluster.classes), np.int32),
        deadline_s=column(one.ttft_s for one in cluster.promises),
        end_s=column(one.end_s for one in cluster.promises),
        hold_s=column(holds_s),
        judged=column((one.if_unreachable != ADMIT for one in cluster.classes), np.int8),
        held=held,
        adapter=_adapters(scenario, workload, seed, run),
        run=-1 if run is None else run,
        asked=_asked(cluster, workload),
    )
    return requests._replace(prefix_first=prefix_first, prefix_hashes=prefix_hashes)


def _origins(scenario: Scenario, cluster: Cluster, workload: Workload) -> NDArray[np.int16]:
    """Return `Requests.region`: the callers' regions, within those to which tenants are bound (`Cluster.origins`)."""
    region = _codes(workload.region, cluster.regions)
    if not cluster.residency:
        return region
    numbers = {(): 0} | {each: number for number, each in enumerate(cluster.residency, 1)}
    within = [numbers[tuple(scenario.residency.get(name, ()))] for name in workload.tenant.names]
    return region + np.array(within, np.int16)[workload.tenant.codes] * np.int16(len(cluster.regions))


def _held(cluster: Cluster, workload: Workload, slo_class: NDArray[np.int16]) -> NDArray[np.int8] | int:
    """Return `Requests.held`: classes not interactive, unless the model's first endpoint takes them at once."""
    kinds = [held_where_held(terms) for terms in cluster.classes]
    if not any(kinds):
        return 0
    models = models_held(cluster)
    holds = np.array([name in models for name in workload.model.names])
    held = np.array(kinds, np.int8)[slo_class]
    return np.where(holds[workload.model.codes], held, held & ~HELD).astype(np.int8)


def _asked(cluster: Cluster, workload: Workload) -> NDArray[np.int16] | int:
    """Return `Requests.asked`."""
    if workload.asked is None:
        return -1
    known = {name: number for number, name in enumerate(cluster.names)}
    numbers = [known.get(name, -1) for name in workload.asked.names]
    return np.array(numbers, np.int16)[workload.asked.codes]


def _adapters(
    scenario: Scenario, workload: Workload, seed: int, run: NDArray[np.int32] | None
) -> NDArray[np.int32] | int:
    """Return the LoRA adapter of each request, drawn by `[models.*.adapters]`; -1 for none. Raise ScenarioProblem.

    All requests of an application run for a model use the same (Hermes section 5.4).
    """
    adapter, first = np.full(len(workload), -1, np.int32), 0
    for number, (name, model) in enumerate(scenario.models.items()):
        if (known := model.adapters) is None:
            continue
        for at, group in enumerate(scenario.fleet):
            if group.model == name and not group.max_loras:
                raise ScenarioProblem(("fleet", at), f"has no max_loras, and {name} has adapters")
        names = list(workload.model.names)
        rows = np.flatnonzero(workload.model.codes == names.index(name)) if name in names else np.zeros(0, np.int64)
        random = np.random.default_rng([seed, 4, number])
        weights = np.arange(1, known.count + 1) ** -float(known.zipf)
        # One draw for each run, and one for each request of none.
        of = np.arange(rows.size) if run is None else np.where(run[rows] >= 0, run[rows], run.max() + 1 + rows)
        _, draw = np.unique(of, return_inverse=True)
        count = int(draw.max(initial=-1)) + 1
        drawn, uses = random.choice(known.count, count, p=weights / weights.sum()), random.random(count) < known.share
        adapter[rows] = np.where(uses, first + drawn, -1)[draw]
        first += known.count
    return adapter if first else -1


def _predicted(scenario: Scenario, cluster: Cluster, workload: Workload, seed: int) -> NDArray[np.int32] | None:
    """Return output tokens as a dispatcher expects them; None for the true ones.

    They are those of *workload*, unless *scenario* says how they are predicted. Where there is no output there is nothing
    to predict.
    """
    predictions = scenario.predictions
    if workload.predicted_tokens is not None and "kind" not in predictions.model_fields_set:
        return np.maximum(workload.predicted_tokens, 1)
    if predictions.kind == "exact":
        return None
    if predictions.kind == "error":
        noise = np.random.default_rng([seed, 2]).standard_normal(len(workload), np.float32)
        expected = workload.output_tokens * (predictions.bias * np.exp(predictions.log_sd * noise))
    else:
        codes = workload.model.codes
        sums = np.bincount(codes, workload.output_tokens, len(workload.model.names))
        expected = (sums / np.maximum(np.bincount(codes, minlength=sums.size), 1))[codes]
    rounded: NDArray[np.int32] = np.maximum(1, np.rint(expected)).astype(np.int32)
    pooled = np.array([name in cluster.pooling for name in workload.model.names], bool)[workload.model.codes]
    return np.where(pooled, 1, rounded).astype(np.int32)


def _codes(column: Coded, names: Sequence[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """Return the numbers in *names* of the names in *column*."""
    if list(column.names) == list(names):
        return column.codes.astype(np.int16, copy=False)
    return np.array([list(names).index(name) for name in column.names], np.int16)[column.codes]


def _prefixes(scenario: Scenario, workload: Workload) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `Requests.prefix_first` and `prefix_hashes`: the trace's, in blocks of the engines that cache them."""
    sizes: dict[int, int] = {}
    for number, group in enumerate(scenario.fleet):
        if group.prefix_caching:
            sizes.setdefault(group.block_size_tokens, number)
    if workload.prefix_first is None or workload.prefix_hashes is None or not sizes:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    size, *others = sizes
    for other in others:
        what = f"is {other}, that of another group which caches prefixes {size}: the trace's prefixes need one size"
        raise ScenarioProblem(("fleet", sizes[other], "block_size_tokens"), what)
    if workload.prefix_block_tokens % size:
        what = (
            f"is {size}, and must divide the {workload.prefix_block_tokens} tokens of a block of the trace's prefixes"
        )
        raise ScenarioProblem(("fleet", sizes[size], "block_size_tokens"), what)
    per_hash = workload.prefix_block_tokens // size
    # Hashes stand for larger blocks: each becomes as many engine blocks as it holds, as far as the prompt has full ones.
    hashes = np.diff(workload.prefix_first)
    blocks = np.minimum(hashes * per_hash, workload.prompt_tokens // size)
    first = np.concatenate(([0], np.cumsum(blocks))).astype(np.int64)
    within = np.arange(first[-1]) - np.repeat(first[:-1], blocks)
    source = np.repeat(workload.prefix_first[:-1], blocks) + within // per_hash
    return first, workload.prefix_hashes[source] * per_hash + within % per_hash
