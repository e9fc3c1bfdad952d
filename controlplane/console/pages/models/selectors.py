"""Models as pages show them: a row of the list, and what the page of one adds."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from controlplane.console.formats import duration, milliseconds, percent
from controlplane.console.live.state import SATURATED, LiveState
from controlplane.console.live.tiles import slo_level
from controlplane.fleet.attainment import Attainment, together, worst
from controlplane.fleet.lifecycle.states import COMING, InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile, SloClass
from controlplane.gateway.selectors import attainments
from controlplane.planning import bundles
from controlplane.planning.capacity import EndpointLoad, endpoint_loads, total
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.planning.forecasts.selectors import ForecastWindow, NotServedHere, not_served_here
from controlplane.planning.outlook import peaks

TIMES = "\N{MULTIPLICATION SIGN}"
SLO_OVER = timedelta(hours=1)
BUDGET_OVER = timedelta(days=1)
Ratio = float | None
ByRegion = dict[str, list[Deployment]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One model in one region: what its deployments allow, its instances, and what the gateway says of it."""

    region: str
    title: str
    least: int
    most: int
    states: Counter[str]
    coming_since: datetime | None  # the eldest of those that start
    load: EndpointLoad
    not_here: NotServedHere
    peak: ForecastWindow | None  # the highest window of its forecast
    live: dict[str, Any]
    deployments: list[Deployment]
    use: float  # of its fullest instance
    ttft_p95_ms: Ratio  # of its slowest instance
    slo: Attainment | None  # of its worst class over the last hour, of those that were served here

    @property
    def state(self) -> tuple[str, str]:
        """Return the mark, by the names of instances' states, and the words beside it: the worst that can be said of it."""
        coming, failed = sum(self.states[state] for state in COMING), self.states[InstanceState.FAILED]
        if coming:
            return "loading", f"{coming} starting"
        if not self.load.ready and (self.least or failed):
            return "failed", f"{failed} failed" if failed else "none ready"
        if not self.load.ready:
            return "stopped", "none"
        return ("saturated", f"use {percent(self.use)}") if self.use > SATURATED else ("ready", "")

    @property
    def forecast_load(self) -> Ratio:
        """Return the forecast's peak as a share of the capacity that there is now."""
        return self.peak.mean / able if self.peak and (able := self.load.capacity_tokens_per_s) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model with its endpoints by region."""

    model: Model
    there: list[Endpoint]
    sums: EndpointLoad  # of its endpoints
    hardware: str
    estimated: bool  # whether a profile of its deployments is not measured
    present: bundles.Present
    peak: ForecastWindow | None
    live: dict[str, Any]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def most(self) -> int:
        return sum(endpoint.most for endpoint in self.there)

    @property
    def forecast_load(self) -> Ratio:
        return self.peak.mean / able if self.peak and (able := self.sums.capacity_tokens_per_s) else None

    @property
    def below(self) -> bool:
        return bool(slo_level(self.live))

    @property
    def about(self) -> str:
        """Return the meaning of its policy; for a custom one, the nearest bundle."""
        nearest = self.present.nearest
        if self.present.name != bundles.CUSTOM:
            return nearest.about
        own = ", ".join(bundles.WORDS[each.what] for each in self.present.differences(nearest))
        return f"Based on {nearest.title}, with its own {own}."


def model_rows(state: LiveState, now: datetime, name: str = "") -> list[ModelRow]:
    """Return every active model by name, or the one of that *name*."""
    named = Model.objects.filter(active=True).select_related("fallback").order_by("name")
    models = list(named.filter(name=name) if name else named)
    active = Deployment.objects.filter(active=True, model__in=models, region__active=True)
    deployments: dict[str, ByRegion] = defaultdict(lambda: defaultdict(list))
    hardware: dict[str, set[str]] = defaultdict(set)
    for row in active.select_related("model", "region", "gpu_type").order_by("region__title", "pk"):
        deployments[row.model.name][row.region.name].append(row)
        hardware[row.model.name].add(f"{row.tensor_parallel} {TIMES} {row.gpu_type.title}")
    presents, expected = bundles.presents(models), peaks(now)
    estimated = set(PerformanceProfile.objects.filter(estimated=True).values_list("model__name", flat=True))
    endpoints = _endpoints(state, deployments, expected, now)
    return [
        ModelRow(
            model=model,
            there=endpoints[model.name],
            sums=total(endpoint.load for endpoint in endpoints[model.name]),
            hardware=" or ".join(sorted(hardware[model.name])) or "not deployed",
            estimated=model.name in estimated,
            present=presents[model.pk],
            peak=expected.get(model.name),
            live=state.tile(model.name) or {},
        )
        for model in models
    ]


def _endpoints(
    state: LiveState, deployments: dict[str, ByRegion], expected: dict[Any, ForecastWindow], now: datetime
) -> dict[str, list[Endpoint]]:
    """Return the endpoints of each model."""
    of_deployment: dict[int, list[Instance]] = defaultdict(list)
    for instance in Instance.objects.filter(deployment__model__name__in=deployments):
        of_deployment[instance.deployment_id].append(instance)
    live = {(row["model"], row["region"]): row for row in state.tables["endpoints"]}
    loads, measured = state.instance_rows(), endpoint_loads(now, state.tables["endpoints"])
    elsewhere, served = not_served_here(TOKENS, now, EVERY_CLASS), attainments(now - SLO_OVER)
    endpoints: dict[str, list[Endpoint]] = defaultdict(list)
    for place, group in [((name, region), rows) for name, own in deployments.items() for region, rows in own.items()]:
        here = [instance for row in group for instance in of_deployment[row.pk]]
        loaded = [loads[instance.pk] for instance in here if instance.pk in loads]
        endpoints[place[0]].append(
            Endpoint(
                region=place[1],
                title=group[0].region.title,
                least=sum(row.min_instances for row in group),
                most=sum(row.max_instances for row in group),
                states=Counter(instance.state for instance in here),
                coming_since=min((row.state_changed_at for row in here if row.state in COMING), default=None),
                load=measured[place],
                not_here=elsewhere.get(place, NotServedHere()),
                peak=expected.get(place),
                live=live.get(place, {}),
                deployments=group,
                use=max((each["use_ratio"] or 0.0 for each in loaded), default=0.0),
                ttft_p95_ms=max(filter(None, (each["ttft_p95_ms"] for each in loaded)), default=None),
                slo=worst(served.get(place, {}).values()),
            )
        )
    return endpoints


def tiles(rows: Sequence[ModelRow]) -> dict[str, Any]:
    """Return the numbers at the head, over all models."""
    return {
        "models": len(rows),
        "endpoints": sum(len(row.there) for row in rows),
        "sums": total(endpoint.load for row in rows for endpoint in row.there),
        "most": sum(row.most for row in rows),
        "below": sorted((row for row in rows if row.below), key=lambda row: -(row.live["slo_burn"] or 0.0)),
    }


# One model


class ClassService(NamedTuple):
    """Attainment of a class over the last hour and day, and its promise in words."""

    title: str
    promise: str
    hour: Attainment
    day: Attainment


def classes_of(model: str, now: datetime) -> list[ClassService]:
    """Return every SLO class, including those without judged requests."""
    hour, day = (
        together(row for by_class in attainments(now - over, model=model).values() for row in by_class.values())
        for over in (SLO_OVER, BUDGET_OVER)
    )
    rows = []
    for row in SloClass.objects.all():
        none = Attainment(row.name, 0, 0, row.percentile / 100)
        rows.append(ClassService(row.title, promise_of(row), hour.get(row.name, none), day.get(row.name, none)))
    return rows


def promise_of(slo_class: SloClass) -> str:
    """Return the promise of a class in words: "TTFT 1.00 s, ITL 200 ms"."""
    targets = {name: getattr(slo_class, f"{name.lower()}_target_ms") for name in ("TTFT", "ITL", "E2E")}
    words = [f"{name} {milliseconds(target)}" for name, target in targets.items() if target is not None]
    if slo_class.deadline_s is not None:
        words.append(f"done in {duration(slo_class.deadline_s)}")
    return ", ".join(words) or "nothing promised"


def adapters_served(model: Model) -> str:
    """Say how many instances of *model* serve LoRA adapters, and what to do about the others."""
    rows = Instance.objects.launched().filter(deployment__model=model).select_related("deployment")
    instances = [row for row in rows if row.state != InstanceState.STOPPED]
    if not Deployment.objects.filter(model=model, active=True, max_loras__gt=0).exists():
        return (
            "No deployment serves adapters: give one room for adapters on the GPU (engine settings), then roll it out."
        )
    able = sum(row.adapter_slots[0] > 0 for row in instances)
    words = f"{able} of {len(instances)} instance{'s' * (len(instances) != 1)} serve{'s' * (able == 1)} adapters."
    late = [row for row in instances if row.deployment.max_loras and not row.adapter_slots[0]]
    return words + (f" {len(late)} started before that was set: roll the deployment out." if late else "")
