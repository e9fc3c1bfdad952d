"""The inventory as plain values, read in one pass so that the event loop never touches a row."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from django.db.models import Q
from django.utils import timezone

from controlplane.dispatch.port import FIRST, WeightedTargets
from controlplane.fleet import places
from controlplane.fleet.lifecycle import start_times
from controlplane.fleet.lifecycle.start_times import StartTimes
from controlplane.fleet.lifecycle.states import AWAKE, COMING, InstanceState
from controlplane.fleet.models import (
    Adapter,
    Deployment,
    Instance,
    Launcher,
    Model,
    PerformanceProfile,
    Region,
    WeightedTarget,
)
from controlplane.fleet.selectors import region_latencies_ms, schedules
from controlplane.fleet.shards import SHARD, in_zone, shard_of
from controlplane.fleet.spot.selectors import reclaim_times
from controlplane.fleet.swaps.selectors import statuses
from controlplane.tunable import Tunable
from controlplane.tuning import selectors as tuning
from controlplane.tuning.selectors import Values, without_rows
from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import USUAL, Profile
from scheduling.policy import EndpointPolicy, live_policy
from scheduling.scaling.schedule import EARLY_S, NO_SCHEDULE, Schedule

FAILED = InstanceState.FAILED
POLLED = frozenset(InstanceState) - {InstanceState.PROVISIONING, InstanceState.STOPPED}


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """A model in a region, across all its active deployments."""

    model: str
    region: str
    policy: EndpointPolicy = field(default_factory=EndpointPolicy)
    min_instances: int = 0
    max_instances: int = 0
    missing_instances: int = 0
    """Instances missing from the deployments' minimum: neither serving nor starting, though they may be started."""
    launches: bool = False
    """Whether Pilothouse has started instances of the model, and so can start one here."""
    max_num_seqs: int = 0
    """Requests that an instance of the oldest deployment runs at once; 0 if unknown."""
    max_loras: int = 0
    """LoRA adapters on the GPUs of an instance, of the deployment with the most; 0: no adapter is served."""
    shares_gpus: bool = False
    """Whether a swap on shared GPUs can bring an instance up."""
    profile: Profile = USUAL
    """Profile by which orderings measure requests: that of the oldest deployment."""
    front_end: FrontEnd = NO_LIMIT
    """Of that deployment too."""
    tuned: Tunable = field(default_factory=without_rows)
    """Settings in force for the model."""
    shard: str = FIRST
    """Role of its owner."""
    schedule: Schedule = NO_SCHEDULE
    """Minimums by the clock, beside `min_instances`."""
    start_s: float = 0.0
    """Time by which an instance is started before a scheduled minimum: 95 % of starts are faster."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    instance_id: int
    name: str
    url: str
    state: str
    state_changed_at: float  # epoch seconds
    model: str
    region: str
    gpu_type: str
    max_num_seqs: int
    kv_capacity_tokens: int
    adapter_slots: tuple[int, int] = (0, 0)  # LoRA adapters on its GPUs and in its CPU memory
    kv_events: str = ""  # address of its KV events, and of their replay after a blank; "": it says so itself
    launched: bool = False  # by Pilothouse, which could start it again
    failures: int = 0  # in a row
    swap_group: str = ""  # group that shares its GPUs; "" for none
    start_s: float | None = None
    """Duration of its start, estimated from earlier ones, while it is starting; None otherwise."""
    start_began_at: float = 0.0  # epoch seconds
    profile: Profile | None = None
    """Coefficients of its step time, where measured; used by routers that predict seconds."""
    front_end: FrontEnd = NO_LIMIT
    """Limits of its API process, where measured."""
    api_key: str = field(default="", repr=False)
    """Token that its server asks for; "" for none."""


@dataclass(frozen=True, slots=True)
class SwapMemberSpec:
    """One of the instances that share GPUs, including stopped ones."""

    instance_id: int
    name: str
    model: str
    region: str
    state: str
    state_changed_at: float  # epoch seconds
    swap_s: float
    """Duration of a swap to it once the awake member is drained: measured, else the usual one."""
    sleep_s: float
    """Time to leave the GPUs once drained."""
    load_s: float
    """Time to come up from where its weights are, or would be."""


@dataclass(frozen=True, slots=True)
class SwapGroupSpec:
    """Instances that share their GPUs, of which at most one is awake."""

    name: str
    members: tuple[SwapMemberSpec, ...]
    target: int | None = None
    """Target instance of the swap in progress; None without one."""

    @property
    def in_progress(self) -> bool:
        """Whether a swap is in progress."""
        return self.target is not None

    @property
    def awake(self) -> SwapMemberSpec | None:
        return next((one for one in self.members if one.state in AWAKE), None)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    name: str
    context_tokens: int
    created_at: int  # epoch seconds, for /v1/models
    task: str = "generate"
    fallback: str = ""  # "" for none
    fallback_wait_s: float | None = None
    shard: str = FIRST  # role of its owner, without a zone


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter, which is asked for as a model."""

    name: str
    base: str
    source: str
    created_at: int  # epoch seconds
    tenant_id: int = 0  # whose alone it is; 0: of all


