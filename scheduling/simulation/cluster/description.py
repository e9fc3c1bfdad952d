"""A fleet to simulate: instances, the links between them, and their policies. `build` makes arrays of it."""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.applications.prewarming import LRU, USUAL_K, USUAL_SHARE, PrewarmBy
from scheduling.applications.warm_pool import WarmTerms
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.promises import ClassTerms
from scheduling.queueing.reordering.rules import REORDERINGS, SEARCH
from scheduling.routing.models import Fallback
from scheduling.routing.regions import by_preference
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig

EndpointKey = tuple[str, str]
"""(model, region)."""
RESTS = (State.EMPTY, State.READY, State.SPOT, State.ASLEEP)


@dataclass(frozen=True, slots=True)
class Sharing:
    """An instance's membership in a swap group: its GPUs are shared, and at most one member is awake (QLM section 5)."""

    group: str
    sleep_s: float
    """Until its weights have left the GPUs."""
    wake_s: float
    """Until it serves, from weights in CPU memory (vLLM's sleep level 1)."""
    reload_s: float
    """Until it serves, from weights only in storage (level 2)."""
    weights_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sleep_s", "wake_s", "reload_s", "weights_bytes"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be a number from 0 up, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance at the start."""

    model: str
    region: str
    engine: EngineConfig
    gpu_type: str = ""
    name: str = ""
    state: State = State.READY
    """At rest: EMPTY, READY, SPOT or ASLEEP."""
    dispatch_max_num_seqs: int | None = None
    """Maximum requests that the dispatcher gives it at once; the engine's limit if None."""
    dispatch_kv_tokens: int | None = None
    """KV tokens that the dispatcher assumes; the engine's own if None."""
    start_s: float | None = None
    """Measured time from request to serving (returns from spot vary around it); None: by the `Delays`."""
    reclaim_s: float | None = None
    """Measured median time of a reclaim from spot; None: by the `Delays`, or like a start where that is measured."""
    pull_s: float | None = None
    """Time to pull the weights into its region before a new machine loads them, 0 where they are; None: by the `Delays`."""
    usd_per_hour: float = 0.0
    """Price of its GPUs: the cheapest candidate is added first, the dearest removed first."""
    sharing: Sharing | None = None
    """None: shares no GPUs."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Durations of changes in seconds. Spot and redeploying: SageServe sections 4 and 7.1; the others are our choice."""

    spot_median_s: float = 60.0
    spot_max_s: float = 300.0
    start_s: float = 180.0
    """From an unpaid machine until its weights begin to load."""
    local_weights_s: float = 600.0
    remote_weights_s: float = 7200.0
    sleep_s: float = 3.0
    wake_s: float = 5.0
    swap_gpu_s: float = 0.1
    swap_cpu_s: float = 5.0
    swap_storage_s: float = 60.0
    gpu_models: int = 1
    """Models whose weights an instance's GPU holds, including the serving one."""
    cpu_models: int = 2
    """Further models whose weights its host memory holds."""
    repair_s: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be a number from 0 up, not {getattr(self, name)}")
        if self.spot_median_s > self.spot_max_s:
            raise ValueError(f"spot_median_s ({self.spot_median_s}) is more than spot_max_s ({self.spot_max_s})")
        if self.gpu_models < 1:
            raise ValueError("gpu_models must be at least 1: the one that serves")


