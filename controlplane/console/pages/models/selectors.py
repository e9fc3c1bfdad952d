"""Rows of the models page: each model with its endpoints, load, cost, policy and chart."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from controlplane.alerts.problems import slo_level
from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.formats import percent
from controlplane.console.live.state import SATURATED, LiveState
from controlplane.console.pages.forecast.charts import demand_and_forecast, unit_title
from controlplane.console.pages.forecast.selectors import OutlookFilter, see
from controlplane.fleet.attainment import Attainment, worst
from controlplane.fleet.lifecycle.states import COMING, InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile
from controlplane.gateway.selectors import attainments
from controlplane.planning import bundles
from controlplane.planning.capacity import EndpointLoad, endpoint_loads
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.tuning.selectors import tuned

KEY = "model"
BACK = 3  # times as far as forecasts look ahead
EVERY_S = 10
NO_DEMAND = "No request in the time shown. The first one that ends makes the first minute of demand."


def hours_back() -> float:
    return BACK * tuned().FORECAST_WINDOWS * tuned().FORECAST_WINDOW_S / 3600


def demand_and_capacity(model: str, quantity: str, now: datetime) -> Chart:
    """As on the forecast page, of all classes and regions, without a *model* of all; built once in ten seconds."""

    def build() -> list[Chart]:
        chart = demand_and_forecast(
            see(OutlookFilter(model, "", quantity, hours_back(), EVERY_CLASS), now).outlook, NO_DEMAND
        )
        over = "regions" if model else "models that generate"
        caption = f"{unit_title(quantity)} per second, all regions, without opportunistic work; sums over {over}"
        return [
            replace(
                chart,
                key=KEY,
                title="Demand and capacity" if quantity == TOKENS else "Demand",
                caption=caption,
                size="medium",
            )
        ]

    return once((KEY, model, quantity, int(now.timestamp()) // EVERY_S), build)[0]


def chart_of(model: str, now: datetime) -> Chart:
    return demand_and_capacity(model, TOKENS, now)


TIMES = "\N{MULTIPLICATION SIGN}"
SLO_OVER = timedelta(hours=1)
Ratio = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One model in one region: what its deployments allow, its instances, and what the gateway says of it."""

    key: str  # as in the live table of endpoints
    region: str
    title: str
    least: int
    most: int
    states: Counter[str]
    coming_since: datetime | None  # the eldest of those that start
    load: EndpointLoad
    live: dict[str, Any]
    deployments: tuple[Deployment, ...]
    uses: tuple[float, ...]  # of its instances, the least first
    ttft_p95_ms: Ratio  # of its slowest instance
    slo: Attainment | None  # of its worst class over the last hour, of those that were served here

    @property
    def ready(self) -> int:
        return self.states[InstanceState.READY]

    @property
    def use(self) -> Ratio:
        """Of its fullest instance."""
        return self.uses[-1] if self.uses else None

    @property
    def coming(self) -> int:
        return sum(self.states[state] for state in COMING)

    @property
    def status(self) -> str:
        """The mark, by the names of instances' states: the worst that can be said of it."""
        if self.coming:
            return "loading"
        if not self.ready:
            return "failed" if self.least or self.states[InstanceState.FAILED] else "stopped"
        return "saturated" if (self.use or 0.0) > SATURATED else "ready"

    @property
    def said(self) -> str:
        """The word next to the number; how long a start takes by now is counted on by the page."""
        match self.status:
            case "loading":
                return f"{self.coming} starting"
            case "failed":
                return (
                    f"{self.states[InstanceState.FAILED]} failed" if self.states[InstanceState.FAILED] else "none ready"
                )
            case "saturated":
                return f"use {percent(self.use)}"
        return "ready" if self.ready else "none"

    @property
    def usd_per_hour(self) -> float:
        return self.load.usd_per_hour


