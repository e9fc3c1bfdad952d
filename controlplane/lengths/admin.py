"""Admin of output lengths: versions are promoted, rejected and rolled back; the rest is read."""

from django.contrib import admin

from controlplane.accounts.admin_actions import AdminAction, reason_action
from controlplane.accounts.models import User
from controlplane.events.admin import ReadOnlyAdmin
from controlplane.fleet.models import Model
from controlplane.gateway.admin import name_filter
from controlplane.lengths import services
from controlplane.lengths.models import LengthMinute, LengthSample, LengthTraining, LengthVersion

BY_MODEL = name_filter("model", Model.objects.all)


def decision(verb: str, button: str, title: str, question: str) -> "AdminAction[LengthVersion]":
    """Return an action by which an operator decides about versions, through the services."""

    def act(row: LengthVersion, user: User, reason: str) -> str:
        version = getattr(services, verb)(row, user, reason)
        return f"Version {version.number} is {version.state}"

    return reason_action(verb, button, title, question, act)


@admin.register(LengthVersion)
class LengthVersionAdmin(ReadOnlyAdmin[LengthVersion]):
    actions = [
        decision(
            "promote",
            "Promote",
            "Promote versions",
            "Gateways take the version up within seconds, and the active one is retired.",
        ),
        decision(
            "put_in_shadow",
            "Put in shadow",
            "Put rejected versions into the shadow again",
            "The versions predict in shadow again and are judged again.",
        ),
        decision("reject", "Reject", "Reject versions", "The versions are rejected; what is active stays."),
        decision(
            "rollback",
            "Go back",
            "Go back to a retired version",
            "The version becomes active again, and the active one is rejected.",
        ),
    ]
    list_display = ["number", "kind", "state", "trained_at", "samples", "mae", "note", "changed_at"]
    list_filter = ["state", "kind", "trained_at"]
    search_fields = ["=number", "note"]

    @admin.display(description="held-out error, tokens")
    def mae(self, version: LengthVersion) -> str:
        value = version.measures.get("mae")
        return "" if value is None else f"{value:.1f}"


@admin.register(LengthTraining)
class LengthTrainingAdmin(ReadOnlyAdmin[LengthTraining]):
    list_display = ["id", "kind", "state", "step", "asked_by", "asked_at", "ended_at", "version"]
    list_filter = ["state", "kind"]
    list_select_related = ["version"]


@admin.register(LengthSample)
class LengthSampleAdmin(ReadOnlyAdmin[LengthSample]):
    """Samples without their text, which is stored for training alone."""

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