@dataclass(slots=True)
class Cluster:
    """Instances, regions and policies. Raises ValueError naming the invalid instance or endpoint."""

    instances: Sequence[InstanceSpec]
    models: list[str] = field(default_factory=list)
    """A model's number is its position; models of instances that are missing here are added."""
    regions: list[str] = field(default_factory=list)
    latency_s: ArrayLike | None = None
    """One way, from region (row) to region (column)."""
    policies: EndpointPolicy | Mapping[EndpointKey, EndpointPolicy] = field(default_factory=EndpointPolicy)
    """Of all endpoints, or by endpoint."""
    reordering: str = SEARCH
    """For the order `qlm`: the global scheduler's rule, the search or a rule of `reordering.rules`."""
    prewarming: PrewarmBy = LRU
    """How backends are prewarmed, with the least effectiveness *prewarm_k* for application runs."""
    prewarm_k: float = USUAL_K
    prewarm_share: float = USUAL_SHARE
    """Most of an instance's time that computing system prompts early may take."""
    backends: Mapping[str, WarmTerms] = field(default_factory=dict)
    """Of units of runs that are no LLM, by kind: `container`, `dnn`; those of another kind are always warm."""
    sweeps: bool = False
    """Whether requests are swept every second, as live: moved if better, refused after `Requests.hold_s`."""
    delays: Delays = field(default_factory=Delays)
    reactive: Reactive | None = None
    share_spot: bool = True
    """Whether a spot instance of one model may be redeployed for another."""
    catalog: Mapping[tuple[str, str], EngineConfig] = field(default_factory=dict)
    """Engines by (model, GPU type) for redeploying and swapping, in addition to those of the instances."""
    swap_memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """CPU memory for the weights of sleeping instances, by swap group; unlimited if not given."""
    classes: Sequence[ClassTerms] = ()
    """SLO classes by their number in requests, where any request is judged at the door."""
    max_hold_s: float = np.inf
    """Longest hold of a request whose class has no deadline."""
    fallbacks: Mapping[str, Fallback] = field(default_factory=dict)
    """By model, the one that serves its requests where it does not."""
    pooling: Collection[str] = ()
    """Models whose requests have no output: the token that ends their prefill counts for nothing."""
    tenant_weights: Sequence[float] = ()
    """Weights of tenants by their number in requests, in orders by application or by share; 1 for further ones."""
    endpoints: list[EndpointKey] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if not self.instances:
            raise ValueError("a cluster has at least one instance")
        self.models, self.regions = list(self.models), list(self.regions)
        for kind, names in (("models", self.models), ("regions", self.regions)):
            if len(set(names)) != len(names):
                raise ValueError(f"{kind} names one twice: {', '.join(names)}")
        for number, spec in enumerate(self.instances):
            where = f"instance {number}" + (f" ({spec.name})" if spec.name else "")
            if spec.state not in RESTS:
                raise ValueError(f"{where}: starts {', '.join(state.name for state in RESTS)}, not {spec.state!r}")
            if spec.start_s is not None and not 0 <= spec.start_s < np.inf:
                raise ValueError(f"{where}: start_s must be a number from 0 up, not {spec.start_s}")
            for name in ("dispatch_max_num_seqs", "dispatch_kv_tokens"):
                value = getattr(spec, name)
                if value is not None and value < (2 if name == "dispatch_kv_tokens" else 1):
                    raise ValueError(f"{where}: {name} is {value}, too few for any request")
            if spec.model not in self.models:
                self.models.append(spec.model)
            if spec.region not in self.regions:
                self.regions.append(spec.region)
            if (spec.model, spec.region) not in self.endpoints:
                self.endpoints.append((spec.model, spec.region))
        for model, _ in self.catalog:
            if model not in self.models:
                self.models.append(model)
        if self.reactive is not None and self.reactive.patience_s:
            raise ValueError(
                "reactive: the trigger that decides on every arrival has no patience; patience_s must be 0"
            )
        if self.reordering not in REORDERINGS:
            raise ValueError(f"reordering must be one of {', '.join(REORDERINGS)}, not {self.reordering!r}")
        for model, region in self.endpoints:
            if isinstance(self.policies, Mapping) and (model, region) not in self.policies:
                raise ValueError(f"endpoint {model} in {region}: policies are given by endpoint, but not for this one")
        for model, fallback in self.fallbacks.items():
            if fallback.model == model or not {model, fallback.model} <= {*self.models}:
                raise ValueError(f"the fallback of {model} must be another model of the cluster, not {fallback.model}")
        self.latencies()
        self._check_swap_groups()

    def _check_swap_groups(self) -> None:
        members: dict[str, list[InstanceSpec]] = {}
        for spec in self.instances:
            if spec.sharing is not None:
                members.setdefault(spec.sharing.group, []).append(spec)
        for name, specs in members.items():
            if len({(spec.region, spec.gpu_type) for spec in specs}) > 1:
                raise ValueError(f"swap group {name}: its instances are not all in one region on one GPU type")
            if sum(spec.state in (State.READY, State.SPOT) for spec in specs) > 1:
                raise ValueError(f"swap group {name}: one of its instances at most has the GPUs at the start")
        for name, memory_bytes in self.swap_memory_bytes.items():
            if name not in members:
                raise ValueError(f"swap_memory_bytes: no instance is of swap group {name}")
            if not memory_bytes >= 0:
                raise ValueError(f"swap_memory_bytes of {name} must be a number from 0 up, not {memory_bytes}")

    def swap_groups(self) -> list[str]:
        """Return the names in order of their numbers."""
        return list(dict.fromkeys(spec.sharing.group for spec in self.instances if spec.sharing is not None))

    def shared_queues(self, ordered: Container[EndpointKey]) -> dict[int, int]:
        """Return the virtual queue of each instance, by `sharing.share_queues`; *ordered*: endpoints with groups."""
        members: dict[str, list[int]] = {}
        for slot, spec in enumerate(self.instances):
            if spec.sharing is not None:
                members.setdefault(spec.sharing.group, []).append(slot)
        queues: dict[int, int] = {}
        for slots in members.values():
            keys = [(self.instances[slot].model, self.instances[slot].region) for slot in slots]
            if all(key in ordered and self.policy(key).swap_by_queue for key in keys):
                queues |= dict.fromkeys(slots, min(slots))
        return queues

    def policy(self, key: EndpointKey) -> EndpointPolicy:
        return self.policies if isinstance(self.policies, EndpointPolicy) else self.policies[key]

    def reference_engine(self, key: EndpointKey) -> EngineConfig:
        """Return the engine of the endpoint's first instance."""
        return next(spec.engine for spec in self.instances if (spec.model, spec.region) == key)

    def requests_at_once(self, key: EndpointKey) -> int:
        """Return how many requests the endpoint's first instance runs at once; 0 without one."""
        return next((each.engine.max_num_seqs for each in self.instances if (each.model, each.region) == key), 0)

    def reference_profile(self, key: EndpointKey) -> Profile:
        """Return its profile, for orderings that compare service times."""
        return self.reference_engine(key).profile

    def latencies(self) -> NDArray[np.float64]:
        """Return one-way latencies, regions x regions. Raise ValueError for another shape or invalid times."""
        count = len(self.regions)
        if self.latency_s is None:
            return np.zeros((count, count))
        latency_s = np.array(self.latency_s, np.float64)
        if latency_s.shape != (count, count):
            raise ValueError(f"latency_s has the shape {latency_s.shape}; there are {count} regions")
        for at in np.argwhere(~((latency_s >= 0) & (latency_s < np.inf))):
            names = f"{self.regions[at[0]]} to {self.regions[at[1]]}"
            raise ValueError(f"latency_s from {names} is {latency_s[tuple(at)]}: not a time from 0 up")
        return latency_s

    def candidates(self, model: str, region: str) -> list[int]:
        """Return the endpoints of *model* in the order that a caller in *region* prefers."""
        latency_s = self.latencies()[self.regions.index(region)]
        places = {where: at for at, (name, where) in enumerate(self.endpoints) if name == model}
        return [places[to] for to in by_preference(region, places, lambda to: latency_s[self.regions.index(to)])]

    def nearest(self) -> list[list[int]]:
        """Return the endpoint that callers prefer, by model and their region; 0 where the model is served nowhere."""
        return [[next(iter(self.candidates(model, region)), 0) for region in self.regions] for model in self.models]

    def engines(self) -> dict[tuple[str, str], EngineConfig]:
        """Return the engine of each model on each GPU type, for redeploying: the catalogue's, else the first instance's."""
        engines = dict(self.catalog)
        for spec in self.instances:
            engines.setdefault((spec.model, spec.gpu_type), spec.engine)
        return engines

    def cached_block_sizes(self) -> set[int]:
        """Return the block sizes, in tokens, of the engines that cache prefixes."""
        engines = [*(spec.engine for spec in self.instances), *self.catalog.values()]
        return {engine.block_size_tokens for engine in engines if engine.prefix_caching}

    def longest_tokens(self) -> list[int]:
        """Return the most prompt and output tokens of each model that any instance can hold; 0 without an instance."""
        longest = [0] * len(self.models)
        served = [(spec.model, spec.engine) for spec in self.instances]
        served += [(model, engine) for (model, _), engine in self.catalog.items() if model in dict(self.endpoints)]
        for model, engine in served:
            at = self.models.index(model)
            # The last token produced is never computed, so it needs no room.
            most = min(engine.max_model_len, engine.kv_capacity_tokens + 1)
            longest[at] = min(longest[at], most) if longest[at] else most
        return longest
