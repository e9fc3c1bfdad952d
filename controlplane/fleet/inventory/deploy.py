"""Deploys a model in one transaction: hardware, model, deployment, performance profile and instances.

Existing rows are taken by name, missing ones are created. Without a measured profile, one is estimated
(`scheduling.fleet.profile_estimate`) and marked until it is measured.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import transaction
from pydantic import BaseModel, ConfigDict, Field

from controlplane.accounts.models import User
from controlplane.events.audit import record_creation
from controlplane.events.services import record
from controlplane.fleet import places
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.kinds import DEPLOYMENT, GPU_TYPE, INSTANCE, MODEL, NODE, PROFILE, REGION
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    Device,
    GpuType,
    Instance,
    Launcher,
    Model,
    ModelTask,
    Node,
    PerformanceProfile,
    Region,
)
from controlplane.fleet.models.hardware import region_title
from controlplane.fleet.services import notify
from controlplane.fleet.swaps.services import group_of
from scheduling.fleet.adapter_memory import MOST_ADAPTERS
from scheduling.fleet.kv_cost import MAX_OFFLOAD_GIB
from scheduling.model_task import Task

if TYPE_CHECKING:
    from scheduling.fleet.profile import Profile

GB: Final = 1e9
KIB: Final = 1024
KV_BYTES: Final = 2
"""Of an element of the KV cache, as vLLM computes by default."""
LOCAL: Final = "127.0.0.1"
SOURCE: Final = "estimated from weights, KV bytes and the GPU's data sheet"
FIELDS: Final = {
    "weights_bytes": "weights_gb",
    "kv_bytes_per_token": "kv_kib_per_token",
    "gpu_count": "gpus",
    "node": "gpus",
    "name": "model",
    "memory_bytes": "gpu_type",
    "on_demand_usd_per_hour": "usd_per_gpu_hour",
    "swap_group": "share_gpus_with",
}
"""Fields of rows that have another name here."""


BITS: Final = {16: "16 bits (BF16, FP16)", 8: "8 bits (FP8, INT8)", 4: "4 bits (AWQ, GPTQ, FP4)"}
MAX_SIZE: Final = 1e6
DEGREES: Final = (1, 2, 4, 8)
"""Tensor parallel degrees that are tried: GPUs of one node."""
TYPICAL: Final = (1024, 256)
"""Tokens of the prompt and the output by which a price per token is estimated."""
BLOCK, STEP_TOKENS = 16, 8192
MAX_COUNT: Final = 32_767


class DeployRequest(BaseModel):
    """A model to deploy: the body of `POST /api/deploy`, and the form of the Deploy page.

    Rows that exist are taken by their names. Sizes of a new model that are not given are those of the published model of
    that name (`scheduling.fleet.published_models`), else read from its source.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    region: str = Field(max_length=40, pattern=r"^[-\w]*$", description="Existing region, or a name for a new one.")
    gpu_type: str = Field(max_length=40, title="GPU type", description="Such as h100-80gb.")
    gpus: int = Field(0, ge=0, le=MAX_COUNT, title="GPUs of a new node", description="0 = use existing nodes.")
    address: str = Field(LOCAL, max_length=255, title="Address of the new node", description="Needs the role admin.")
    usd_per_gpu_hour: Decimal | None = Field(
        None, ge=0, max_digits=8, decimal_places=4, title="$ per GPU-hour", description="For a GPU type that is new."
    )
    model: str = Field(max_length=160, description="Name used in requests; existing models keep their sizes.")
    source: str = Field(
        "", max_length=255, description="Folder or repository that vLLM loads. Sizes left empty are read from it."
    )
    task: ModelTask | None = Field(None, description="Of a new model. Default: as its source says, else generate.")
    weights_gb: float | None = Field(None, gt=0, le=MAX_SIZE, title="or weights (GB)")
    parameters_billion: float | None = Field(None, gt=0, le=MAX_SIZE, title="Parameters (billions)")
    bits: int = Field(16, ge=1, le=32, title="Weight precision", description="Bits of a parameter.")
    active_parameters_billion: float | None = Field(
        None,
        gt=0,
        le=MAX_SIZE,
        title="Active parameters (billions)",
        description="Mixture of experts: those used per token.",
    )
    experts: int | None = Field(None, ge=1, le=100_000, description="Per layer.")
    experts_per_token: int | None = Field(None, ge=1, le=100_000, title="Experts per token")
    kv_kib_per_token: float | None = Field(None, gt=0, le=MAX_SIZE, title="or KV cache (KiB per token)")
    layers: int | None = Field(None, ge=1, le=1_000)
    kv_heads: int | None = Field(None, ge=1, le=1_000, title="KV heads")
    head_dim: int | None = Field(None, ge=1, le=10_000, title="Head size")
    context_tokens: int | None = Field(
        None, ge=1, le=100_000_000, title="Context (tokens)", description="The longest prompt with its output."
    )
    tensor_parallel: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        title="GPUs per instance",
        description="The tensor parallel degree. Default: as measured, else the fewest that hold the model.",
    )
    gpu_memory_utilization: float = Field(0.9, ge=0.1, le=1.0, title="GPU memory used")
    max_num_seqs: int = Field(
        64, ge=1, le=MAX_COUNT, title="Max concurrent requests", description="vLLM's --max-num-seqs."
    )
    min_instances: int = Field(1, ge=0, le=MAX_COUNT, title="Min instances")
    max_instances: int = Field(4, ge=0, le=MAX_COUNT, title="Max instances")
    launcher: Launcher | None = Field(None, description="Null: that of most instances that Pilothouse starts.")
    max_loras: int = Field(
        0,
        ge=0,
        le=MOST_ADAPTERS,
        title="LoRA adapters on the GPU",
        description="vLLM's --max-loras; 0: none is served.",
    )
    max_cpu_loras: int = Field(
        0,
        ge=0,
        le=MOST_ADAPTERS,
        title="Adapters in memory",
        description="Those on the GPU included; 0: as many as on the GPU.",
    )
    kv_offload_gib: float = Field(
        0.0,
        ge=0.0,
        le=MAX_OFFLOAD_GIB,
        title="KV in CPU memory (GiB)",
        description="vLLM's --kv-offloading-size, of an instance; 0: none.",
    )
    share_gpus_with: str = Field(
        "",
        max_length=80,
        title="Share GPUs with",
        description="An instance. Only one of the two is awake at a time; the other sleeps.",
    )

    @property
    def weights_bytes(self) -> int | None:
        if self.weights_gb:
            return round(self.weights_gb * GB)
        return round(self.parameters_billion * 1e9 * self.bits / 8) if self.parameters_billion else None

    @property
    def kv_bytes_per_token(self) -> int | None:
        """Bytes of keys and values of every layer, as in `workers.vllm.model_shape`."""
        if self.kv_kib_per_token:
            return round(self.kv_kib_per_token * KIB)
        if self.layers and self.kv_heads and self.head_dim:
            return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Expected result of a deployment; None where sizes are missing. Nothing is written for it."""

    tensor_parallel: int
    usd_per_million: float | None  # tokens at full load, of typical requests
    weights_bytes: int | None
    kv_bytes_per_token: int | None
    context_tokens: int | None
    memory_bytes: int | None  # of an instance, as far as vLLM may use it
    kv_tokens: int | None
    fits: bool | None
    usd_per_hour: float | None  # of one instance
    free_gpus: int  # of the nodes of this type in this region, with those of the new node
    instances: int  # to be started at once
    room: bool  # whether the GPUs suffice for these
    pools: bool  # whether requests end with their prefill
    ttft_ms: float | None  # of a prompt of 1,024 tokens, alone
    itl_ms: float | None  # with 16 sequences of 1,024 tokens; None where it pools
    measured: bool  # whether the profile is a measured one

    @property
    def requests(self) -> int | None:
        """Requests of full context that the KV cache holds at once."""
        if self.kv_tokens is None or not self.context_tokens:
            return None
        return max(0, self.kv_tokens) // self.context_tokens


def completed(wanted: DeployRequest) -> DeployRequest:
    """Return *wanted* with the sizes of the published model of its name, and a tensor parallel degree, where not given."""
    from scheduling.fleet.published_models import PUBLISHED

    given = {name for name, each in DeployRequest.model_fields.items() if getattr(wanted, name) != each.default}
    published = PUBLISHED.get(wanted.model)
    facts = {} if published is None else {name: getattr(published, name) for name in published.__dataclass_fields__}
    for names in (("weights_gb", "parameters_billion", "bits"), ("kv_kib_per_token", "layers", "kv_heads", "head_dim")):
        if given.intersection(names):
            facts = {name: value for name, value in facts.items() if name not in names}
    if wanted.launcher == Launcher.EMULATED:
        facts.pop("source", None)
    facts = {name: value for name, value in facts.items() if value is not None and name not in given}
    if "task" in facts:
        facts["task"] = ModelTask(facts["task"])
    wanted = wanted.model_copy(update=facts)
    return wanted if wanted.tensor_parallel else wanted.model_copy(update={"tensor_parallel": _fewest(wanted)})


def _fewest(wanted: DeployRequest) -> int:
    """Return the GPUs of an instance: those of a measured profile, else the fewest that hold one request of full context."""
    model = Model.objects.filter(name=wanted.model).first()
    gpu_type = GpuType.objects.filter(name=wanted.gpu_type).first()
    if model and gpu_type and (held := model.profiles.filter(gpu_type=gpu_type).order_by("estimated", "pk").first()):
        return int(held.tensor_parallel)
    weights, kv_bytes, context = _sizes_of(model, wanted)
    each, _ = _gpu(wanted, gpu_type)
    if not each or not weights:
        return 1
    needed = weights + (kv_bytes or 0) * (context or 1)
    return next((count for count in DEGREES if each * count * wanted.gpu_memory_utilization >= needed), DEGREES[-1])


def _sizes_of(model: Model | None, wanted: DeployRequest) -> tuple[int | None, int | None, int | None]:
    """Return weights, KV bytes per token and context of *model*, or of the one that is *wanted*."""
    of: Any = model or wanted
    return of.weights_bytes, of.kv_bytes_per_token, of.context_tokens


def estimate(wanted: DeployRequest) -> Estimate:
    wanted = completed(wanted)
    degree = wanted.tensor_parallel or 1
    model = Model.objects.filter(name=wanted.model).first()
    gpu_type = GpuType.objects.filter(name=wanted.gpu_type).first()
    weights, kv_bytes, context = _sizes_of(model, wanted)
    each, usd = _gpu(wanted, gpu_type)
    memory = int(each * degree * wanted.gpu_memory_utilization) if each else None
    tokens = (memory - weights) // kv_bytes if memory and weights and kv_bytes else None
    held = _held_profile(model, gpu_type, degree)
    profile = held.coefficients() if held else None
    if held is None:
        with suppress(ValidationError):  # said when it is deployed
            profile = _profile(wanted, weights, kv_bytes)
    pools = Task(model.task if model else wanted.task or Task.GENERATE).pools
    free = sum(node.free_gpus() for node in _nodes(wanted)) + wanted.gpus
    instances = 0 if wanted.share_gpus_with else max(1, wanted.min_instances)
    hourly = usd * degree if usd is not None else None
    rate = _tokens_per_s(profile, wanted.max_num_seqs, tokens or 0, context or 0, pools) if profile else 0.0
    return Estimate(
        tensor_parallel=degree,
        usd_per_million=hourly / 3600 / rate * 1e6 if hourly and rate else None,
        weights_bytes=weights,
        kv_bytes_per_token=kv_bytes,
        context_tokens=context,
        memory_bytes=memory,
        kv_tokens=tokens,
        fits=None if tokens is None else tokens >= (context or 1),
        usd_per_hour=hourly,
        free_gpus=free,
        instances=instances,
        room=free >= instances * degree,
        ttft_ms=1e3 * profile.step_time_s(1024, 0, 0) if profile else None,
        pools=pools,
        itl_ms=1e3 * profile.step_time_s(0, 16, 16 * 1024) if profile and not pools else None,
        measured=held is not None and not held.estimated,
    )


def _tokens_per_s(profile: "Profile", max_num_seqs: int, kv_tokens: int, context: int, pools: bool) -> float:
    """Return the tokens per second of a full instance with typical requests; 0 where not one of them has room."""
    from scheduling.planning.simulated_capability import rough_requests_per_s
    from scheduling.simulation.engine.config import EngineConfig

    prompt, output = TYPICAL[0], 0 if pools else TYPICAL[1]
    if kv_tokens < prompt + output:
        return 0.0
    blocks, steps = kv_tokens // BLOCK, max(max_num_seqs, STEP_TOKENS)
    engine = EngineConfig(max_num_seqs, steps, BLOCK, blocks, "fcfs", context or kv_tokens, profile)
    return rough_requests_per_s(engine, prompt, output) * (prompt + output)


def _gpu(wanted: DeployRequest, row: GpuType | None) -> tuple[int | None, float | None]:
    """Return memory and dollars per hour of one GPU."""
    if row:
        return row.memory_bytes, float(row.on_demand_usd_per_hour)
    from scheduling.fleet.profile_estimate import GPUS

    facts = GPUS.get(wanted.gpu_type)
    usd = wanted.usd_per_gpu_hour
    return facts.memory_bytes if facts else None, float(usd) if usd is not None else None


def _held_profile(model: Model | None, gpu_type: GpuType | None, tensor_parallel: int) -> PerformanceProfile | None:
    rows = PerformanceProfile.objects.filter(model=model, gpu_type=gpu_type, tensor_parallel=tensor_parallel)
    return rows.first() if model and gpu_type else None


def _profile(wanted: DeployRequest, weights: int | None, kv_bytes: int | None) -> "Profile | None":
    """Return the estimated profile; None without sizes or for unknown hardware. Raises ValidationError."""
    from scheduling.fleet import profile_estimate

    facts = profile_estimate.facts_of(wanted.gpu_type)
    if facts is None or not weights or not kv_bytes:
        return None
    degree = wanted.tensor_parallel or 1
    try:
        sizes = profile_estimate.Sizes(
            weights,
            kv_bytes,
            (wanted.parameters_billion or 0.0) * 1e9,
            (wanted.active_parameters_billion or 0.0) * 1e9,
            wanted.layers or 0,
            wanted.experts or 0,
            wanted.experts_per_token or 0,
        )
    except ValueError as error:
        field = "active_parameters_billion" if "active" in str(error) else "experts_per_token"
        raise ValidationError({field: f"{str(error)[:1].upper()}{str(error)[1:]}."}) from error
    return profile_estimate.estimate(sizes, facts, degree, wanted.max_num_seqs)


def _nodes(wanted: DeployRequest) -> list[Node]:
    return list(Node.objects.filter(region__name=wanted.region, gpu_type__name=wanted.gpu_type, active=True))


def out_of_use(wanted: DeployRequest) -> Deployment | Model | None:
    """Return what was deployed by these names and has to be set active again: the deployment, or the retired model."""
    rows = Deployment.objects.select_related("model", "region", "gpu_type").filter(
        model__name=wanted.model, region__name=wanted.region, gpu_type__name=wanted.gpu_type
    )
    if (row := rows.first()) is not None and row.out_of_use():
        return row
    return Model.objects.filter(name=wanted.model, active=False).first()


@dataclass(frozen=True, slots=True)
class Deployed:
    deployment: Deployment
    profile: PerformanceProfile | None
    instances: tuple[Instance, ...]


@transaction.atomic
def deploy(wanted: DeployRequest, actor: User | str, reason: str = "") -> Deployed:
    """Create what is missing, start as many instances as the minimum (one at least), and record `model.deployed`.

    Raises ValidationError naming the field of `DeployRequest` at fault; nothing is written then.
    """
    wanted = completed(wanted)
    if (row := out_of_use(wanted)) is not None:
        raise ValidationError({"model": row.out_of_use()})
    try:
        made = _create(wanted, actor, reason)
    except ValidationError as error:
        raise _of_request(error) from error
    record(
        "model.deployed",
        made.deployment.model,
        actor=actor,
        after={
            "deployment": str(made.deployment),
            "tensor_parallel": made.deployment.tensor_parallel,
            "profile": "none" if made.profile is None else "estimated" if made.profile.estimated else "measured",
            "instances": [instance.name for instance in made.instances],
        },
        reason=reason,
    )
    return made


def _create(wanted: DeployRequest, actor: User | str, reason: str) -> Deployed:
    region = Region.objects.filter(name=wanted.region).first() or services.create(
        REGION, {"name": wanted.region, "title": region_title(wanted.region)}, actor, reason
    )
    gpu_type = _gpu_type(wanted, actor, reason)
    if wanted.gpus and not wanted.share_gpus_with:
        name = places.first_free(Node, f"{wanted.region}-{wanted.gpu_type.partition('-')[0]}"[:56])
        values = {"region": region.name, "gpu_type": gpu_type.name, "gpu_count": wanted.gpus, "address": wanted.address}
        services.create(NODE, {"name": name} | values, actor, reason)
    elif not _nodes(wanted):
        text = f"{region} has no node with {gpu_type}: say how many GPUs a new one has."
        raise ValidationError({"gpus": text})
    model = Model.objects.filter(name=wanted.model).first() or services.create(MODEL, _sizes(wanted), actor, reason)
    deployment = services.create(DEPLOYMENT, _deployment(wanted), actor, reason)
    profile = _store_profile(wanted, model, gpu_type, actor, reason)
    bring = _share if wanted.share_gpus_with else _start
    return Deployed(deployment, profile, bring(wanted, deployment, actor, reason))


def _of_request(error: ValidationError) -> ValidationError:
    """Return *error* of a row with the field names of `DeployRequest`; what has none there is the model's."""
    messages = error.message_dict if hasattr(error, "error_dict") else {NON_FIELD_ERRORS: error.messages}
    named: dict[str, list[str]] = {}
    for name, texts in messages.items():
        own = FIELDS.get(name, name)
        named.setdefault(own if own in DeployRequest.model_fields else "model", []).extend(texts)
    return ValidationError(named)


