"""What a new installation needs before its first request, each made from the overview."""

from typing import Any

from django.core.exceptions import ValidationError
from django.forms import Form
from django.http import HttpRequest

from controlplane.accounts.models import ApiKey, Role
from controlplane.accounts.selectors import tenants_with_managed_keys
from controlplane.console.actions import ActionForm, action
from controlplane.console.pages.deploy.forms import form_field
from controlplane.fleet.demo import add_tenant
from controlplane.fleet.inventory.deploy import DeployRequest
from controlplane.fleet.inventory.deploy import add_node as make_node
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Instance, Node
from controlplane.gateway.models import LedgerRow
from scheduling.fleet.profile_estimate import GPUS
from scheduling.fleet.published_models import PUBLISHED

OF_A_NODE = ("region", "gpu_type", "gpus", "usd_per_gpu_hour")
OFFERED = 6
"""Published models, the smallest ones."""


class NodeForm(Form):
    """A node, by the fields of a deployment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields |= {name: form_field(name, DeployRequest.model_fields[name]) for name in OF_A_NODE}
        self.fields["gpus"].label = "GPUs"
        for name, shown in (
            ("region", "us-east"),
            ("gpu_type", "h100-80gb"),
            ("gpus", "8"),
            ("usd_per_gpu_hour", "2.50"),
        ):
            field: Any = self.fields[name]
            field.required, field.help_text, field.initial = True, "", None
            field.widget.attrs |= {"placeholder": shown, "autocomplete": "off", "list": f"{name}-names"}
        self.fields["gpus"].widget.attrs["min"] = 1


def first_steps(request: HttpRequest) -> dict[str, Any] | None:
    """Return what is done and what can be chosen; None once a request was served."""
    if LedgerRow.objects.exists():
        return None
    node = Node.objects.filter(active=True).select_related("region", "gpu_type").order_by("pk").first()
    smallest = sorted(PUBLISHED.items(), key=lambda one: one[1].weights_bytes or 0)[:OFFERED]
    return {
        "node": node,
        "form": NodeForm(auto_id="node-%s"),
        "gpu_types": sorted(GPUS),
        "models": [name for name, _ in smallest],
        "instance": Instance.objects.launched().select_related("deployment__model").order_by("pk").first(),
        "key": ApiKey.objects.filter(revoked_at=None).order_by("pk").first(),
        "tenant": tenants_with_managed_keys(request.user).filter(active=True).first(),
    }


@action(Role.OPERATOR, page="console:overview", needs_reason=False)
def add_node(form: ActionForm) -> str:
    given = NodeForm(form.fields)
    if not given.is_valid():
        raise ActionError(" ".join(f"{given[name].label}: {texts[0]}" for name, texts in given.errors.items()))
    wanted = DeployRequest.model_construct(model="", **given.cleaned_data)
    return f"{make_node(wanted, form.user, 'first steps')} is added."


@action(Role.ADMIN, page="console:overview", needs_reason=False)
def first_tenant(form: ActionForm) -> str:
    name = form.fields.get("name", "").strip()
    if not name:
        raise ValidationError("A tenant needs a name.")
    return f"The tenant {add_tenant(name, form.user)} is added: make a key of it."
