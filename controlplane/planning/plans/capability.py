"""Capability of one instance: PreServe's Algorithm 1 over the ledger, with the performance profile as fallback.

A window is ten minutes of an endpoint's instances of one GPU type, under the bursts it saw. With too few windows, or none
that shows a limit, the profile is simulated with requests as they come, which also gives the reserve for bursts
(`scheduling.planning.simulated_capability`).
"""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
from django.db.models import Count, Q, Sum
from django.db.models.functions import TruncMinute

from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile, SloClass, SloKind
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.planning.forecasts.demand import ASKED
from controlplane.planning.plans import inventory
from scheduling.model_task import POOLING_TASKS

if TYPE_CHECKING:
    from scheduling.planning.advisor import Demand
    from scheduling.planning.capacity import Capability
    from scheduling.queueing.promises import Promise
    from scheduling.simulation.engine.config import EngineConfig

Key = tuple[str, str]
"""(model, GPU type) names."""
WINDOW_S = 600
MISSED_SHARE = 0.05
"""Allowed share of broken promises for an unknown class; otherwise its percentile defines it."""
BLOCK_TOKENS = 16
PAIRS = 2_000
"""Number of newest requests whose lengths are sampled."""
MAX_KEPT = 256
POISSON_CV = 1.0
USUAL_LENGTHS = (512.0, 128.0)
LOOK_BACK = timedelta(hours=4)
"""Of ledger windows: instances and their requests change over time."""
"""Default prompt and output tokens before any request was seen."""
_simulated: dict[Any, "Capability"] = {}


def read(fleet: inventory.Fleet, demand: "Demand", now: datetime) -> dict[Key, "Capability"]:
    """Return capability by (model, GPU type) under the bursts of *demand*; pairs with neither ledger windows nor a profile
    are left out.
    """
    from scheduling.planning.capacity import UNKNOWN, profile_capability

    windows = _windows(now)
    lengths = {model: mean_lengths(model, now) for model in fleet.models}
    capabilities: dict[Key, Capability] = {}
    for (model, _, gpu_type), deployment in fleet.deployments.items():
        key = model, gpu_type
        if key in capabilities:
            continue
        seen = np.array(windows.get(key, []), np.float64).reshape(-1, 6)
        prompt, output, violations, requests, instances, allowed = seen.T
        cv = max([POISSON_CV, *(each.cv for (name, _), each in demand.of.items() if name == model)])
        one = profile_capability(
            prompt,
            output,
            violations,
            requests,
            instances,
            WINDOW_S,
            expected=by_profile(deployment, *lengths[model], cv, now),
            violations_allowed=allowed / np.maximum(requests, 1.0),
            cv=cv,
        )
        if one.source != UNKNOWN and one.total_tokens_per_s > 0:
            capabilities[key] = one
    return capabilities


def by_profile(
    deployment: Deployment, prompt_tokens: float, output_tokens: float, cv: float, now: datetime
) -> "Capability | None":
    """Return capability by simulating the profile of *deployment* under the strictest interactive promise; None without a
    profile.

    Lengths are those of the newest requests of the classes that plans count, else all are *prompt_tokens* and
    *output_tokens*. Measured again when the mean lengths change by a tenth or *cv* by a quarter.
    """
    from scheduling.planning.simulated_capability import simulated_capability

    row = deployment.profile()
    if row is None:
        return None
    steps = round(10 * log(prompt_tokens)), round(10 * log(output_tokens)), max(1.0, round(4 * cv) / 4)
    engine, (promise, percentile) = engine_of(deployment, row), strictest()
    key = deployment.model.name, repr(engine), promise, percentile, steps
    if key not in _simulated:
        if len(_simulated) >= MAX_KEPT:
            _simulated.clear()
        done = LedgerRow.objects.filter(
            model=deployment.model.name, outcome=Outcome.DONE, arrived_at__gte=now - LOOK_BACK, prompt_tokens__gt=0
        )
        if not deployment.model.pools:
            done = done.filter(output_tokens__gt=0)
        kinds = dict(SloClass.objects.values_list("name", "kind"))
        uncounted = [name for name, kind in kinds.items() if kind == SloKind.OPPORTUNISTIC]
        columns = "prompt_tokens", "output_tokens", "slo_class"
        rows = done.exclude(slo_class__in=uncounted).order_by("-arrived_at").values_list(*columns)[:PAIRS]
        prompts, outputs, names = zip(*rows, strict=True) if rows else ([prompt_tokens], [output_tokens], [""])
        # A sequence without output ends with its prefill, as one of a single token does.
        lengths = np.round(prompts).astype(np.int64), np.maximum(np.round(outputs), 1).astype(np.int64)
        interactive = [kinds.get(name) != SloKind.NON_INTERACTIVE for name in names]
        _simulated[key] = simulated_capability(
            engine, *lengths, promise, interactive=interactive, percentile=percentile, cv=steps[2]
        )
    return _simulated[key]