def _gpu_type(wanted: DeployRequest, actor: User | str, reason: str) -> GpuType:
    row = GpuType.objects.filter(name=wanted.gpu_type).first()
    if row:
        return row
    from scheduling.fleet.profile_estimate import GPUS

    facts = GPUS.get(wanted.gpu_type)
    if facts is None:
        known = ", ".join(sorted({*GPUS, *GpuType.objects.values_list("name", flat=True)}))
        raise ValidationError({"gpu_type": f"Nothing is known of {wanted.gpu_type!r}; known are {known}."})
    if wanted.usd_per_gpu_hour is None:
        raise ValidationError({"usd_per_gpu_hour": f"{facts.title} is new here: say what one costs an hour."})
    values = {
        "title": facts.title,
        "memory_bytes": facts.memory_bytes,
        "on_demand_usd_per_hour": wanted.usd_per_gpu_hour,
    }
    made: GpuType = services.create(GPU_TYPE, {"name": wanted.gpu_type} | values, actor, reason)
    return made


def _sizes(wanted: DeployRequest) -> dict[str, Any]:
    """Return values of a new model; omitted sizes and an omitted task are read from its source."""
    task = {"task": str(wanted.task)} if wanted.task else {}
    return task | {
        "name": wanted.model,
        "source": wanted.source,
        "weights_bytes": wanted.weights_bytes,
        "kv_bytes_per_token": wanted.kv_bytes_per_token,
        "context_tokens": wanted.context_tokens,
    }


