"""Reads of capacity plans, and of what a question may name: SLO classes, and GPU types with their prices."""

from collections.abc import Mapping

from controlplane.fleet.models import Deployment, Device, GpuType, SloClass, SloKind
from controlplane.planning.models import RegionLoss
from controlplane.planning.sizing.question import Question
from scheduling.fleet.profile_estimate import facts_of

Types = Mapping[str, tuple[GpuType, float]]
"""GPU types by name, with the dollars of one GPU an hour."""


def newest_loss() -> RegionLoss | None:
    """Return the newest verdict on the loss of each region."""
    return RegionLoss.objects.first()


def gpu_types(wanted: Mapping[str, float | None]) -> Types:
    """Return GPU types by name with the dollars of one an hour; unsaved ones for those that only data sheets know.

    Empty *wanted*: the types of active deployments. Raise ValueError naming the type that is unknown or has no price.
    """
    rows = {row.name: row for row in GpuType.objects.filter(device=Device.GPU)}
    used = Deployment.objects.filter(active=True, model__active=True).values_list("gpu_type__name", flat=True)
    known = {}
    for name, usd in (wanted or dict.fromkeys(sorted(set(used) & rows.keys()))).items():
        row, facts = rows.get(name), facts_of(name)
        if row is None and facts is None:
            raise ValueError(f"gpus.{name}: nothing is known of this GPU type: add it with its memory, or leave it out")
        if row is None and usd is None:
            raise ValueError(f"gpus.{name}: no price is kept for it: say what one costs an hour")
        if row is None and facts is not None:
            row = GpuType(name=name, title=facts.title, memory_bytes=facts.memory_bytes)
        assert row is not None
        known[name] = row, float(row.on_demand_usd_per_hour) if usd is None else usd
    if not known:
        raise ValueError("gpus: choose at least one GPU type")
    return known


def classes_of(question: Question) -> dict[str, SloClass]:
    """Return the SLO classes of *question* with its promises, unsaved. Raise ValueError for an unknown one."""
    rows = {row.name: row for row in SloClass.objects.all()}
    for name in question.promises.keys() - rows.keys():
        raise ValueError(f"promises: there is no SLO class {name!r}; there is {', '.join(rows)}")
    usual = {name for name, row in rows.items() if row.kind != SloKind.OPPORTUNISTIC and row.promises}
    chosen = {name: row for name, row in rows.items() if name in (question.promises or usual)}
    for name, promise in question.promises.items():
        row = chosen[name]
        for target in ("ttft", "itl", "e2e"):
            if (given := getattr(promise, f"{target}_ms")) is not None:
                setattr(row, f"{target}_target_ms", given)
        row.percentile = promise.percentile or row.percentile
    if not chosen:
        raise ValueError("promises: no SLO class promises anything: choose one with a target")
    return chosen