def engine_of(deployment: Deployment, profile: PerformanceProfile) -> "EngineConfig":
    """Return the simulated engine of *deployment*."""
    from scheduling.simulation.engine.config import EngineConfig

    return EngineConfig(
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=max(deployment.max_num_batched_tokens, deployment.max_num_seqs),
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=max(1, deployment.expected_kv_tokens // BLOCK_TOKENS),
        policy=deployment.scheduling_policy,
        max_model_len=deployment.longest_request_tokens,
        profile=profile.coefficients(),
        front_end=profile.front_end(),
    )


def strictest() -> tuple["Promise", float]:
    """Return the strictest of each interactive promise, and the highest percentile given for any."""
    from scheduling.planning import simulated_capability

    rows = SloClass.objects.filter(kind=SloKind.INTERACTIVE)
    return simulated_capability.strictest(
        rows.values_list("ttft_target_ms", "itl_target_ms", "e2e_target_ms", "percentile")
    )


def mean_lengths(model: str, now: datetime) -> tuple[float, float]:
    """Return mean prompt and output tokens of requests of *model* within `LOOK_BACK`; 1 of output where it pools."""
    pools = Model.objects.filter(name=model, task__in=POOLING_TASKS).exists()
    rows = MinuteRow.objects.filter(model=model, minute__gte=now - LOOK_BACK, minute__lt=now)
    asked = {quantity.name.lower(): Sum(tokens) for quantity, tokens in ASKED.items()}
    sums = rows.aggregate(requests=Sum("requests"), **asked)
    if not sums["requests"] or not sums["prompt"] or not (sums["output"] or pools):
        return USUAL_LENGTHS[0], 1.0 if pools else USUAL_LENGTHS[1]
    return sums["prompt"] / sums["requests"], max(1.0, sums["output"] / sums["requests"])


def _windows(now: datetime) -> dict[Key, list[tuple[float, ...]]]:
    """Return rows of each endpoint's windows by (model, GPU type): prompt tokens, output tokens, broken promises,
    requests, instances of that type, and allowed broken promises by class percentiles.
    """
    hardware = {
        name: (model, region, gpu_type)
        for name, model, region, gpu_type in Instance.objects.values_list(
            "name", "deployment__model__name", "deployment__region__name", "deployment__gpu_type__name"
        )
    }
    may_break = {row.name: 1.0 - row.percentile / 100.0 for row in SloClass.objects.all()}
    until_s = int(now.timestamp()) // WINDOW_S * WINDOW_S
    since_s = until_s - int(LOOK_BACK.total_seconds())
    rows = LedgerRow.objects.filter(
        arrived_at__gte=datetime.fromtimestamp(since_s, UTC),
        arrived_at__lt=datetime.fromtimestamp(until_s, UTC),
        outcome=Outcome.DONE,
    )
    minutes = rows.order_by().annotate(minute=TruncMinute("arrived_at")).values_list("minute", "instance", "slo_class")
    sums: dict[tuple[inventory.Place, int], list[float]] = defaultdict(lambda: [0.0] * 5)
    serving: dict[tuple[inventory.Place, int], set[str]] = defaultdict(set)
    columns = {
        "prompt": Sum("prompt_tokens"),
        "output": Sum("output_tokens"),
        "missed": Count("pk", filter=Q(slo_met=False)),
        "count": Count("pk"),
        "judged": Count("pk", filter=Q(slo_met__isnull=False)),
    }
    for minute, instance, slo_class, *values in minutes.annotate(**columns).iterator(chunk_size=5_000):
        if instance not in hardware:
            continue
        key = hardware[instance], int(minute.timestamp()) // WINDOW_S
        serving[key].add(instance)
        values[4] *= may_break.get(slo_class, MISSED_SHARE)
        for at, value in enumerate(values):
            sums[key][at] += value
    windows: dict[Key, list[tuple[float, ...]]] = defaultdict(list)
    for key, (prompt, output, missed, count, allowed) in sorted(sums.items()):
        model, _, gpu_type = key[0]
        windows[model, gpu_type].append((prompt, output, missed, count, float(len(serving[key])), allowed))
    return windows
