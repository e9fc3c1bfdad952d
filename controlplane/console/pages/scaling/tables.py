"""The scaling page's data: instances present and planned, their cost, and the reasons."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from controlplane.fleet.lifecycle.states import COMING, PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Model
from controlplane.planning import bundles, selectors
from controlplane.planning.models import ScalingPlan, ScalingPolicy
from controlplane.planning.parts import unavailable_reasons
from scheduling.bundles import BUNDLES, Bundle
from scheduling.policy import SETTINGS

OUT_OF_SERVICE = (
    InstanceState.DRAINING,
    InstanceState.SLEEPING,
    InstanceState.FAILED,
)  # neither serving nor on their way


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

    region: str
    states: Counter[str]
    target: int | None = None
    demand_tokens_per_s: float | None = None
    deployed: bool = True

    @property
    def not_ready(self) -> str:
        """Describe instances that are not ready: `1 loading, 2 draining`."""
        coming = sum(self.states[state] for state in COMING)
        words = [f"{coming} starting"] if coming else []
        words += [f"{self.states[state]} {state.label.lower()}" for state in OUT_OF_SERVICE if self.states[state]]
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class DeploymentLine(Amounts):
    """One row of the matrix: a model on a GPU type, with a cell for each region."""

    model: str
    gpu_type: str
    gpu_title: str
    tensor_parallel: int
    cells: tuple[Cell, ...]
    plan: ScalingPlan | None
    policy: ScalingPolicy | None
    first: bool  # of its model
    last: bool
    of_model: int  # lines of its model


@dataclass(frozen=True, kw_only=True)
class Matrix(Amounts):
    """Present against planned instances by model x GPU type and region."""

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
    deployments = deployments.select_related("model", "region", "gpu_type")
    if model:
        deployments = deployments.filter(model__name=model)
    places, policies = selectors.instances_by_place(), dict(ScalingPolicy.objects.in_bulk(field_name="model_id"))
    groups: dict[tuple[str, str], dict[str, Deployment]] = {}
    for row in deployments.order_by("model__name", "gpu_type__name", "region__name"):
        groups.setdefault((row.model.name, row.gpu_type.name), {})[row.region.name] = row
    regions = sorted({region for by_region in groups.values() for region in by_region})
    of_models = Counter(name for name, _ in groups)
    lines: list[DeploymentLine] = []
    for (name, gpu_type), by_region in groups.items():
        plan = plans.get(name)
        targets = _targets(plan, gpu_type) if plan and plan.valid_until > now else {}
        cells = tuple(
            _cell(
                region,
                places.get((name, region, gpu_type), Counter()),
                targets.get(region, {}),
                by_region.get(region),
            )
            for region in regions
        )
        some = next(iter(by_region.values()))
        lines.append(
            DeploymentLine(
                model=name,
                gpu_type=gpu_type,
                gpu_title=some.gpu_type.title,
                tensor_parallel=some.tensor_parallel,
                cells=cells,
                plan=plan,
                policy=policies.get(some.model_id),
                first=not lines or name != lines[-1].model,
                last=sum(line.model == name for line in lines) == of_models[name] - 1,
                of_model=of_models[name],
                **total(cells),
            )
        )
    return Matrix(regions=tuple((name, titles.get(name, name)) for name in regions), lines=tuple(lines), **total(lines))


def _targets(plan: ScalingPlan, gpu_type: str) -> dict[str, dict[str, Any]]:
    return {target["region"]: target for target in plan.targets if target["gpu_type"] == gpu_type}


def _cell(region: str, states: Counter[str], target: dict[str, Any], deployment: Deployment | None) -> Cell:
    present = sum(states[state] for state in PRESENT)
    planned = target.get("target", present)
    usd_each = deployment.tensor_parallel * float(deployment.gpu_type.on_demand_usd_per_hour) if deployment else 0.0
    return Cell(
        region=region,
        states=states,
        present=present,
        planned=planned,
        usd_now=present * usd_each,
        usd_planned=planned * usd_each,
        target=target.get("target"),
        demand_tokens_per_s=target.get("demand_tokens_per_s"),
        deployed=deployment is not None,
    )


WORDS = {
    "routing_policy": "router",
    "ordering_policy": "order",
    "strategy": "autoscaler",
    "parameters": "parameters",
    "FORECASTER": "forecaster",
    "PLAN_DEMAND": "demand planned for",
    "NIW_RELEASE": "release of held requests",
    "PLAN_NIW_BUFFER": "room for deferred work",
    "SPOT_DONATE": "spot pool",
    **{name: declared.knob.title for name, declared in SETTINGS.items()},
}
"""The page's names of the settings in a bundle."""


def bundle_choices(models: Sequence[Model]) -> dict[int, dict[str, Any]]:
    """Return by the key of each of *models* its bundle, and each bundle with its changes from now."""
    return {
        key: {
            "title": present.title,
            "name": present.name,
            "differs": "" if present.name != bundles.CUSTOM else _changes(present, present.nearest, "has"),
            "nearest": present.nearest.title,
            "choices": [
                {
                    "name": each.name,
                    "title": each.title,
                    "about": each.about,
                    "changes": _changes(present, each),
                    "unavailable_reason": unavailable_reasons(bundles.values_of(each)),
                }
                for each in BUNDLES.values()
            ],
        }
        for key, present in bundles.presents(models).items()
    }


def _changes(present: bundles.Present, bundle: Bundle, of: str = "") -> str:
    """Describe the changes of *bundle*: "router preserve instead of least_delay"; for a custom one, its values."""
    said = []
    for each in present.differences(bundle):
        first, second = (each.present, each.bundled) if of else (each.bundled, each.present)
        said.append(f"{WORDS[each.what]} {_said(first)} instead of {_said(second)}")
    return ", ".join(said)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "its own"
    return str(value) or "in use"
