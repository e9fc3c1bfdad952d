"""What comes of a plan: what its future predicted beside what happens since, and the plans that it proposed."""

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from django.db.models import Sum
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from controlplane.fleet.lifecycle.states import COMING, InstanceState
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning import selectors as planning
from controlplane.planning.models import ScalingPlan
from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.models import WhatIf

MOST_ROWS: Final = 20_000
"""Newest requests by which what happens is measured."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What was predicted of the plan, and what happens: from *since* until *until*."""

    since: datetime
    until: datetime
    over: bool
    """Whether all the time that was simulated is."""
    assumed: list[str]
    """What the future took for given beside the plan, in words. Where there is any, nothing that it predicted is compared
    with what happens: the predictions are None."""
    requests: int
    slo_met: float | None
    predicted_slo_met: float | None
    ttft_p95_ms: float | None
    predicted_ttft_p95_ms: float | None
    instances: list[dict[str, Any]]
    """By model and region: began (ready at the fork), predicted (for now, mean of the seeds; None as above), ready,
    starting, draining."""
    plans: list[dict[str, Any]]
    """id, model, status, targets and moves (instances moved) of each that it proposed."""
    minutes: list[dict[str, Any]]
    """at, slo_met of the requests of each minute."""


def followed(row: WhatIf) -> dict[str, Any] | None:
    """Prediction against what happens since *row* became the plan; None if it is not.

    The predicted numbers are those of the chosen future for its whole horizon, and of requests for its models; instances are
    those at the same time after the begin. A future that assumed another demand, a loss or other prices predicted another
    world than the one that came.
    """
    if not row.plan or row.plan.get("undone_at"):
        return None
    since, began = parse_datetime(row.plan["at"]), parse_datetime(str(row.start["at"]))
    assert since is not None
    assert began is not None
    now, end = timezone.now(), began + timedelta(seconds=row.horizon_s)
    until = max(since, min(now, end))
    models = list(row.start["scenario"]["models"])
    asked = LedgerRow.objects.filter(arrived_at__gte=since, arrived_at__lt=until, repeated=False, model__in=models)
    newest = asked.order_by("-arrived_at")
    came = list(newest.values_list("slo_met", "ttft_ms")[:MOST_ROWS])
    judged = [met for met, _ in came if met is not None]
    ttft_ms = [value for _, value in came if value is not None]
    rows = selectors.comparison(row)["futures"]
    future = next(each for each in rows if each["letter"] == row.plan["letter"])
    assumed = [*row.plan["assumed"], *selectors.edits_in_words(row)]
    made = Followed(
        since=since,
        until=until,
        over=now >= end,
        assumed=assumed,
        requests=len(came),
        slo_met=sum(judged) / len(judged) if judged else None,
        predicted_slo_met=None if assumed else _mean(future["slo_met"]),
        ttft_p95_ms=float(np.percentile(ttft_ms, 95)) if ttft_ms else None,
        predicted_ttft_p95_ms=None if assumed else _mean(future["ttft_p95_ms"]),
        instances=_instances(row, (until - began).total_seconds(), not assumed),
        plans=_plans(row),
        minutes=_minutes(since, until, models),
    )
    return asdict(made)


def ready_since(row: WhatIf, region: str = "") -> list[tuple[datetime, int]]:
    """Ready instances of the models of *row*, in *region* or in all, as steps from its begin until now or its end."""
    began = parse_datetime(str(row.start["at"]))
    assert began is not None
    until = min(timezone.now(), began + timedelta(seconds=row.horizon_s))
    count: dict[str, int] = {}
    changes = [
        (at, model, sum(ready.values()))
        for model in row.start["scenario"]["models"]
        for at, ready in planning.ready_over_time(model, region, began)
    ]
    steps: dict[datetime, int] = {}
    for at, model, ready in sorted(changes, key=lambda each: each[0]):
        if at > until:
            break
        count[model] = ready
        steps[at] = sum(count.values())
    return [*steps.items(), (until, sum(count.values()))]


def _mean(shown: dict[str, float | None] | None) -> float | None:
    return shown["mean"] if shown else None


def _instances(row: WhatIf, after_s: float, comparable: bool) -> list[dict[str, Any]]:
    series = selectors.curves(row)[row.plan["letter"]]["series"]
    at = max(0, int(np.searchsorted(series["t_s"], after_s, side="right")) - 1)
    there: dict[tuple[str, str], Counter[str]] = {}
    for (model, region, _), states in planning.instances_by_place().items():
        there.setdefault((model, region), Counter()).update(states)
    return [
        {
            "model": model,
            "region": region,
            "began": ready[0],
            "predicted": ready[at] if comparable else None,
            "ready": states[InstanceState.READY],
            "starting": sum(states[state] for state in COMING),
            "draining": states[InstanceState.DRAINING],
        }
        for key, ready in sorted(series["ready"].items())
        for model, _, region in [key.rpartition(" ")]
        for states in [there.get((model, region), Counter())]
    ]


def _plans(row: WhatIf) -> list[dict[str, Any]]:
    rows = ScalingPlan.objects.filter(pk__in=row.plan["plans"]).select_related("model").order_by("pk")
    return [
        {
            "id": each.pk,
            "model": each.model.name,
            "status": each.status,
            "targets": each.targets,
            "moves": each.moves.count(),
        }
        for each in rows
    ]


def _minutes(since: datetime, until: datetime, models: list[str]) -> list[dict[str, Any]]:
    counted = MinuteRow.objects.filter(minute__gte=since, minute__lt=until, model__in=models)
    rows = counted.order_by("minute").values("minute")
    sums = rows.annotate(met=Sum("slo_met"), judged=Sum("slo_judged"))
    return [{"at": each["minute"], "slo_met": each["met"] / each["judged"]} for each in sums if each["judged"]]