def sum_of_known(values: Iterable[Ratio]) -> Ratio:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model. *endpoints* are in the order of the page's regions, None where it is not deployed."""

    model: Model
    endpoints: tuple[Endpoint | None, ...]
    hardware: str
    estimated: bool  # whether a profile of its deployments is not measured
    present: bundles.Present
    live: dict[str, Any]

    @property
    def there(self) -> list[Endpoint]:
        return [endpoint for endpoint in self.endpoints if endpoint]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def ready(self) -> int:
        return sum(endpoint.ready for endpoint in self.there)

    @property
    def most(self) -> int:
        return sum(endpoint.most for endpoint in self.there)

    @property
    def of_most(self) -> Ratio:
        return self.ready / self.most if self.most else None

    @property
    def usd_per_hour(self) -> float:
        return sum(endpoint.usd_per_hour for endpoint in self.there)

    @property
    def capacity(self) -> Ratio:
        return sum_of_known(endpoint.load.capacity_tokens_per_s for endpoint in self.there)

    @property
    def demand(self) -> Ratio:
        return sum_of_known(endpoint.load.demand_tokens_per_s for endpoint in self.there)

    @property
    def load(self) -> Ratio:
        """Demand as a share of the capacity, over all regions."""
        return self.demand / self.capacity if self.demand is not None and self.capacity else None

    @property
    def slo_met(self) -> Ratio:
        return self.live.get("slo_met_ratio")

    @property
    def ttft_p95_ms(self) -> Ratio:
        return self.live.get("ttft_p95_ms")

    @property
    def below(self) -> bool:
        return bool(slo_level(self.live))

    @property
    def policy(self) -> str:
        return self.present.title

    @property
    def about(self) -> str:
        """Return the meaning of its policy; for a custom one, the nearest bundle."""
        nearest = self.present.nearest
        if self.present.name != bundles.CUSTOM:
            return nearest.about
        own = ", ".join(bundles.WORDS[each.what] for each in self.present.differences(nearest))
        return f"Based on {nearest.title}, with its own {own}."


def regions() -> list[tuple[str, str]]:
    """(name, title) of every region where something is deployed."""
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    return sorted(set(active.values_list("region__name", "region__title")))


def model_rows(state: LiveState, now: datetime) -> list[ModelRow]:
    """Every active model by name."""
    models = list(Model.objects.filter(active=True).select_related("fallback").order_by("name"))
    places = [name for name, _ in regions()]
    deployments: dict[str, list[Deployment]] = defaultdict(list)
    for row in Deployment.objects.filter(active=True, model__in=models, region__active=True).select_related(
        "model", "region", "gpu_type"
    ):
        deployments[row.model.name].append(row)
    presents = bundles.presents(models)
    estimated = set(PerformanceProfile.objects.filter(estimated=True).values_list("model__name", flat=True))
    by_model = _endpoints(state, deployments, now)
    return [
        ModelRow(
            model=model,
            endpoints=tuple(by_model.get((model.name, place)) for place in places),
            hardware=_hardware(deployments[model.name]),
            estimated=model.name in estimated,
            present=presents[model.pk],
            live=state.tile(model.name) or {},
        )
        for model in models
    ]


def _hardware(deployments: Sequence[Deployment]) -> str:
    kinds = sorted({f"{row.tensor_parallel} {TIMES} {row.gpu_type.title}" for row in deployments})
    return " or ".join(kinds) or "not deployed"


def _endpoints(
    state: LiveState, deployments: dict[str, list[Deployment]], now: datetime
) -> dict[tuple[str, str], Endpoint]:
    """By (model, region)."""
    rows = [row for of_model in deployments.values() for row in of_model]
    of_deployment: dict[int, list[Instance]] = defaultdict(list)
    for instance in Instance.objects.filter(deployment__in=rows):
        of_deployment[instance.deployment_id].append(instance)
    live = {(row["model"], row["region"]): row for row in state.tables["endpoints"]}
    loads = state.instance_rows()
    measured = endpoint_loads(now)
    served = attainments(now - SLO_OVER)
    grouped: dict[tuple[str, str], list[Deployment]] = defaultdict(list)
    for row in rows:
        grouped[row.model.name, row.region.name].append(row)
    endpoints = {}
    for (model, region), group in grouped.items():
        here = [instance for row in group for instance in of_deployment[row.pk]]
        loaded = [loads[instance.pk] for instance in here if instance.pk in loads]
        endpoints[model, region] = Endpoint(
            key=f"{model} {region}",
            region=region,
            title=group[0].region.title,
            least=sum(row.min_instances for row in group),
            most=sum(row.max_instances for row in group),
            states=Counter(instance.state for instance in here),
            coming_since=min((row.state_changed_at for row in here if row.state in COMING), default=None),
            load=measured[model, region],
            live=live.get((model, region), {}),
            deployments=tuple(group),
            uses=tuple(sorted(each["use_ratio"] for each in loaded if each["use_ratio"] is not None)),
            ttft_p95_ms=max((each["ttft_p95_ms"] for each in loaded if each["ttft_p95_ms"] is not None), default=None),
            slo=worst(served.get((model, region), {}).values()),
        )
    return endpoints
