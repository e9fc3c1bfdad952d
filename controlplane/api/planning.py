"""`/api`: forecasts, scaling policies, plans, moves, and how strategies compare. Viewers read, operators decide."""

from typing import Any

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from ninja import Query, Router, Schema
from pydantic import Field

from controlplane.accounts.models import Role
from controlplane.api.callers import PEOPLE, ApiRequest
from controlplane.api.schemas import (
    BacktestOut,
    ComparisonOut,
    DecisionIn,
    ForecastOut,
    Items,
    MoveOut,
    Page,
    PlanDetail,
    PlanOut,
    PolicyIn,
    PolicyOut,
)
from controlplane.fleet.models import Model
from controlplane.planning import selectors, services
from controlplane.planning.models import (
    Backtest,
    Forecast,
    MoveSource,
    PlanStatus,
    PolicyMode,
    Quantity,
    ScalingPlan,
    ScalingPolicy,
    StrategyComparison,
)

router = Router(auth=PEOPLE, tags=["Scaling"])


class PageQuery(Schema):
    cursor: int | None = None
    limit: int = Field(50, ge=1, le=500)


class ForecastQuery(PageQuery):
    model: str = ""
    region: str = ""
    slo_class: str = Field("", description="One class; empty: all classes together.")
    quantity: Quantity | None = None


class PlanQuery(PageQuery):
    model: str = ""
    status: PlanStatus | None = None
    strategy: str = ""


class MoveQuery(PageQuery):
    model: str = ""
    region: str = ""
    source: MoveSource | None = None


@router.get("/forecasts", response=Page[ForecastOut])
def list_forecasts(request: ApiRequest, query: Query[ForecastQuery]) -> dict[str, Any]:
    """Forecasts of demand, newest first: of all SLO classes together, or of the one that `slo_class` names.

    They are never mixed, so that sums over a list count no token twice. After `PILOTHOUSE_FORECAST_KEEP_HOURS` those of a
    series that were made within an hour are one row, with what was said last of each window; its note says so.
    """
    exact = {"model": query.model, "region": query.region, "quantity": query.quantity}
    rows = Forecast.objects.filter(slo_class=query.slo_class)
    return _page(request, rows.filter(**{name: value for name, value in exact.items() if value}), query)


@router.get("/backtests", response=Page[BacktestOut])
def list_backtests(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """How well each forecaster would have done, newest first."""
    return _page(request, Backtest.objects.all(), query)


@router.get("/scaling/policies", response=Items[PolicyOut])
def list_policies(request: ApiRequest) -> dict[str, Any]:
    """How each active model is scaled."""
    request.auth.require(Role.VIEWER)
    return {"items": [_policy(model, policy) for model, policy in selectors.policies()]}


@router.put("/scaling/policies/{path:model}", response=PolicyOut)
def set_policy(request: ApiRequest, model: str, body: PolicyIn) -> dict[str, Any]:
    """Set how *model* is scaled. Plans that waited for approval under another strategy or mode are superseded.

    In the mode `auto` instances move without anybody being asked; `shadow` shows first what would come of it.
    """
    user = request.auth.require(Role.OPERATOR)
    row = get_object_or_404(Model, name=model, active=True)
    return _policy(row, services.set_policy(row, body.strategy, body.mode, body.parameters, user, body.reason))


@router.get("/scaling/plans", response=Page[PlanOut])
def list_plans(request: ApiRequest, query: Query[PlanQuery]) -> dict[str, Any]:
    """Scaling plans, newest first; `/api/scaling/plans/{id}` has the inputs too."""
    rows = selectors.plans(model=query.model, status=query.status or "", strategy=query.strategy)
    return _page(request, rows.defer("inputs"), query)


@router.get("/scaling/plans/{int:plan_id}", response=PlanDetail)
def get_plan(request: ApiRequest, plan_id: int) -> ScalingPlan:
    request.auth.require(Role.VIEWER)
    return get_object_or_404(selectors.plans(), pk=plan_id)


@router.post("/scaling/plans/{int:plan_id}/approve", response=PlanDetail)
def approve_plan(request: ApiRequest, plan_id: int, body: DecisionIn) -> ScalingPlan:
    """Have a plan carried out. Instances move after this answer.

    When a newer plan has replaced it and asks for the same numbers of instances, that one is approved and answered. 409
    when the newer one differs, with what changed, or when the plan is no advice.
    """
    user = request.auth.require(Role.OPERATOR)
    return services.approve(get_object_or_404(selectors.plans(), pk=plan_id), user, body.reason)


@router.post("/scaling/plans/{int:plan_id}/reject", response=PlanDetail)
def reject_plan(request: ApiRequest, plan_id: int, body: DecisionIn) -> ScalingPlan:
    """Have a plan not carried out, or the newer one that repeats it. 409 as for approving."""
    user = request.auth.require(Role.OPERATOR)
    return services.reject(get_object_or_404(selectors.plans(), pk=plan_id), user, body.reason)


@router.get("/scaling/moves", response=Page[MoveOut])
def list_moves(request: ApiRequest, query: Query[MoveQuery]) -> dict[str, Any]:
    """Instances that scaling added or took away, newest first, each with its reason."""
    rows = selectors.moves(model=query.model, source=query.source or "", region=query.region)
    return _page(request, rows, query)


@router.get("/scaling/comparisons", response=Page[ComparisonOut])
def list_comparisons(request: ApiRequest, query: Query[PageQuery]) -> dict[str, Any]:
    """What each strategy would have cost and achieved on the last hours of the ledger, newest first."""
    return _page(request, StrategyComparison.objects.all(), query)


def _page(request: ApiRequest, rows: QuerySet[Any], query: PageQuery) -> dict[str, Any]:
    request.auth.require(Role.VIEWER)
    rows = rows.order_by("-pk")
    if query.cursor is not None:
        rows = rows.filter(pk__lt=query.cursor)
    items = list(rows[: query.limit + 1])
    more = len(items) > query.limit
    items = items[: query.limit]
    return {"items": items, "next_cursor": items[-1].pk if more else None}


def _policy(model: Model, policy: ScalingPolicy | None) -> dict[str, Any]:
    if policy is None:
        return {"model": model.name, "strategy": None, "mode": PolicyMode.OFF, "parameters": {}, "changed_at": None}
    names = ("strategy", "mode", "parameters", "changed_at")
    return {"model": model.name, **{name: getattr(policy, name) for name in names}}
