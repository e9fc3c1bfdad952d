"""Admin of forecasts and scaling: policies are edited, plans approved or rejected, everything else read-only."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from controlplane.accounts.admin_actions import AdminAction, reason_action
from controlplane.accounts.models import User
from controlplane.events.admin import AuditedAdmin, ReadOnlyAdmin
from controlplane.gateway.admin import SERIES_FILTERS
from controlplane.planning import services
from controlplane.planning.models import (
    Backtest,
    Forecast,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
    StrategyComparison,
)

BY_MODEL, BY_REGION, BY_CLASS = SERIES_FILTERS


@admin.register(Forecast)
class ForecastAdmin(ReadOnlyAdmin[Forecast]):
    list_display = ["made_at", "model", "region", "slo_class", "quantity", "forecaster", "window_s", "start_at", "note"]
    list_filter = ["made_at", BY_CLASS, "quantity", "forecaster", BY_MODEL, BY_REGION]


@admin.register(Backtest)
class BacktestAdmin(ReadOnlyAdmin[Backtest]):
    list_display = ["made_at", "source", "window_s", "horizon_windows"]
    list_filter = ["made_at"]
    search_fields = ["source"]


@admin.register(ScalingPolicy)
class ScalingPolicyAdmin(AuditedAdmin[ScalingPolicy]):
    list_display = ["model", "strategy", "mode", "parameters", "changed_at"]
    list_filter = ["mode", "strategy"]
    list_select_related = ["model"]
    search_fields = ["model__name"]
    autocomplete_fields = ["model"]
    fields = ["model", "strategy", "mode", "parameters"]

    def after_write(self, request: HttpRequest, row: ScalingPolicy, *, created: bool) -> None:
        if row.model_id is not None:
            services.supersede_open(row.model)


def decision(verb: str, question: str) -> "AdminAction[ScalingPlan]":
    """Return an admin action that approves or rejects through the services."""

    def act(row: ScalingPlan, user: User, reason: str) -> str:
        plan = getattr(services, verb)(row, user, reason)
        return f"The plan for {row.model} is {plan.status}"

    return reason_action(verb, verb.capitalize(), f"{verb.capitalize()} plans", question, act)


@admin.register(ScalingPlan)
class ScalingPlanAdmin(ReadOnlyAdmin[ScalingPlan]):
    actions = [
        decision("approve", "Instances are moved to the plans' targets."),
        decision("reject", "The plans are rejected; instances stay as they are."),
    ]
    list_display = ["made_at", "model", "strategy", "status", "change", "usd_per_hour", "note", "decided_by"]
    list_filter = ["status", "made_at", "model", "strategy"]
    list_select_related = ["model"]
    search_fields = ["=round", "note", "decided_by"]

    @admin.display(description="instances")
    def change(self, plan: ScalingPlan) -> str:
        before, after = (sum(row.get(name, 0) for row in plan.targets) for name in ("present", "target"))
        return f"{before} → {after}"

    @admin.display(description="US dollars per hour")
    def usd_per_hour(self, plan: ScalingPlan) -> str:
        return f"{plan.cost_usd_per_hour_before:.2f} → {plan.cost_usd_per_hour_after:.2f}"


@admin.register(ScalingMove)
class ScalingMoveAdmin(ReadOnlyAdmin[ScalingMove]):
    list_display = ["at", "delta", "model", "region", "gpu_type", "instance", "source", "strategy", "reason"]
    list_filter = ["at", "source", "strategy", BY_MODEL, BY_REGION]
    search_fields = ["instance", "reason"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ScalingMove]:
        return super().get_queryset(request).select_related("plan__model")


@admin.register(StrategyComparison)
class StrategyComparisonAdmin(ReadOnlyAdmin[StrategyComparison]):
    list_display = ["made_at", "from_at", "to_at", "requests", "note"]
    list_filter = ["made_at"]
