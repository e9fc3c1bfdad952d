"""Admin of output lengths: versions are promoted, rejected and rolled back; the rest is read."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.admin_actions import ReasonAction
from controlplane.accounts.admin_site import has_role
from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet.models import Model
from controlplane.gateway.admin import name_filter
from controlplane.lengths import services
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion

BY_MODEL = name_filter("model", Model.objects.all)


class Decision(ReasonAction[LengthVersion]):
    """What operators decide about versions, through the services."""

    def act(self, request: HttpRequest, row: LengthVersion, reason: str) -> str:
        version = getattr(services, self.verb)(row, user_of(request), reason)
        return f"Version {version.number} is {version.state}"


class Promote(Decision):
    verb, title, button = "promote", "Promote versions", "Promote"
    question = "Gateways take the version up within seconds, and the active one is retired."


class Reject(Decision):
    verb, title, button = "reject", "Reject versions", "Reject"
    question = "The versions are rejected; what is active stays."


class Rollback(Decision):
    verb, title, button = "rollback", "Go back to a retired version", "Go back"
    question = "The version becomes active again, and the active one is rejected."


@admin.register(LengthVersion)
class LengthVersionAdmin(ReadOnlyAdmin[LengthVersion]):
    actions = ["promote", "reject", "rollback"]
    list_display = ["number", "kind", "state", "trained_at", "samples", "mae", "note", "changed_at"]
    list_filter = ["state", "kind", "trained_at"]
    search_fields = ["=number", "note"]

    @admin.display(description="held-out error, tokens")
    def mae(self, version: LengthVersion) -> str:
        value = version.measures.get("mae")
        return "" if value is None else f"{value:.1f}"

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.OPERATOR)

    @admin.action(description="Promote (asks for a reason)", permissions=["operate"])
    def promote(self, request: HttpRequest, rows: QuerySet[LengthVersion]) -> HttpResponse | None:
        return Promote(self)(request, rows)

    @admin.action(description="Reject (asks for a reason)", permissions=["operate"])
    def reject(self, request: HttpRequest, rows: QuerySet[LengthVersion]) -> HttpResponse | None:
        return Reject(self)(request, rows)

    @admin.action(description="Go back to it (asks for a reason)", permissions=["operate"])
    def rollback(self, request: HttpRequest, rows: QuerySet[LengthVersion]) -> HttpResponse | None:
        return Rollback(self)(request, rows)


@admin.register(LengthSample)
class LengthSampleAdmin(ReadOnlyAdmin[LengthSample]):
    """Without the text, which is there for training alone."""

    list_display = [
        "at",
        "model",
        "tenant",
        "slo_class",
        "prompt_tokens",
        "predicted_tokens",
        "output_tokens",
        "predicted_by",
    ]
    list_filter = ["at", "predicted_by", BY_MODEL]
    list_select_related = ["tenant"]
    exclude = ["text", "features"]


@admin.register(LengthMinute)
class LengthMinuteAdmin(ReadOnlyAdmin[LengthMinute]):
    list_display = ["minute", "model", "tenant", "predictor", "bucket_tokens", "requests", "absolute_error_tokens"]
    list_filter = ["minute", "predictor", BY_MODEL]
    search_fields = ["tenant"]
