"""Admin of forecasts and scaling: policies are edited, plans are approved or rejected, the rest is read."""

from django.contrib import admin
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.admin_actions import ReasonAction
from controlplane.accounts.admin_site import has_role
from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.events.admin import AuditedAdmin, ReadOnlyAdmin
from controlplane.fleet.models import Model, Region, SloClass
from controlplane.gateway.admin import name_filter
from controlplane.planning import services
from controlplane.planning.models import (
    Backtest,
    Forecast,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
    StrategyComparison,
)

BY_MODEL, BY_REGION = name_filter("model", Model.objects.all), name_filter("region", Region.objects.all)
BY_CLASS = name_filter("slo_class", SloClass.objects.all)


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

    def save_model(
        self, request: HttpRequest, obj: ScalingPolicy, form: ModelForm[ScalingPolicy], change: bool
    ) -> None:
        if "strategy" in form.changed_data:
            obj.memory = {}
        super().save_model(request, obj, form, change)

    def after_write(self, request: HttpRequest, row: ScalingPolicy, *, created: bool) -> None:
        if row.model_id is not None:
            services.supersede_open(row.model)


class Decision(ReasonAction[ScalingPlan]):
    """Approving or rejecting, through the services."""

    def act(self, request: HttpRequest, row: ScalingPlan, reason: str) -> str:
        plan = getattr(services, self.verb)(row, user_of(request), reason)
        return f"The plan for {row.model} is {plan.status}"


class Approve(Decision):
    verb, title, button = "approve", "Approve plans", "Approve"
    question = "Instances are moved to the plans' targets."


class Reject(Decision):
    verb, title, button = "reject", "Reject plans", "Reject"
    question = "The plans are laid aside; instances stay as they are."


@admin.register(ScalingPlan)
class ScalingPlanAdmin(ReadOnlyAdmin[ScalingPlan]):
    actions = ["approve", "reject"]
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

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.OPERATOR)

    @admin.action(description="Approve (asks for a reason)", permissions=["operate"])
    def approve(self, request: HttpRequest, rows: QuerySet[ScalingPlan]) -> HttpResponse | None:
        return Approve(self)(request, rows)

    @admin.action(description="Reject (asks for a reason)", permissions=["operate"])
    def reject(self, request: HttpRequest, rows: QuerySet[ScalingPlan]) -> HttpResponse | None:
        return Reject(self)(request, rows)


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
