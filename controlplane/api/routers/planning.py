"""`/api`: forecasts, scaling policies, plans and moves. Viewers read, operators decide."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Query, Router, Schema
from ninja.pagination import paginate

from controlplane.accounts.models import Role
from controlplane.api import conditions
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.conditions import IfMatch
from controlplane.api.resources import add_list, add_operations, schema_of
from controlplane.api.schemas import Described, Items, NewestFirst, Page, RowSchema, Strict
from controlplane.fleet.models import Model
from controlplane.gateway.selectors import attainments
from controlplane.planning import bundles, capacity, selectors, services
from controlplane.planning.models import (
    Backtest,
    Forecast,
    PolicyMode,
    Quantity,
    ScalingPlan,
    ScalingPolicy,
    mode_of,
)
from controlplane.resources.plans import MOVES, PLANS
from controlplane.resources.resource import Column
from controlplane.rows import narrowed
from scheduling.bundles import BUNDLES

router = Router(auth=VIEWERS, tags=["Scaling"])


class ClassServiceOut(Described):
    slo_class: str
    met: int
    judged: int
    met_ratio: float | None
    objective_ratio: float
    """Share promised by the class's percentile."""
    burn: float | None
    """Misses divided by those the objective allows; above 1 the error budget runs out early."""


class EndpointOut(Described):
    """One model in one region. Tokens are prompt plus output, over all SLO classes, as planners count."""

    model: str
    region: str
    instances_ready: int
    gpus: int
    """GPUs of instances that serve or are starting."""
    usd_per_hour: float
    demand_tokens_per_s: float | None
    """Demand from callers of the region over the last ten minutes; null while nothing is counted."""
    capacity_tokens_per_s: float | None
    """Capacity of ready instances in the newest plan; null without a plan."""
    load_ratio: float | None
    slo_classes: list[ClassServiceOut]
    """Last hour, by serving region."""


class ForecastOut(RowSchema):
    """Forecast of one series. Lists have one element per window, in tokens per second."""

    class Meta:
        model = Forecast
        fields = ("id", "made_at", "model", "region", "slo_class", "forecaster", "window_s", "start_at", "note")

    quantity: Quantity
    mean: list[float | None]
    lower_80: list[float | None]
    upper_80: list[float | None]
    lower_95: list[float | None]
    upper_95: list[float | None]


class BacktestOut(RowSchema):
    class Meta:
        model = Backtest
        fields = ("id", "made_at", "source", "window_s", "horizon_windows")

    rows: list[dict[str, Any]]
    """One row per forecaster, series and quantity."""


class PolicyOut(Described):
    model: str
    strategy: str | None
    """Null where the model has no policy: only the reactive floor scales it."""
    mode: PolicyMode
    parameters: dict[str, Any]
    changed_at: datetime | None


class PolicyIn(Strict):
    strategy: str = Field(max_length=40)
    mode: PolicyMode
    parameters: dict[str, Any] = {}
    """Strategy parameters by name; omitted ones have their defaults."""
    reason: str = Field("", max_length=255)


class BundleOut(Described):
    """Router, order, strategy, forecaster and length model, applied to a model together."""

    name: str
    title: str
    about: str
    values: dict[str, Any]


class ModelBundleOut(Described):
    model: str
    bundle: str
    """`custom` where the values match no bundle."""
    nearest: str
    """Bundle that differs in the fewest values."""
    values: dict[str, Any]
    differs: dict[str, Any]
    """Values of the nearest bundle that differ, by name."""


class BundleIn(Strict):
    bundle: str = Field(max_length=40)
    reason: str = Field("", max_length=255)


class PartsIn(Strict):
    """Policy parts; omitted parts stay unchanged."""

    routing_policy: str | None = None
    ordering_policy: str | None = None
    strategy: str | None = None
    FORECASTER: str | None = None
    reason: str = Field("", max_length=255)


PlanOut = schema_of(PLANS, "PlanOut")
PlanDetail = schema_of(
    PLANS,
    "PlanDetail",
    "",
    Column("inputs", type=dict[str, Any], about="Demand, capability, prices and bounds that it was made from."),
)
MoveOut = schema_of(MOVES, "MoveOut", "One instance added or taken away by scaling, and why.")


class ForecastQuery(Schema):
    model: str = ""
    region: str = ""
    slo_class: str = Field(
        "", description="Empty: all interactive classes together; `+`: all deferred ones."
    )
    quantity: Quantity | None = None


@router.get("/endpoints", response=Items[EndpointOut])
def list_endpoints(request: ApiRequest, model: str = "", region: str = "") -> dict[str, Any]:
    """Return demand, capacity, load, GPUs, cost and service by SLO class of every endpoint, as the console shows them."""
    now = timezone.now()
    served = attainments(now - timedelta(hours=1))
    loads = capacity.endpoint_loads(now)
    return {
        "items": [
            {
                "model": load.model,
                "region": load.region,
                "instances_ready": load.ready,
                "gpus": load.gpus,
                "usd_per_hour": load.usd_per_hour,
                "demand_tokens_per_s": load.demand_tokens_per_s,
                "capacity_tokens_per_s": load.capacity_tokens_per_s,
                "load_ratio": load.load,
                "slo_classes": [one.as_dict() for one in sorted(served.get(place, {}).values())],
            }
            for place, load in loads.items()
            if model in ("", load.model) and region in ("", load.region)
        ]
    }


