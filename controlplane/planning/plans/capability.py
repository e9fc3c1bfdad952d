"""What one instance can serve: PreServe's Algorithm 1 over the ledger, with the performance profile behind it.

A window is ten minutes of one instance. Where too few windows are known, or none shows a limit, the profile's figure for
requests as they come stands in (`scheduling.planning.capacity`).
"""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
from django.db.models import Count, Q, Sum
from django.db.models.functions import TruncMinute

from controlplane.fleet.models import Deployment, Instance, SloClass, SloKind
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.planning.forecasts.demand import ASKED
from controlplane.planning.plans import inventory

if TYPE_CHECKING:
    from scheduling.planning.capacity import Capability

Key = tuple[str, str]
"""(model, GPU type), by name."""
LEDGER = timedelta(hours=4)
"""How far back windows are read: instances change, and so does what they are asked."""
WINDOW_S = 600
MISSED_SHARE = 0.05
"""A window breaks its promises when more than this share of its judged requests missed theirs."""
USUAL_LENGTHS = (512.0, 128.0)
"""Prompt and output tokens of a request where none has been seen."""


def read(fleet: inventory.Fleet, now: datetime) -> dict[Key, "Capability"]:
    """By (model, GPU type); a pair with neither ledger windows nor a profile is left out."""
    from scheduling.planning.capacity import UNKNOWN, profile_capability

    windows, itl_ms = _windows(now), _strictest_itl_ms()
    lengths = {model: mean_lengths(model, now) for model in fleet.models}
    capabilities: dict[Key, Capability] = {}
    for (model, _, gpu_type), deployment in fleet.deployments.items():
        key = model, gpu_type
        if key in capabilities:
            continue
        seen = np.array(windows.get(key, []), np.float64).reshape(-1, 4)
        prompt, output, violations, requests = seen.T
        one = profile_capability(
            prompt,
            output,
            violations,
            requests,
            np.ones(len(seen)),
            WINDOW_S,
            expected=by_profile(deployment, *lengths[model], itl_ms),
            violations_allowed=MISSED_SHARE,
        )
        if one.source != UNKNOWN and one.total_tokens_per_s > 0:
            capabilities[key] = one
    return capabilities


def by_profile(
    deployment: Deployment, prompt_tokens: float, output_tokens: float, itl_ms: float | None
) -> "Capability | None":
    """Capability by the profile of *deployment* for requests of that many tokens; None without a profile."""
    from scheduling.planning.capacity import capability_from_profile

    row = deployment.profile()
    if row is None:
        return None
    return capability_from_profile(
        row.coefficients(),
        prompt_tokens,
        output_tokens,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        kv_capacity_tokens=max(0, deployment.expected_kv_tokens),
        itl_ms=itl_ms,
    )


def mean_lengths(model: str, now: datetime) -> tuple[float, float]:
    """Mean prompt and output tokens of the requests of *model*, as far back as windows are read."""
    rows = MinuteRow.objects.filter(model=model, minute__gte=now - LEDGER, minute__lt=now)
    asked = {quantity.name.lower(): Sum(tokens) for quantity, tokens in ASKED.items()}
    sums = rows.aggregate(requests=Sum("requests"), **asked)
    if not sums["requests"] or not sums["prompt"] or not sums["output"]:
        return USUAL_LENGTHS
    return sums["prompt"] / sums["requests"], sums["output"] / sums["requests"]


def _windows(now: datetime) -> dict[Key, list[tuple[float, float, float, float]]]:
    """Prompt tokens, output tokens, broken promises and requests of each instance's windows, by (model, GPU type)."""
    hardware = {
        name: (model, gpu_type)
        for name, model, gpu_type in Instance.objects.values_list(
            "name", "deployment__model__name", "deployment__gpu_type__name"
        )
    }
    until_s = int(now.timestamp()) // WINDOW_S * WINDOW_S
    since_s = until_s - int(LEDGER.total_seconds())
    rows = LedgerRow.objects.filter(
        arrived_at__gte=datetime.fromtimestamp(since_s, UTC),
        arrived_at__lt=datetime.fromtimestamp(until_s, UTC),
        outcome=Outcome.DONE,
    )
    minutes = rows.order_by().annotate(minute=TruncMinute("arrived_at")).values_list("minute", "instance")
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    columns = {
        "prompt": Sum("prompt_tokens"),
        "output": Sum("output_tokens"),
        "missed": Count("pk", filter=Q(slo_met=False)),
        "count": Count("pk"),
    }
    for minute, instance, *values in minutes.annotate(**columns).iterator(chunk_size=5_000):
        total = sums[instance, int(minute.timestamp()) // WINDOW_S]
        for at, value in enumerate(values):
            total[at] += value
    windows: dict[Key, list[tuple[float, float, float, float]]] = defaultdict(list)
    for (instance, _), (prompt, output, missed, count) in sorted(sums.items()):
        if instance in hardware:
            windows[hardware[instance]].append((prompt, output, missed, count))
    return windows


def _strictest_itl_ms() -> float | None:
    targets = SloClass.objects.filter(kind=SloKind.INTERACTIVE, itl_target_ms__isnull=False)
    return targets.order_by("itl_target_ms").values_list("itl_target_ms", flat=True).first()