def _deployment(wanted: DeployRequest) -> dict[str, Any]:
    names = (
        "model", "region", "gpu_type", "tensor_parallel", "gpu_memory_utilization", "max_num_seqs", "min_instances",
        "max_instances", "max_loras", "max_cpu_loras", "kv_offload_gib",
    )  # fmt: skip
    return {name: getattr(wanted, name) for name in names}


def _store_profile(
    wanted: DeployRequest, model: Model, gpu_type: GpuType, actor: User | str, reason: str
) -> PerformanceProfile | None:
    """Return the existing profile, or store an estimated one; None if it cannot be estimated."""
    held = _held_profile(model, gpu_type, wanted.tensor_parallel or 1)
    made = None if held else _profile(wanted, model.weights_bytes, model.kv_bytes_per_token)
    if held or made is None or gpu_type.device == Device.CPU:
        return held
    coefficients = {name: getattr(made, name) for name in made.__dataclass_fields__}
    key = {"model": model.name, "gpu_type": gpu_type.name, "tensor_parallel": wanted.tensor_parallel}
    stored: PerformanceProfile = services.create(
        PROFILE, key | {"source": SOURCE, "estimated": True} | coefficients, actor, reason
    )
    return stored


def _start(wanted: DeployRequest, deployment: Deployment, actor: User | str, reason: str) -> tuple[Instance, ...]:
    usual = usual_launcher()
    places.lock(Deployment.objects.filter(pk=deployment.pk))
    started = []
    for _ in range(max(1, deployment.min_instances)):
        try:
            node = places.pick(deployment, by_operator=True)
        except places.NoRoom as error:
            raise ValidationError({"gpus": f"{str(error)[:1].upper()}{str(error)[1:]}."}) from error
        launcher = wanted.launcher or (node.launcher(usual) if node else usual)
        values = {"name": places.free_name(deployment), "launcher": launcher, "node": node.name if node else None}
        names = {"model": wanted.model, "region": wanted.region, "gpu_type": wanted.gpu_type}
        started.append(services.create(INSTANCE, names | values, actor, reason or "deployed"))
    return tuple(started)