@router.get("/forecasts", response=Page[ForecastOut])
@paginate(NewestFirst)
def list_forecasts(request: ApiRequest, query: Query[ForecastQuery]) -> QuerySet[Forecast]:
    """List demand forecasts, newest first: of all interactive SLO classes together, or all deferred ones.

    The two are never mixed, so sums over a list count no token twice. Forecasts are deleted after
    `PILOTHOUSE_FORECAST_KEEP_HOURS`.
    """
    rows = Forecast.objects.filter(slo_class=query.slo_class)
    return narrowed(rows, model=query.model, region=query.region, quantity=query.quantity)


@router.get("/backtests", response=Page[BacktestOut])
@paginate(NewestFirst)
def list_backtests(request: ApiRequest) -> QuerySet[Backtest]:
    """List backtests of the forecasters, newest first."""
    return Backtest.objects.all()


@router.get("/scaling/policies", response=Items[PolicyOut])
def list_policies(request: ApiRequest) -> dict[str, Any]:
    """Return the scaling policy of each active model."""
    return {"items": [_policy(model, policy) for model, policy in selectors.policies()]}


@router.get("/scaling/policies/{name:model}", response=PolicyOut)
def get_policy(request: ApiRequest, model: str) -> dict[str, Any]:
    """The scaling policy of *model*, with the `ETag` that its policy bundle has too."""
    row = _model(model)
    conditions.tag(request, *bundles.rows_of(row))
    return _policy(row, ScalingPolicy.objects.filter(model=row).first())


@router.put("/scaling/policies/{name:model}", response=PolicyOut)
def set_policy(request: ApiRequest, model: str, body: PolicyIn, if_match: str = IfMatch) -> dict[str, Any]:
    """Set the scaling policy of *model*. Plans awaiting approval under another strategy or mode are superseded.

    In mode `auto`, instances move without approval; try `shadow` first to see the effect.
    """
    user, row = request.auth.require(Role.OPERATOR), _model(model)
    conditions.check(if_match, *bundles.rows_of(row), fields=(*bundles.SET, "mode"))
    return _policy(row, services.set_policy(row, body.strategy, body.mode, body.parameters, user, body.reason))


@router.get("/scaling/bundles", response=Items[BundleOut])
def list_bundles(request: ApiRequest) -> dict[str, Any]:
    """List the policy bundles."""
    names = ("name", "title", "about")
    of_all = [
        {name: getattr(each, name) for name in names} | {"values": bundles.values_of(each)} for each in BUNDLES.values()
    ]
    return {"items": of_all}


@router.get("/models/{name:model}/bundle", response=ModelBundleOut)
def get_bundle(request: ApiRequest, model: str) -> dict[str, Any]:
    """Return the bundle that *model* matches or is nearest to, and the differences; with their `ETag`."""
    row = _model(model)
    conditions.tag(request, *bundles.rows_of(row))
    return _bundle(bundles.present(row))


@router.put("/models/{name:model}/bundle", response=ModelBundleOut)
def switch_bundle(request: ApiRequest, model: str, body: BundleIn, if_match: str = IfMatch) -> dict[str, Any]:
    """Apply a bundle to *model* from the next decision, without a restart. The mode stays."""
    user, row = request.auth.require(Role.OPERATOR), _model(model)
    conditions.check(if_match, *bundles.rows_of(row), fields=(*bundles.SET, "mode"))
    return _bundle(services.switch_bundle(row, body.bundle, user, body.reason))


@router.patch("/models/{name:model}/bundle", response=ModelBundleOut)
def switch_parts(request: ApiRequest, model: str, body: PartsIn, if_match: str = IfMatch) -> dict[str, Any]:
    """Change parts of the policy of *model*: router, order, strategy, forecaster or length model. One event; no restart."""
    user, row = request.auth.require(Role.OPERATOR), _model(model)
    conditions.check(if_match, *bundles.rows_of(row), fields=(*bundles.SET, "mode"))
    values = body.model_dump(exclude={"reason"}, exclude_none=True)
    return _bundle(services.switch_parts(row, values, user, body.reason))


add_list(
    router,
    PLANS,
    PlanOut,
    "Scaling plans, newest first; `/api/scaling/plans/{id}` has the inputs too.",
    path="/scaling/plans",
    leave_out=("inputs",),
)


@router.get("/scaling/plans/{int:plan_id}", response=PlanDetail)
def get_plan(request: ApiRequest, plan_id: int) -> ScalingPlan:
    return get_object_or_404(selectors.plans(), pk=plan_id)


add_operations(router, PLANS, PlanDetail, "/scaling/plans/{int:pk}")
add_list(
    router,
    MOVES,
    MoveOut,
    "Instances that scaling added or took away, newest first, each with its reason.",
    path="/scaling/moves",
)


def _model(name: str) -> Model:
    return get_object_or_404(Model, name=name, active=True)


def _bundle(present: bundles.Present) -> dict[str, Any]:
    return {
        "model": present.model.name,
        "bundle": present.name,
        "nearest": present.nearest.name,
        "values": present.values,
        "differs": {each.what: each.bundled for each in present.differences(present.nearest)},
    }


def _policy(model: Model, policy: ScalingPolicy | None) -> dict[str, Any]:
    if policy is None:
        return {"model": model.name, "strategy": None, "mode": mode_of(policy), "parameters": {}, "changed_at": None}
    names = ("strategy", "mode", "parameters", "changed_at")
    return {"model": model.name, **{name: getattr(policy, name) for name in names}}
