"""Admin forms with fields beyond those of their rows."""

from typing import Any

from django.forms import BooleanField, CharField, JSONField, ModelForm, PasswordInput, Textarea

from controlplane.fleet import places
from controlplane.fleet.inventory.model_source import SIZES, completed
from controlplane.fleet.models import Deployment, Instance, Model


class LanguageModelForm(ModelForm[Model]):
    """Form of a model; sizes may be left empty if the source has them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in SIZES:
            if name in self.fields:
                self.fields[name].required = False

    def clean(self) -> dict[str, Any]:
        super().clean()
        cleaned = self.cleaned_data
        return cleaned if self.errors else completed(self.instance, cleaned)


class DeploymentForm(ModelForm[Deployment]):
    """Form of a deployment; secrets are write-only, and an empty field keeps the stored value."""

    secrets = JSONField(
        required=False,
        widget=Textarea(attrs={"rows": 2, "autocomplete": "off"}),
        help_text='Environment variables such as {"HF_TOKEN": "hf_..."}, in the place of all that are set; {} removes them.',
    )
    api_key = CharField(
        label="API key",
        required=False,
        max_length=255,
        widget=PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="The token that its servers ask for (vLLM's --api-key).",
    )
    forget_api_key = BooleanField(label="Remove the API key", required=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held = (dict(self.instance.secrets), self.instance.api_key)
        self.initial.update(secrets=None, api_key="")

    def clean_secrets(self) -> dict[str, str]:
        given: dict[str, str] | None = self.cleaned_data["secrets"]
        return self.held[0] if given is None else given

    def clean_api_key(self) -> str:
        key: str = self.cleaned_data["api_key"] or self.held[1]
        return key

    def clean(self) -> dict[str, Any]:
        super().clean()
        cleaned = self.cleaned_data
        if cleaned.get("forget_api_key"):
            cleaned["api_key"] = ""
        return cleaned


class InstanceForm(ModelForm[Instance]):
    """Form of an instance; it checks for free GPUs under the locks that saving holds."""

    def clean(self) -> dict[str, Any]:
        super().clean()
        cleaned = self.cleaned_data
        deployment = cleaned.get("deployment") or getattr(self.instance, "deployment", None)
        if deployment is not None:
            places.lock(Deployment.objects.filter(pk=deployment.pk))
        return cleaned
