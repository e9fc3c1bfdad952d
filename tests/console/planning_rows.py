"""Planner rows for tests of pages: demand with a daily rhythm, nearly right forecasts, plans and moves.

Deterministic for a moment. All existing deployments get demand, forecasts and plans: the small inventory of unit tests
as well as the demonstration fleet of browser tests.
"""

import math
import random
import uuid
from datetime import UTC, datetime, timedelta

from controlplane.fleet.models import Deployment, Instance, Model
from controlplane.gateway.models import MinuteRow
from controlplane.planning.models import (
    Forecast,
    MoveSource,
    PlanStatus,
    PolicyMode,
    Quantity,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
)

WINDOW_S = 600
AHEAD = 24  # windows of a forecast
CAPABILITY = {"a100-80gb": 3_100.0, "h100-80gb": 5_400.0}
PROMPT_TO_OUTPUT = 2.6


def level(model: str, region: str, at: datetime) -> float:
    """Return the expected output tokens a second of a series at that time of day."""
    phase = sum(map(ord, region)) % 5
    base = 900 + sum(map(ord, model)) * 37 % 2_400
    return base * (1 + 0.55 * math.sin((at.hour * 60 + at.minute) / 1440 * 2 * math.pi - 1.6 + phase / 3))


def series() -> list[tuple[str, str]]:
    rows = Deployment.objects.filter(active=True).values_list("model__name", "region__name")
    return sorted(set(rows))