@dataclass(frozen=True, slots=True)
class Inventory:
    models: dict[str, ModelSpec]
    endpoints: tuple[EndpointSpec, ...]
    instances: tuple[InstanceSpec, ...]
    latency_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """One-way latency by (origin, target), where known: `scheduling.routing.regions.latency_ms`."""
    values: Values = field(default_factory=Values)
    """Settings in force."""
    swap_groups: tuple[SwapGroupSpec, ...] = ()
    adapters: tuple[AdapterSpec, ...] = ()
    targets: tuple[WeightedTargets, ...] = ()
    dark_regions: frozenset[str] = frozenset()
    zones: Mapping[str, str] = field(default_factory=dict)
    """Zone of each region, where any has one; else empty."""

    def role(self, model: str, region: str) -> str:
        """Return the role of the owner of what *model* has in *region*."""
        return in_zone(self.models[model].shard if model in self.models else FIRST, self.zones.get(region, ""))

    def of(self, roles: Collection[str]) -> "Inventory":
        """Return the inventory without the models of other shards, and what serves these or is in other zones."""
        shards = {shard_of(role) for role in roles}
        models = {name: model for name, model in self.models.items() if model.shard in shards}

        def is_own(each: EndpointSpec | InstanceSpec | SwapMemberSpec) -> bool:
            return each.model in models and self.role(each.model, each.region) in roles

        instances = tuple(filter(is_own, self.instances))
        return replace(
            self,
            models=models,
            endpoints=tuple(filter(is_own, self.endpoints)),
            instances=instances,
            swap_groups=tuple(each for each in self.swap_groups if any(map(is_own, each.members))),
            adapters=tuple(each for each in self.adapters if each.base in models),
            dark_regions=self.dark_regions & {each.region for each in instances},
        )


