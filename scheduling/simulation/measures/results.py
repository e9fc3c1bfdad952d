"""Measures of a simulation: latencies, promises kept, throughput, hours and dollars, queues over time.

Latencies are in seconds and counted from the request's arrival at its caller's region:

- `ttft`: to the first token. `e2e`: to the last; its mean is the job completion time (JCT) of the scheduling literature.
- `itl`: between two tokens of a request, the mean over its output; none for an output of one token.
- `normalised`: e2e by output token (Orca, vLLM).
- `queue`: until an instance takes it for the first time.

`cached_prompt_tokens`, where prefixes are cached: those found in the cache when their request was first admitted.

Only requests that ended well count in them; those that did not are counted, and miss their promise.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduling.queueing.promises import Promise
from scheduling.routing.models import ModelRule
from scheduling.simulation.cluster.world import UNPAID, Outcome, State
from scheduling.simulation.measures.tables import Table
from scheduling.simulation.result import Result
from scheduling.simulation.workload.columns import Floats

LATENCIES = ("ttft", "itl", "e2e", "normalised", "queue")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
WASTED = (
    State.STARTING,
    State.LOADING,
    State.DRAINING,
    State.RECLAIMING,
    State.WAKING,
    State.FALLING_ASLEEP,
)
"""States in which an instance is paid for and takes no new work, because the fleet is being changed."""
PROVISIONING = (State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING)
"""States in which an instance is paid for and computes nothing yet: SageServe's waste by scaling (section 7.3.3)."""


RUN_COLUMNS = ("application", "runs", "ended", "abandoned", "due", "in_time", "mean_s", "p50_s", "p95_s")
"""Of application runs: how many began, ended, and were abandoned because a request was refused or failed; how many had a
deadline, and ended by it; statistics of the completion times, in seconds, of those that ended.
"""


def runs_by_application(
    result: Result, from_s: float = -inf, until_s: float = inf
) -> dict[str, dict[str, int | float | None]]:
    """Return RUN_COLUMNS of the runs that began from *from_s* until *until_s*: of `all` and of each application.

    Empty without any. Statistics are None where no run ended.
    """
    runs = result.runs
    if runs is None:
        return {}
    inside = (runs.began_s >= from_s) & (runs.began_s < until_s)
    names = np.array([*runs.names])[runs.application]
    rows = {}
    for name in ("all", *runs.names):
        own = inside if name == "all" else inside & (names == name)
        if not own.any():
            continue
        completion_s = runs.completion_s[own]
        ended = np.isfinite(completion_s)
        due = np.isfinite(runs.due_s[own])
        in_time = due & ended & (runs.ended_s[own] <= runs.due_s[own])
        taken = completion_s[ended]
        rows[name] = dict(
            zip(
                RUN_COLUMNS[1:],
                (
                    int(own.sum()),
                    int(ended.sum()),
                    int(runs.abandoned[own].sum()),
                    int(due.sum()),
                    int(in_time.sum()),
                    *(
                        (float(taken.mean()), *map(float, np.percentile(taken, (50, 95))))
                        if taken.size
                        else (None,) * 3
                    ),
                ),
                strict=True,
            )
        )
    return rows


def run_table(result: Result) -> Table:
    """Return RUN_COLUMNS for all application runs and for each application; empty without any."""
    return Table(RUN_COLUMNS, [(name, *row.values()) for name, row in runs_by_application(result).items()])


def latency_s(result: Result, name: str) -> Floats:
    """Return the latency called *name* of every request; NaN where there is none."""
    outcomes = result.outcomes
    done = outcomes["state"] == Outcome.DONE
    if name in {"ttft", "e2e", "queue"}:
        return np.where(done, outcomes[f"{name}_s"], np.nan)
    output_tokens = result.output_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "normalised":
            return np.where(done & (output_tokens > 0), outcomes["e2e_s"] / output_tokens, np.nan)
        between_s = (outcomes["e2e_s"] - outcomes["ttft_s"]) / (output_tokens - 1)
    return np.where(done & (output_tokens > 1), between_s, np.nan)


