"""The matrix of the scaling page: instances present and planned by model, GPU type and region, and their cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from controlplane.fleet.lifecycle.states import COMING, PRESENT, InstanceState
from controlplane.fleet.models import Deployment
from controlplane.planning import selectors
from controlplane.planning.models import ScalingPlan, ScalingPolicy

OUT_OF_SERVICE = (InstanceState.DRAINING, InstanceState.SLEEPING, InstanceState.FAILED)
"""Neither serving nor on their way."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Instances as they are and as they are planned, and what they cost an hour."""

    present: int  # serving or on their way: what a target counts
    planned: int
    usd_now: float
    usd_planned: float

    @property
    def delta(self) -> int:
        return self.planned - self.present

    @property
    def usd_delta(self) -> float:
        return round(self.usd_planned - self.usd_now, 2)

    @property
    def tone(self) -> str:
        return "more" if self.delta > 0 else "fewer" if self.delta < 0 else ""


def total(parts: Sequence[Amounts]) -> dict[str, Any]:
    """Return the fields of `Amounts`, each summed over *parts*."""
    return {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Amounts)}


@dataclass(frozen=True, kw_only=True)
class Cell(Amounts):
    """Instances of one model in one region on one GPU type. *target* is None where no plan says anything."""

    not_ready: str  # `1 starting, 2 draining`
    target: int | None = None
    demand_tokens_per_s: float | None = None
    deployed: bool = True


@dataclass(frozen=True, kw_only=True)
class DeploymentLine(Amounts):
    """One row: a model on a GPU type, with a cell for each region, and what is known of the model."""

    model: str
    some: Deployment
    cells: tuple[Cell, ...]
    plan: ScalingPlan | None
    policy: ScalingPolicy | None
    of_model: int  # lines of its model
    first: bool  # of them
    last: bool


@dataclass(frozen=True, kw_only=True)
class Matrix(Amounts):
    regions: tuple[tuple[str, str], ...]  # name and title
    lines: tuple[DeploymentLine, ...]

    @property
    def totals(self) -> list[tuple[int, int]]:
        """Return present and planned instances of each region."""
        columns = zip(*(line.cells for line in self.lines), strict=True)
        return [(sum(cell.present for cell in column), sum(cell.planned for cell in column)) for column in columns]


def matrix(model: str, plans: Mapping[str, ScalingPlan], titles: Mapping[str, str], now: datetime) -> Matrix:
    """Return the matrix of *model*, or of every model (empty). Expired plans are left out."""
    deployments = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    places, policies = selectors.instances_by_place(), dict(ScalingPolicy.objects.in_bulk(field_name="model_id"))
    groups: dict[tuple[str, str], dict[str, Deployment]] = {}
    for row in deployments.select_related("model", "region", "gpu_type").order_by("model__name", "gpu_type__name"):
        if model in ("", row.model.name):
            groups.setdefault((row.model.name, row.gpu_type.name), {})[row.region.name] = row
    regions = sorted({region for by_region in groups.values() for region in by_region})
    left = Counter(of_models := Counter(name for name, _ in groups))
    lines = []
    for (name, gpu_type), by_region in groups.items():
        plan, some = plans.get(name), next(iter(by_region.values()))
        own = plan.targets if plan and plan.valid_until > now else []
        targets = {target["region"]: target for target in own if target["gpu_type"] == gpu_type}
        cells = [
            _cell(places.get((name, region, gpu_type), Counter()), targets.get(region, {}), by_region.get(region))
            for region in regions
        ]
        left[name] -= 1
        lines.append(
            DeploymentLine(
                model=name,
                some=some,
                cells=tuple(cells),
                plan=plan,
                policy=policies.get(some.model_id),
                of_model=of_models[name],
                first=left[name] == of_models[name] - 1,
                last=not left[name],
                **total(cells),
            )
        )
    return Matrix(regions=tuple((name, titles.get(name, name)) for name in regions), lines=tuple(lines), **total(lines))


def _cell(states: Counter[str], target: dict[str, Any], deployment: Deployment | None) -> Cell:
    present, coming = (sum(states[state] for state in of) for of in (PRESENT, COMING))
    planned = target.get("target", present)
    usd_each = deployment.tensor_parallel * float(deployment.gpu_type.on_demand_usd_per_hour) if deployment else 0.0
    words = [f"{coming} starting"] if coming else []
    words += [f"{states[state]} {state.label.lower()}" for state in OUT_OF_SERVICE if states[state]]
    return Cell(
        not_ready=", ".join(words),
        present=present,
        planned=planned,
        usd_now=present * usd_each,
        usd_planned=planned * usd_each,
        target=target.get("target"),
        demand_tokens_per_s=target.get("demand_tokens_per_s"),
        deployed=deployment is not None,
    )