def minutes(now: datetime, hours: float) -> None:
    """Create demand of every series until *now*, with a gap of ten minutes in the middle."""
    dice = random.Random(5)
    last = now.replace(second=0, microsecond=0)
    count = int(hours * 60)
    gap = range(count // 2, count // 2 + 20)
    rows = []
    for back in range(count, 0, -1):
        if back in gap:
            continue
        minute = last - timedelta(minutes=back)
        for model, region in series():
            output = level(model, region, minute) * dice.uniform(0.88, 1.13) * 60
            rows.append(
                MinuteRow(
                    minute=minute,
                    model=model,
                    region=region,
                    slo_class="interactive",
                    requests=int(output // 220),
                    prompt_tokens=int(output * PROMPT_TO_OUTPUT),
                    output_tokens=int(output),
                )
            )
    MinuteRow.objects.bulk_create(rows, batch_size=2_000)


def forecasts(now: datetime, hours: float) -> None:
    """Create a forecast of each series and quantity for every window of the last *hours*."""
    newest = datetime.fromtimestamp(now.timestamp() // WINDOW_S * WINDOW_S, UTC)
    rows = []
    for back in range(int(hours * 3600 // WINDOW_S), -1, -1):
        start = newest - timedelta(seconds=back * WINDOW_S)
        for model, region in series():
            rows += [forecast(model, region, quantity, start) for quantity in Quantity]
    Forecast.objects.bulk_create(rows, batch_size=500)


def forecast(model: str, region: str, quantity: str, start: datetime, note: str = "") -> Forecast:
    dice = random.Random(f"{model} {region} {quantity} {start}")
    scale = PROMPT_TO_OUTPUT if quantity == Quantity.PROMPT else 1.0
    mean = [
        level(model, region, start + timedelta(seconds=(at + 0.5) * WINDOW_S)) * scale * dice.uniform(0.97, 1.03)
        for at in range(AHEAD)
    ]
    wide = [0.035 + 0.006 * at for at in range(AHEAD)]

    def times(sign: int, sigmas: float) -> list[float]:
        return [round(value * (1 + sign * sigmas * width), 2) for value, width in zip(mean, wide, strict=True)]

    return Forecast(
        made_at=start + timedelta(seconds=40),
        model=model,
        region=region,
        quantity=quantity,
        forecaster="blend",
        window_s=WINDOW_S,
        start_at=start,
        mean=[round(value, 2) for value in mean],
        lower_80=times(-1, 1.28),
        upper_80=times(1, 1.28),
        lower_95=times(-1, 1.96),
        upper_95=times(1, 1.96),
        note=note,
    )


def policies() -> None:
    """Create one in each mode but off, for the first three models."""
    ScalingPolicy.objects.all().delete()
    choices = [
        ("lt_ua", PolicyMode.ASK),
        ("preserve", PolicyMode.SHADOW),
        ("lt_ua", PolicyMode.AUTO),
    ]
    for model, (strategy, mode) in zip(Model.objects.order_by("name"), choices, strict=False):
        ScalingPolicy.objects.create(model=model, strategy=strategy, mode=mode)


def plan(model: Model, now: datetime, status: str, deltas: tuple[int, ...] = (1, 0, -1), **values) -> ScalingPlan:
    """Create a plan that changes the places of *model* by *deltas*, in the order of their names."""
    targets, before, after = [], 0.0, 0.0
    bounds, prices = {}, {}
    rows = Deployment.objects.filter(model=model).select_related("region", "gpu_type").order_by("region__name")
    for row, delta in zip(rows, (deltas * len(rows))[: len(rows)], strict=True):
        region, gpu_type = row.region.name, row.gpu_type.name
        present = Instance.objects.filter(deployment=row, state__in=["ready", "loading", "provisioning"]).count()
        usd = float(row.gpu_type.on_demand_usd_per_hour) * row.tensor_parallel
        before, after = before + present * usd, after + (present + delta) * usd
        bounds[f"{region} {gpu_type}"] = [row.min_instances, row.max_instances]
        prices[gpu_type] = float(row.gpu_type.on_demand_usd_per_hour)
        needed = level(model.name, region, now + timedelta(hours=2)) * (1 + PROMPT_TO_OUTPUT)
        reason, place = "as it is", f"{model.name} on {gpu_type} in {region}"
        if delta > 0:
            reason = f"+{delta} {place}: the peak of {needed:,.0f} tok/s does not fit into {present} instances"
        elif delta < 0:
            reason = f"{delta} {place}: {present + delta} instances serve the peak of {needed:,.0f} tok/s"
        targets.append(
            {
                "region": region,
                "gpu_type": gpu_type,
                "present": present,
                "target": present + delta,
                "demand_tokens_per_s": round(needed, 1),
                "capability_tokens_per_s": CAPABILITY.get(gpu_type, 3_000.0),
                "reason": reason,
            }
        )
    gpu_types = {target["gpu_type"] for target in targets}
    defaults = {
        "round": uuid.UUID(int=int(now.timestamp())),
        "made_at": now,
        "valid_until": now + timedelta(hours=1),
        "model": model,
        "strategy": "lt_ua",
        "status": status,
        "targets": targets,
        "binding": [
            f"{model.name} in us-east: its share of the peak must be served there (epsilon 0.8)",
            "us-east: all 24 GPUs of h100-80gb are taken",
        ],
        "cost_usd_per_hour_before": round(before, 2),
        "cost_usd_per_hour_after": round(after, 2),
        "solver": "highs",
        "gap": 0.0021,
        "solve_ms": 31.4,
        "inputs": {
            "start_at": now.isoformat(),
            "window_s": WINDOW_S,
            "demand_of": {"band": "upper_80", "soon": 0.5, "kept": 0.7},
            "capability_tokens_per_s": {
                name: {"used": CAPABILITY.get(name, 3_000.0), "source": "measured", "windows": 41, "note": ""}
                for name in sorted(gpu_types)
            },
            "demand_tokens_per_s": {
                target["region"]: [target["demand_tokens_per_s"] * (0.8 + 0.01 * at) for at in range(AHEAD)]
                for target in targets
            },
            "buffer_tokens_per_s": {target["region"]: 120.0 for target in targets},
            "bounds": bounds,
            "usd_per_gpu_hour": prices,
            "epsilon": 0.8,
            "shortage": values.get("note", ""),
        },
    }
    return ScalingPlan.objects.create(**(defaults | values))


def plans(now: datetime) -> None:
    """Create past plans for every model: advice for the first, shadow for the second, in force for the third."""
    ends = [
        {"status": PlanStatus.ADVICE},
        {"status": PlanStatus.SHADOW, "deltas": (0,), "strategy": "preserve"},
        {
            "status": PlanStatus.CARRIED_OUT,
            "deltas": (1, 0, 0),
            "decided_by": "planner",
            "note": "us-west falls 412 tok/s short of its share",
        },
    ]
    for number, model in enumerate(Model.objects.order_by("name")[:3]):
        for back in (3, 2, 1):
            status = (PlanStatus.SUPERSEDED, PlanStatus.REJECTED, PlanStatus.CARRIED_OUT)[(back + number) % 3]
            by = "operator" if status != PlanStatus.SUPERSEDED else ""
            plan(model, now - timedelta(hours=back), status, decided_by=by, valid_until=now - timedelta(hours=back - 1))
        values = dict(ends[number % 3])
        applied = {"carried_out_at": now} if values["status"] == PlanStatus.CARRIED_OUT else {}
        plan(model, now - timedelta(minutes=12), values.pop("status"), **values, **applied)


def moves(now: datetime) -> None:
    kinds = (
        (MoveSource.PLAN, "lt_ua", 1, "the plan wants 3 instances, 2 are there"),
        (MoveSource.FLOOR, "reactive", 1, "use is 84%, above 70%"),
        (MoveSource.STRATEGY, "lt_ua", -1, "demand is 0.4 times the forecast, below 0.5"),
        (MoveSource.FLOOR, "reactive", -1, "use is 22%, below 30%, for 15 s"),
    )
    rows = list(Instance.objects.select_related("deployment__model", "deployment__region", "deployment__gpu_type"))
    newest = ScalingPlan.objects.filter(status=PlanStatus.CARRIED_OUT).first()
    for number, row in enumerate(rows[:14]):
        source, strategy, delta, reason = kinds[number % len(kinds)]
        ScalingMove.objects.create(
            at=now - timedelta(minutes=9 * (14 - number)),
            plan=newest if source == MoveSource.PLAN else None,
            source=source,
            strategy=strategy,
            model=row.deployment.model.name,
            region=row.deployment.region.name,
            gpu_type=row.deployment.gpu_type.name,
            instance=row.name,
            delta=delta,
            reason=reason,
        )


def furnish(now: datetime, hours: float = 8) -> None:
    """Create everything."""
    minutes(now, hours)
    forecasts(now, hours)
    policies()
    plans(now)
    moves(now)