def _share(wanted: DeployRequest, deployment: Deployment, actor: User | str, reason: str) -> tuple[Instance, ...]:
    """Create one instance on the GPUs of another, stopped until a swap."""
    other = Instance.objects.select_related("deployment", "node").filter(name=wanted.share_gpus_with).first()
    if other is None:
        raise ValidationError({"share_gpus_with": f"There is no instance {wanted.share_gpus_with!r}."})
    places.lock(Deployment.objects.filter(pk__in=(deployment.pk, other.deployment_id)))
    usual = usual_launcher()
    row = Instance(
        name=places.free_name(deployment),
        deployment=deployment,
        launcher=wanted.launcher or (other.node.launcher(usual) if other.node else usual),
        node=other.node,
        state=InstanceState.STOPPED,
        swap_group=group_of(other, actor, reason),
    )
    row.full_clean()
    row.save()
    record_creation(row, actor, reason=reason)
    transaction.on_commit(notify)
    return (row,)


def usual_launcher() -> str:
    """Return the launcher of most instances that Pilothouse starts; by default vLLM processes."""
    counts = Counter(Instance.objects.launched().values_list("launcher", flat=True))
    return counts.most_common(1)[0][0] if counts else str(Launcher.PROCESS)


@dataclass(frozen=True, slots=True)
class PlaceOption:
    """A region and a GPU type of the fleet, without cordoned GPUs, and what a model would be there."""

    region: Region
    gpu_type: GpuType
    gpus: int
    free: int
    estimate: Estimate


def place_options(wanted: DeployRequest) -> list[PlaceOption]:
    """Return every region and GPU type with active nodes, with an estimate of what is *wanted* there."""
    rows: dict[tuple[Region, GpuType], list[int]] = {}
    for node in Node.objects.filter(active=True).with_gpus_used().select_related("region", "gpu_type"):
        row = rows.setdefault((node.region, node.gpu_type), [0, 0])
        usable = node.gpu_count - cast(Any, node).gpus_cordoned
        row[0] += usable
        row[1] += node.free_gpus() if usable < node.gpu_count else usable - cast(Any, node).gpus_used
    options = []
    for (region, gpu_type), (gpus, free) in rows.items():
        of_place = wanted.model_copy(update={"region": region.name, "gpu_type": gpu_type.name, "gpus": 0})
        options.append(PlaceOption(region, gpu_type, gpus, free, estimate(of_place)))
    return sorted(options, key=lambda each: (each.region.title, each.gpu_type.title))