def read() -> Inventory:
    """Read the active inventory in twelve queries, more where GPUs are shared or instances start; ordered by name."""
    models = {row.name: row for row in Model.objects.filter(active=True).select_related("fallback")}
    # A stopped instance counts only where a swap may start it: it has a place in the virtual queue of its GPUs.
    rows = Instance.objects.order_by("name").exclude(state=InstanceState.STOPPED, swap_group=None)
    rows = rows.exclude(~Q(held=""), state=InstanceState.STOPPED)
    rows = rows.exclude(pk__in=Instance.objects.cancelled().values("pk"), swap_group=None)
    instances = list(
        rows.select_related("deployment__model", "deployment__region", "deployment__gpu_type", "swap_group")
    )
    scheduled = schedules()
    needs_starts = scheduled or any(row.state in COMING for row in instances)
    starts = start_times.read() if needs_starts else StartTimes({})
    present = Counter(Instance.objects.order_by().present().values_list("deployment_id", flat=True))
    launched = Instance.objects.launched().order_by()
    launched_models = set(launched.values_list("deployment__model", flat=True).distinct())
    values = tuning.read()
    regions = list(Region.objects.values_list("name", "zone", "dark_since"))
    swap_groups = _swap_groups()
    sharing = {(one.model, one.region) for group in swap_groups for one in group.members if one.state != FAILED}
    endpoints: dict[tuple[str, str], EndpointSpec] = {}
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    deployments = list(
        active.select_related("model", "region", "gpu_type").order_by("model__name", "region__name", "pk")
    )
    bounds = places.bounds(deployments)
    rows_of: dict[tuple[str, str], list[Deployment]] = {}
    for row in deployments:
        rows_of.setdefault((row.model.name, row.region.name), []).append(row)
    profiles = {(row.model_id, row.gpu_type_id, row.tensor_parallel): row for row in PerformanceProfile.objects.all()}
    for row in deployments:
        least, most = bounds[row.pk]
        key = (row.model.name, row.region.name)
        known, profile = endpoints.get(key), profiles.get((row.model_id, row.gpu_type_id, row.tensor_parallel))
        endpoints[key] = EndpointSpec(
            model=row.model.name,
            region=row.region.name,
            policy=live_policy(partial(getattr, values.of(row.model.name)), rows_of[key]),
            min_instances=row.min_instances + (known.min_instances if known else 0),
            max_instances=most + (known.max_instances if known else 0),
            missing_instances=max(0, least - present[row.pk]) + (known.missing_instances if known else 0),
            launches=(most > 0 and row.model_id in launched_models) or bool(known and known.launches),
            tuned=values.of(row.model.name),
            max_num_seqs=known.max_num_seqs if known else row.max_num_seqs,
            max_loras=max(row.max_loras, known.max_loras if known else 0),
            shares_gpus=key in sharing,
            shard=in_zone(f"{SHARD}{row.model.shard}", row.region.zone),
            schedule=scheduled.get(key, NO_SCHEDULE),
            start_s=max(starts.of(row.model.name, row.gpu_type.name).p95_s + EARLY_S, known.start_s if known else 0.0),
            profile=known.profile if known else _measured(profile) or USUAL,
            front_end=known.front_end if known else _front_end(profile),
        )
    return Inventory(
        models={
            name: ModelSpec(
                name,
                row.context_tokens,
                int(row.created_at.timestamp()),
                row.task,
                row.fallback.name if row.fallback and row.fallback.active else "",
                row.fallback_wait_s,
                f"{SHARD}{row.shard}",
            )
            for name, row in models.items()
        },
        endpoints=tuple(endpoints.values()),
        instances=tuple(
            InstanceSpec(
                instance_id=row.pk,
                name=row.name,
                url=row.url.rstrip("/"),
                state=row.state,
                state_changed_at=row.state_changed_at.timestamp(),
                model=row.deployment.model.name,
                region=row.deployment.region.name,
                gpu_type=row.deployment.gpu_type.name,
                max_num_seqs=row.max_num_seqs,
                adapter_slots=row.adapter_slots,
                kv_capacity_tokens=row.kv_capacity_tokens,
                kv_events=row.kv_events,
                launched=row.launcher != Launcher.EXTERNAL,
                api_key=row.token,
                failures=row.failures,
                swap_group=row.swap_group.name if row.swap_group else "",
                start_s=_start_s(row, starts),
                start_began_at=(
                    row.state_changed_at
                    if row.state == InstanceState.RECLAIMING
                    else starts.begun.get(str(row.pk), row.state_changed_at)
                ).timestamp(),
                profile=_measured(profile),
                front_end=_front_end(profile),
            )
            for row in instances
            for profile in [
                profiles.get((row.deployment.model_id, row.deployment.gpu_type_id, row.deployment.tensor_parallel))
            ]
        ),
        values=values,
        latency_ms=region_latencies_ms(),
        swap_groups=swap_groups,
        adapters=tuple(
            AdapterSpec(row.name, row.base.name, row.source, int(row.created_at.timestamp()), row.tenant_id or 0)
            for row in Adapter.objects.filter(active=True, base__active=True).select_related("base")
        ),
        targets=_targets(),
        dark_regions=frozenset(name for name, _, dark_since in regions if dark_since),
        zones={name: zone for name, zone, _ in regions} if any(zone for _, zone, _ in regions) else {},
    )


def _targets() -> tuple[WeightedTargets, ...]:
    rows = WeightedTarget.objects.filter(active=True).order_by("created_at")
    names: dict[str, WeightedTargets] = {}
    for row in rows:
        known = names.setdefault(row.name, WeightedTargets(row.name, int(row.created_at.timestamp()), {}))
        known.weights[row.target] = row.weight
    return tuple(names.values())


def _start_s(row: Instance, starts: StartTimes) -> float | None:
    """Return the expected time of the start or reclaim of *row*; None while it is in neither."""
    if row.state not in COMING:
        return None
    if row.state == InstanceState.RECLAIMING:
        return reclaim_times(timezone.now()).expected_s
    return starts.of(row.deployment.model.name, row.deployment.gpu_type.name).seconds


def _swap_groups() -> tuple[SwapGroupSpec, ...]:
    return tuple(
        SwapGroupSpec(
            status.group.name,
            tuple(
                SwapMemberSpec(
                    one.instance.pk,
                    one.instance.name,
                    one.instance.deployment.model.name,
                    one.instance.deployment.region.name,
                    one.instance.state,
                    one.instance.state_changed_at.timestamp(),
                    one.seconds,
                    one.leave.seconds,
                    one.back.seconds,
                )
                for one in status.members
                if not places.obstacle(one.instance) or one.is_awake
            ),
            status.running.instance_id if status.running else None,
        )
        for status in statuses()
    )


def _measured(row: PerformanceProfile | None) -> Profile | None:
    """Return the coefficients of *row*; None without a valid measurement."""
    try:
        return None if row is None else row.coefficients()
    except ValueError:
        return None


def _front_end(row: PerformanceProfile | None) -> FrontEnd:
    """Return the limits of the API process in *row*; none without a valid measurement."""
    try:
        return NO_LIMIT if row is None else row.front_end()
    except ValueError:
        return NO_LIMIT
