"""Policy bundles: the router, order, strategy, forecaster and length model of a paper, which one model is given together.

A bundle is nothing but values. Which one a model has is read off its rows, and switching writes them. Where a value comes
from is in docs/routing.md (routers), docs/ordering.md, docs/scaling.md, docs/forecasting.md and docs/length-models.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.fleet.models import Deployment, Model, OrderingPolicy, RoutingPolicy
from controlplane.planning.models import ScalingPolicy
from controlplane.tuning.selectors import Values
from controlplane.tuning.selectors import read as read_settings

SETTINGS: Final = ("FORECASTER", "PLAN_DEMAND", "SPILL_ABOVE")
"""Those that a bundle sets for its model."""
NONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """*about* says in a sentence what comes of it."""

    name: str
    title: str
    about: str
    router: RoutingPolicy
    order: OrderingPolicy
    strategy: str
    parameters: dict[str, float] = field(default_factory=dict)
    forecaster: str
    length_model: str = ""
    spill_above: float = 0.7
    plan_demand: str = "strategy"

    def values(self) -> dict[str, Any]:
        """What a model has that has this bundle, by the names of its rows' columns and settings."""
        return {
            "routing_policy": str(self.router),
            "ordering_policy": str(self.order),
            "strategy": self.strategy,
            "parameters": self.parameters,
            "length_model": self.length_model,
            "FORECASTER": self.forecaster,
            "PLAN_DEMAND": self.plan_demand,
            "SPILL_ABOVE": self.spill_above,
        }


SAGESERVE: Final = "to the instance with the least tokens left, by the priority of the class"
BUNDLES: Final = {
    bundle.name: bundle
    for bundle in (
        Bundle(
            name="sageserve-lt-ua",
            title="SageServe LT-UA",
            about=f"Requests go {SAGESERVE}; instances follow hourly plans by ARIMA, towards them by use and by the gap.",
            router=RoutingPolicy.JOIN_SHORTEST_QUEUE,
            order=OrderingPolicy.PRIORITY,
            strategy="lt_ua",
            forecaster="arima",
        ),
        Bundle(
            name="sageserve-reactive",
            title="SageServe reactive",
            about=f"Requests go {SAGESERVE}; an instance comes above 70 % use and goes below 30 %, whatever is forecast.",
            router=RoutingPolicy.JOIN_SHORTEST_QUEUE,
            order=OrderingPolicy.PRIORITY,
            strategy="reactive",
            forecaster="arima",
        ),
        Bundle(
            name="preserve",
            title="PreServe",
            about="Requests go, as they come, where the look-ahead map has the least load; instances follow the mLSTM's "
            "next window, and one comes for each that the map shows overloaded.",
            router=RoutingPolicy.PRESERVE,
            order=OrderingPolicy.FCFS,
            strategy="preserve",
            forecaster="mlstm",
            length_model="preserve",
        ),
        Bundle(
            name="ssjf",
            title="SSJF",
            about="The shortest predicted request goes first, with aging, to the instance with the least tokens left. The "
            "paper has one instance: here they come and go by use alone.",
            router=RoutingPolicy.JOIN_SHORTEST_QUEUE,
            order=OrderingPolicy.SSJF,
            strategy="reactive",
            forecaster="blend",
            length_model="ssjf-reg-l1",
        ),
        Bundle(
            name="pilothouse",
            title="Pilothouse",
            about="The shortest predicted request goes first, where it delays itself and others the least, with prefixes; "
            "instances follow plans of the blend's band and pooled load.",
            router=RoutingPolicy.LEAST_DELAY,
            order=OrderingPolicy.SSJF,
            strategy="pilothouse",
            forecaster="blend",
        ),
    )
}
CUSTOM: Final = "custom"


@dataclass(frozen=True, slots=True)
class Difference:
    """*what* a model has and a bundle would give it."""

    what: str
    present: Any
    bundled: Any


@dataclass(frozen=True, slots=True)
class Present:
    """What a model's rows have now. *nearest* is its bundle, or the one that differs in the fewest values."""

    model: Model
    values: dict[str, Any]

    @property
    def nearest(self) -> Bundle:
        return min(BUNDLES.values(), key=lambda bundle: len(self.differences(bundle)))

    @property
    def name(self) -> str:
        """The name of its bundle, or `custom`."""
        return CUSTOM if self.differences(self.nearest) else self.nearest.name

    @property
    def title(self) -> str:
        return "Custom" if self.name == CUSTOM else self.nearest.title

    def differences(self, bundle: Bundle) -> list[Difference]:
        """What *bundle* would change."""
        return [
            Difference(what, self.values[what], value)
            for what, value in bundle.values().items()
            if self.values[what] != value
        ]


def present(model: Model) -> Present:
    """What *model* has now. Where its deployments differ, all their policies, with commas."""
    return presents([model])[model.pk]


def presents(models: Iterable[Model]) -> dict[int, Present]:
    """The same of several, by key; in three queries."""
    models = list(models)
    settings = read_settings()
    policies = {row.model_id: row for row in ScalingPolicy.objects.filter(model__in=models)}
    deployments: dict[int, list[Deployment]] = {}
    for row in Deployment.objects.filter(model__in=models).order_by("pk"):
        deployments.setdefault(row.model_id, []).append(row)
    return {
        model.pk: Present(model, _values(model, deployments.get(model.pk, []), policies.get(model.pk), settings))
        for model in models
    }


def _values(
    model: Model, deployments: Iterable[Deployment], policy: ScalingPolicy | None, settings: Values
) -> dict[str, Any]:
    rows = list(deployments)
    values: dict[str, Any] = {
        column: ", ".join(sorted({getattr(row, column) for row in rows})) or NONE
        for column in ("routing_policy", "ordering_policy")
    }
    values |= {
        "strategy": policy.strategy if policy else NONE,
        "parameters": policy.parameters if policy else {},
        "length_model": model.length_model,
    }
    in_force = settings.given(model.name)
    return values | {name: in_force[name] for name in SETTINGS}
