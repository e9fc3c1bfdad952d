"""The form of the deploy page: what an operator knows of hardware, model and deployment, in GB and tokens."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator
from django.forms import BoundField

from controlplane.fleet.inventory.deploy import Wanted, usual_launcher
from controlplane.fleet.models import GpuType, Instance, Launcher, Model, Region
from controlplane.fleet.validators import validate_host

BITS = ((16, "16 bits (BF16, FP16)"), (8, "8 bits (FP8, INT8)"), (4, "4 bits (AWQ, GPTQ, FP4)"))


def count(label: str, initial: int | None = None, most: int = 32_767, least: int = 1, help_text: str = "") -> Any:
    return forms.IntegerField(
        label=label,
        initial=initial,
        required=initial is not None,
        min_value=least,
        max_value=most,
        help_text=help_text,
    )


def size(label: str, help_text: str = "") -> Any:
    return forms.FloatField(label=label, required=False, min_value=1e-6, max_value=1e6, help_text=help_text)


class DeployForm(forms.Form):
    """The names of the fields are those of `Wanted`. Without JavaScript it works as it is; with it, the estimate follows."""

    region = forms.SlugField(max_length=40, help_text="Existing region, or a name for a new one.")
    gpu_type = forms.SlugField(label="GPU type", max_length=40, help_text="Such as h100-80gb.")
    gpus = count("GPUs of a new node", 0, least=0, help_text="0 = use existing nodes.")
    address = forms.CharField(
        label="Address of the new node", max_length=255, required=False, validators=[validate_host]
    )
    usd_per_gpu_hour = forms.DecimalField(
        label="$ per GPU-hour",
        required=False,
        min_value=0,
        max_digits=8,
        decimal_places=4,
        help_text="For a GPU type that is new.",
    )
    model = forms.CharField(max_length=160, help_text="Name used in requests; existing models keep their sizes.")
    source = forms.CharField(
        max_length=255,
        required=False,
        help_text="Folder or repository that vLLM loads. Sizes left empty are read from it.",
    )
    parameters_billion = size("Parameters (billions)")
    bits = forms.TypedChoiceField(label="Weight precision", choices=BITS, coerce=int, initial=16)
    weights_gb = size("or weights (GB)")
    layers = count("Layers", most=1_000)
    active_parameters_billion = size("Active parameters (billions)", "Mixture of experts: those used per token.")
    experts = count("Experts", most=100_000, help_text="Per layer.")
    experts_per_token = count("Experts per token", most=100_000)
    kv_heads = count("KV heads", most=1_000)
    head_dim = count("Head size", most=10_000)
    kv_kib_per_token = size("or KV cache (KiB per token)")
    context_tokens = count("Context (tokens)", most=100_000_000, help_text="The longest prompt with its output.")
    launcher = forms.ChoiceField(choices=())
    tensor_parallel = count("GPUs per instance", 1, help_text="The tensor parallel degree.")
    gpu_memory_utilization = forms.FloatField(
        label="GPU memory used", initial=0.9, validators=[MinValueValidator(0.1), MaxValueValidator(1.0)]
    )
    max_num_seqs = count("Max concurrent requests", 64, help_text="vLLM's --max-num-seqs.")
    min_instances = count("Min instances", 1, least=0)
    max_instances = count("Max instances", 4)
    share_gpus_with = forms.ChoiceField(
        label="Share GPUs with",
        required=False,
        choices=(),
        help_text="Only one of the two is awake at a time; the other sleeps.",
    )
    reason = forms.CharField(max_length=255, required=False, help_text="Kept with the event.")

    GROUPS = (
        ("Hardware", ("region", "gpu_type", "gpus", "address", "usd_per_gpu_hour")),
        (
            "Model",
            ("model", "source", "parameters_billion", "bits", "weights_gb", "layers", "kv_heads", "head_dim",
             "kv_kib_per_token", "context_tokens", "active_parameters_billion", "experts", "experts_per_token"),
        ),
        (
            "Deployment",
            ("tensor_parallel", "gpu_memory_utilization", "max_num_seqs", "min_instances", "max_instances", "launcher",
             "share_gpus_with", "reason"),
        ),
    )  # fmt: skip

    def __init__(self, *args: Any, may_address: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.label_suffix = ""
        launchers = [choice for choice in Launcher.choices if choice[0] != Launcher.EXTERNAL]
        self.fields["launcher"].choices = launchers  # type: ignore[attr-defined]
        self.fields["launcher"].initial = usual_launcher()
        names = Instance.objects.launched().order_by("name").values_list("name", flat=True)
        own = [("", "Dedicated GPUs"), *((name, name) for name in names)]
        self.fields["share_gpus_with"].choices = own  # type: ignore[attr-defined]
        if not may_address:  # hosts that the fleet connects to are named by admins alone
            del self.fields["address"]
        for name in ("region", "gpu_type", "model"):
            self.fields[name].widget.attrs |= {"list": f"{name}-names", "autocomplete": "off"}

    def groups(self) -> Iterator[tuple[str, list[BoundField]]]:
        return ((title, [self[name] for name in names if name in self.fields]) for title, names in self.GROUPS)

    @property
    def names(self) -> dict[str, list[str]]:
        """What there is, to choose from; GPU types that are only known too."""
        from scheduling.fleet.profile_estimate import GPUS

        return {
            "region": list(Region.objects.filter(active=True).values_list("name", flat=True)),
            "gpu_type": sorted({*GPUS, *GpuType.objects.values_list("name", flat=True)}),
            "model": list(Model.objects.filter(active=True).values_list("name", flat=True)),
        }

    def wanted(self) -> Wanted:
        """What the valid fields say; those that are empty or wrong have the defaults, so that an estimate can be made."""
        given = {name: value for name, value in self.cleaned_data.items() if value not in (None, "")}
        names = {field.name for field in fields(Wanted)}
        return Wanted(**({"region": "", "gpu_type": "", "model": ""} | {k: v for k, v in given.items() if k in names}))
