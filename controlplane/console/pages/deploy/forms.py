"""The form of the Deploy page, made from the fields of `DeployRequest`."""

from decimal import Decimal
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, MaxLen
from django import forms
from django.forms import BoundField
from pydantic.fields import FieldInfo

from controlplane.fleet.inventory.deploy import BITS, DeployRequest, completed, usual_launcher
from controlplane.fleet.models import GpuType, Instance, Launcher, Model, ModelTask, Region
from scheduling.fleet.profile_estimate import GPUS
from scheduling.fleet.published_models import PUBLISHED

WIDGETS = {int: forms.IntegerField, float: forms.FloatField, Decimal: forms.DecimalField, str: forms.CharField}
OPTIONAL = ("address", "max_loras", "max_cpu_loras", "kv_offload_gib")
"""Fields with a default that may be left empty."""
ELSEWHERE = "elsewhere"
"""In place of one of the list: region and GPU type are given by name."""
SMALLEST = 1e-6
"""Stands in for a limit that is excluded, which forms do not have."""
SIZES = (
    *(
        "source",
        "task",
        "parameters_billion",
        "bits",
        "weights_gb",
        "layers",
        "kv_heads",
        "head_dim",
        "kv_kib_per_token",
    ),
    *("context_tokens", "active_parameters_billion", "experts", "experts_per_token"),
)
PARTS = {
    "sizes": SIZES,
    "elsewhere": ("region", "gpu_type", "gpus", "usd_per_gpu_hour", "address"),
    "instances": ("tensor_parallel", "min_instances", "max_instances", "launcher"),
    "engine": ("gpu_memory_utilization", "max_num_seqs", *OPTIONAL[1:], "share_gpus_with"),
}


def form_field(name: str, declared: FieldInfo) -> forms.Field:
    """The field of the form for one of `DeployRequest`."""
    kind = next((one for one in get_args(declared.annotation) if one in WIDGETS), declared.annotation)
    given = not declared.is_required() and declared.default not in (None, "")
    options: dict[str, Any] = {
        "label": declared.title,
        "help_text": declared.description or "",
        "initial": declared.default if given and name != "address" else None,
        "required": declared.is_required() or (given and name not in OPTIONAL),
    }
    if name == "bits":
        return forms.TypedChoiceField(choices=BITS.items(), coerce=int, **options)
    if name == "task":
        return forms.ChoiceField(choices=[("", "As its source says"), *ModelTask.choices], **options)
    if name in ("launcher", "share_gpus_with"):
        return forms.ChoiceField(choices=(), **options | {"required": name == "launcher"})
    for limit in declared.metadata:
        match limit:
            case Ge(ge=low):
                options["min_value"] = low
            case Gt():
                options["min_value"] = SMALLEST
            case Le(le=high):
                options["max_value"] = high
            case MaxLen(max_length=length):
                options["max_length"] = length
    if name in ("region", "gpu_type"):
        return forms.SlugField(**options | {"required": False})
    if kind is Decimal:
        options |= {"max_digits": 8, "decimal_places": 4}
    return WIDGETS[kind](**options)  # type: ignore[index,no-any-return]


def _given(field: BoundField) -> bool:
    usual = "" if field.field.initial is None else str(field.field.initial)
    return bool(field.errors) or str(field.value() or usual) != usual


class DeployForm(forms.Form):
    """Without JavaScript it works as it is; with it, the estimate and the places follow."""

    place = forms.CharField(required=False, max_length=90)
    """`REGION GPU-TYPE` of the list, in place of the fields of that name."""

    def __init__(self, *args: Any, may_address: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields |= {name: form_field(name, each) for name, each in DeployRequest.model_fields.items()}
        self.fields["reason"] = forms.CharField(max_length=255, required=False, help_text="Kept with the event.")
        self.label_suffix = ""
        launcher: Any = self.fields["launcher"]
        launcher.choices = [choice for choice in Launcher.choices if choice[0] != Launcher.EXTERNAL]
        launcher.initial, launcher.help_text = usual_launcher(), ""
        names = Instance.objects.launched().order_by("name").values_list("name", flat=True)
        own = [("", "Dedicated GPUs"), *((name, name) for name in names)]
        self.fields["share_gpus_with"].choices = own  # type: ignore[attr-defined]
        if not may_address:  # hosts that the fleet connects to are named by admins alone
            del self.fields["address"]
        for name in ("region", "gpu_type", "model"):
            self.fields[name].widget.attrs |= {"list": f"{name}-names", "autocomplete": "off"}

    def clean(self) -> dict[str, Any]:
        """Take region and GPU type from the list, unless others are given by name."""
        given = self.cleaned_data
        place = (given.get("place") or "").removeprefix(ELSEWHERE).partition(" ")
        for name, chosen in (("region", place[0]), ("gpu_type", place[2])):
            if name in self.errors:
                continue
            if chosen and given.get(name) not in ("", None, chosen):
                self.add_error(name, f"Empty it, or choose no place of the list: there it is {chosen}.")
            elif not (chosen or given.get(name)):
                self.add_error(name, forms.ValidationError("Choose a place of the list, or name it.", "required"))
            else:
                given[name] = chosen or given[name]
        return given

    def overlook_missing(self) -> None:
        """Drop the errors of fields that are not filled in yet."""
        missing = [name for name, errors in self.errors.as_data().items() if errors[0].code == "required"]
        for name in missing:
            del self.errors[name]

    def groups(self) -> dict[str, dict[str, Any]]:
        """Return the fields of each part of the page, and whether it is unfolded; known sizes stand in the empty fields."""
        known = completed(self.wanted())
        for name in SIZES:
            if (value := getattr(known, name)) not in (None, ""):
                self.fields[name].widget.attrs["placeholder"] = value
        fields = {part: [self[name] for name in names if name in self.fields] for part, names in PARTS.items()}
        return {part: {"fields": own, "open": any(map(_given, own))} for part, own in fields.items()}

    @property
    def names(self) -> dict[str, list[str]]:
        """Existing names to choose from, the known GPU types and the published models."""
        return {
            "region": list(Region.objects.filter(active=True).values_list("name", flat=True)),
            "gpu_type": sorted({*GPUS, *GpuType.objects.values_list("name", flat=True)}),
            "model": sorted({*PUBLISHED, *Model.objects.filter(active=True).values_list("name", flat=True)}),
        }

    def wanted(self) -> DeployRequest:
        """The request of the valid fields; others have their defaults, so that an estimate can be made."""
        given = {name: value for name, value in getattr(self, "cleaned_data", {}).items() if value not in (None, "")}
        known = {name: value for name, value in given.items() if name in DeployRequest.model_fields}
        return DeployRequest.model_construct(**{"region": "", "gpu_type": "", "model": ""} | known)