def statistics(values: Floats) -> tuple[float, ...]:
    """Return STATISTICS of *values* without NaN; all NaN if nothing is left. *values* may be reordered."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return (np.nan,) * len(STATISTICS)
    percentiles = np.percentile(finite, PERCENTILES, overwrite_input=True)
    return (float(finite.mean()), *(float(value) for value in percentiles), float(finite.max()))


def kept(result: Result, promises: Sequence[Promise]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return (judged, met) by request: whether its class has a promise, and whether all of it was kept."""
    if not promises:
        return (np.zeros(result.requests.count, bool),) * 2
    classes = result.requests.slo_class
    judged = np.array([promise.any for promise in promises])[classes]
    met = judged & (result.outcomes["state"] == Outcome.DONE)
    for name in ("ttft", "itl", "e2e"):
        limits_s = np.array([getattr(promise, f"{name}_s") for promise in promises])
        if name == "e2e":
            limits_s = np.minimum(limits_s, [promise.deadline_s for promise in promises])
        if np.isfinite(limits_s).any():
            # An output of one token has no time between tokens and keeps that promise.
            met &= ~(latency_s(result, name) > limits_s[classes])
    return judged, met


class Spells(NamedTuple):
    """Times that instances spent in one state, by column."""

    instance: npt.NDArray[np.int64]
    endpoint: npt.NDArray[np.int64]
    state: npt.NDArray[np.int64]
    began_s: Floats
    ended_s: Floats


def spells(result: Result, end_s: float) -> Spells:
    """Return the time in every state of every instance, the first ones first; the last ones end at *end_s*."""
    cluster, changes, count = result.cluster, result.changes, len(result.cluster.instances)
    owner = np.concatenate([np.arange(count), changes["instance"]])
    order = np.argsort(owner, kind="stable")  # each instance's first spell, then those that begin with a change

    def column(first: npt.ArrayLike, of_changes: str) -> npt.NDArray[Any]:
        return np.concatenate([first, changes[of_changes]])[order]

    own = [cluster.endpoints.index((spec.model, spec.region)) for spec in cluster.instances]
    began_s, first = column(np.zeros(count), "time_s"), result.state_s.argmax(axis=1)
    goes_on = np.append(np.diff(owner[order]) == 0, False)
    state = np.where(goes_on, np.roll(column(first, "before"), -1), column(first, "after"))
    ended_s = np.where(goes_on, np.roll(began_s, -1), end_s)
    return Spells(owner[order], column(own, "endpoint"), state, began_s, ended_s)


def paid_hours(result: Result) -> float:
    """Return the instance-hours in states that are paid for."""
    return float(np.delete(result.state_s, UNPAID, axis=1).sum()) / 3600


def request_table(result: Result, tenants: Sequence[str]) -> Table:
    """Return by, group, measure, statistic, value: counts, latencies (s), attainment and throughput.

    *tenants*: by their number in requests.
    """
    table = Table(("by", "group", "measure", "statistic", "value"))
    groups = list(_groups(result, tenants))
    state = result.outcomes["state"]
    tokens, prompts = result.output_tokens, result.requests.prompt_tokens
    cached = result.counters.get("prefix_queried_tokens", 0) > 0
    duration_s = float(result.end_s - result.requests.arrival_s[0]) if len(state) else 0.0
    judged, met = kept(result, result.cluster.promises)
    for by, group, members in groups:
        done = state[members] == Outcome.DONE
        counts = {"requests": done.size, "done": int(done.sum())}
        for measure_name, count in counts.items():
            table.add(by, group, measure_name, "count", count)
        produced = int(tokens[members][done].sum())
        table.add(by, group, "preemptions", "count", int(result.outcomes["preemptions"][members].sum()))
        if duration_s > 0:
            table.add(by, group, "throughput", "requests_per_s", counts["done"] / duration_s)
            table.add(by, group, "throughput", "output_tokens_per_s", produced / duration_s)
        if cached:
            cached_tokens = int(result.outcomes["cached_tokens"][members].sum())
            table.add(by, group, "cached_prompt_tokens", "count", cached_tokens)
            table.add(
                by, group, "cached_prompt_tokens", "ratio", cached_tokens / int(prompts[members].sum(dtype=np.int64))
            )
        if result.asked_class is not None and result.refused_at_door is not None:
            table.add(by, group, "refused_at_door", "count", int(result.refused_at_door[members].sum()))
            table.add(by, group, "degraded_to", "count", int((result.asked_class[members] >= 0).sum()))
        if among := int(judged[members].sum()):
            table.add(by, group, "slo_attainment", "ratio", int(met[members].sum()) / among)
    for name in LATENCIES:
        values = latency_s(result, name)
        for by, group, members in groups:
            for statistic, value in zip(STATISTICS, statistics(values[members]), strict=True):
                table.add(by, group, f"{name}_s", statistic, value)
    return table


Members = npt.NDArray[np.int32] | slice


