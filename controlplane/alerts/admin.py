"""Admin of alert rules. The address of a webhook is write-only."""

from typing import Any

from django.contrib import admin
from django.forms import BooleanField, CharField, ModelForm, PasswordInput

from controlplane.alerts.models import Alert, AlertRule
from controlplane.events.admin import AuditedAdmin, ReadOnlyAdmin


class AlertRuleForm(ModelForm[AlertRule]):
    """Form of a rule; an empty address keeps the stored one."""

    webhook_url = CharField(
        label="Webhook URL",
        required=False,
        max_length=500,
        widget=PasswordInput(attrs={"autocomplete": "off"}),
        help_text="Called when alerts open and resolve; no redirect is followed. Only its host is shown again.",
    )
    forget_webhook = BooleanField(label="Remove the webhook", required=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held = self.instance.webhook_url
        self.initial["webhook_url"] = ""

    def clean_webhook_url(self) -> str:
        url: str = self.cleaned_data["webhook_url"] or self.held
        return url

    def clean(self) -> dict[str, Any]:
        super().clean()
        cleaned = self.cleaned_data
        if cleaned.get("forget_webhook"):
            cleaned["webhook_url"] = ""
        if cleaned.get("webhook_url", self.held) != self.held:
            self.instance.failures, self.instance.try_at, self.instance.delivery_error = 0, None, ""
        return cleaned


@admin.register(AlertRule)
class AlertRuleAdmin(AuditedAdmin[AlertRule]):
    form = AlertRuleForm
    list_display = ["name", "condition", "model", "severity", "webhook", "active"]
    list_filter = ["condition", "severity", "active"]
    search_fields = ["name", "model"]
    readonly_fields = ["webhook", "delivery_error"]
    fieldsets = [
        (None, {"fields": ["name", "condition", "severity", "active"]}),
        ("Scope", {"fields": ["model", "slo_class"]}),
        ("When", {"fields": ["threshold", "window_s", "for_s"]}),
        (
            "Webhook",
            {
                "fields": [
                    *("webhook", "webhook_url", "forget_webhook", "webhook_format", "repeat_hours", "delivery_error")
                ]
            },
        ),
    ]


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin[Alert]):
    list_display = ["subject", "rule", "value", "since", "opened_at", "resolved_at", "acknowledged_by"]
    list_filter = ["rule", "opened_at"]
    list_select_related = ["rule"]
    search_fields = ["subject", "detail", "rule__name"]