def _groups(result: Result, tenants: Sequence[str]) -> Iterator[tuple[str, str, Members]]:
    """Yield one group per model, caller region, SLO class and tenant; with fallbacks, also per requested model and fallback
    rule: (by, name, requests).
    """
    requests, cluster = result.requests, result.cluster
    yield "all", "all", slice(None)
    columns: list[tuple[str, npt.NDArray[Any], Sequence[str]]] = [
        ("model", requests.model, cluster.models),
        ("region", requests.region % len(cluster.regions), cluster.regions),
        ("slo_class", requests.slo_class, [one.slo_class for one in cluster.classes]),
        ("tenant", requests.tenant, tenants),
    ]
    rule, asked = result.outcomes["model_rule"], requests.asked
    if rule.any():  # another model serves than was asked for
        named = np.where(asked < 0, requests.model, asked)
        columns += [("asked_model", named, cluster.names), ("model_rule", rule, ["none", *ModelRule])]
    for by, codes, group_names in columns:
        counts = np.bincount(codes, minlength=len(group_names))
        if np.count_nonzero(counts) == 1:
            yield by, group_names[int(np.argmax(counts))], slice(None)
            continue
        order = np.argsort(codes, kind="stable").astype(np.int32)
        ends = np.cumsum(counts)
        for group, end in enumerate(ends):
            if counts[group]:
                yield by, group_names[group], order[end - counts[group] : end]


def hour_table(result: Result) -> Table:
    """Return by (gpu_type, model), group, measure, value: hours in each state, instance-hours, dollars, spot, waste."""
    table = Table(("by", "group", "measure", "value"))
    hours = result.state_s / 3600
    instances = result.cluster.instances
    keys = {
        "gpu_type": [instance.gpu_type for instance in instances],
        "model": [instance.model for instance in instances],
    }
    on_demand = np.array([instance.usd_per_hour for instance in instances])
    spot = np.array([instance.spot_usd_per_hour for instance in instances])
    ours = np.delete(hours, UNPAID, axis=1).sum(axis=1)
    for by, labels in keys.items():
        for group in dict.fromkeys(labels):
            members = np.array([label == group for label in labels])
            for state in State:
                if total := float(hours[members, state].sum()):
                    table.add(by, group, f"{state.name.lower()}_h", total)
            table.add(by, group, "instance_h", float(ours[members].sum()))
            table.add(by, group, "donated_h", float(hours[members, State.SPOT].sum()))
            table.add(by, group, "wasted_h", float(hours[members][:, WASTED].sum()))
            table.add(by, group, "cost_usd", float((ours * on_demand)[members].sum()))
            table.add(by, group, "spot_income_usd", float((hours[:, State.SPOT] * spot)[members].sum()))
    return table


def move_table(result: Result) -> Table:
    """Return every move of instances that a strategy wanted."""
    endpoints = result.cluster.endpoints
    rows = [(one.time_s, *endpoints[one.endpoint], one.wanted, one.done, one.reason) for one in result.moves]
    return Table(("time_s", "model", "region", "wanted", "done", "reason"), rows)


def change_table(result: Result) -> Table:
    """Return every instance's states, in order of time: starts, drains, reclaims, failures, redeploys."""
    cluster = result.cluster
    rows = [
        (float(time_s), cluster.instances[instance].name, *cluster.endpoints[endpoint], State(after).name.lower())
        for time_s, instance, endpoint, _, after in result.changes.tolist()
    ]
    return Table(("time_s", "instance", "model", "region", "state"), rows)


def counter_table(result: Result) -> Table:
    """Return counter, value: preemptions, evictions, swaps, scaling and so on."""
    return Table(("counter", "value"), [(name, int(value)) for name, value in result.counters.items()])


def series_table(result: Result) -> Table:
    """Return one row for each sample and endpoint; empty unless the simulation kept a series."""
    table = Table(("t_s", "model", "region", "waiting", "running", "ready", "kv_tokens", "kv_ratio"))
    series = result.series
    if series is None:
        return table
    for sample, t_s in enumerate(series["t_s"]):
        for number, (model, region) in enumerate(result.cluster.endpoints):
            capacity = int(series["kv_capacity_tokens"][sample, number])
            tokens = int(series["kv_tokens"][sample, number])
            table.add(
                float(t_s),
                model,
                region,
                *(int(series[name][sample, number]) for name in ("waiting", "running", "ready")),
                tokens,
                tokens / capacity if capacity else 0.0,
            )
    return table
