"""The fleet of a scenario: instances, the links between them, their policies and classes. `build` makes arrays of it."""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np

from scheduling.applications.prewarming import LRU, USUAL_K, USUAL_SHARE, PrewarmBy
from scheduling.applications.warm_pool import WarmTerms
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.pooling_profile import profile_of_prefills
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.promises import ClassTerms, Promise
from scheduling.queueing.reordering.rules import SEARCH
from scheduling.routing.models import Fallback
from scheduling.routing.regions import by_preference, latency_ms
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import Delays, Group, gpus_as_type
from scheduling.simulation.scenario.policies import SloClassOf
from scheduling.simulation.scenario.toml_lines import ScenarioProblem

EndpointKey = tuple[str, str]
"""(model, region)."""
NO_LIMITS: Final[dict[str, Any]] = {"dispatch_max_num_seqs": 100_000, "dispatch_kv_tokens": 1 << 40}
"""Limits of the dispatcher for an instance that takes everything at once."""


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
    memory_bytes: float = np.inf
    """CPU memory for the weights of the group's sleeping instances."""


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
    redeploy_s: float | None = None
    """Measured time to load its model on the spot instance of another, its weights near; None: by the `Delays`."""
    usd_per_hour: float = 0.0
    """Price of its GPUs: the cheapest candidate is added first, the dearest removed first."""
    spot_usd_per_hour: float = 0.0
    """Income of its GPUs while they are lent out as spot."""
    sharing: Sharing | None = None
    """None: shares no GPUs."""


@dataclass(slots=True)
class Cluster:
    """Instances, regions and policies by their numbers; `cluster_of` makes it of a scenario, whose tables are checked."""

    instances: Sequence[InstanceSpec]
    models: list[str] = field(default_factory=list)
    """A model's number is its position; models of instances that are missing here are added."""
    regions: list[str] = field(default_factory=list)
    residency: Sequence[tuple[str, ...]] = ()
    """Sets of regions within which requests of some tenants have to be served."""
    latency_s: Any = None
    """One way, from region (row) to region (column); None: no time between any."""
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
    classes: Sequence[ClassTerms] = ()
    """SLO classes by their number in requests; needed where any request is judged at the door."""
    promises: Sequence[Promise] = ()
    """What is promised to each class, for measures; none without them."""
    names: Sequence[str] = ()
    """What requests may ask for, by the number in `Requests.asked`: models (alone if not given), then public names."""
    max_hold_s: float = np.inf
    """Longest hold of a request whose class has no deadline."""
    fallbacks: Mapping[str, Fallback] = field(default_factory=dict)
    """By model, the one that serves its requests where it does not."""
    pooling: Collection[str] = ()
    """Models whose requests have no output: the token that ends their prefill counts for nothing."""
    tenant_weights: Sequence[float] = ()
    """Weights of tenants by their number in requests, in orders by application or by share; 1 for further ones."""
    endpoints: list[EndpointKey] = field(init=False, default_factory=list)
    origins: list[tuple[str, tuple[str, ...]]] = field(init=False, default_factory=list)
    """Region of a caller, and the regions within which it is served (none: any), by `Requests.region`: a region's number,
    and further numbers for the same regions within each of *residency*.
    """

    def __post_init__(self) -> None:
        self.models = list(dict.fromkeys([*self.models, *(spec.model for spec in self.instances)]))
        self.regions = list(dict.fromkeys([*self.regions, *(spec.region for spec in self.instances)]))
        self.names = self.names or self.models
        self.endpoints = list(dict.fromkeys((spec.model, spec.region) for spec in self.instances))
        self.origins = [(region, within) for within in ((), *self.residency) for region in self.regions]
        count = len(self.regions)
        self.latency_s = np.zeros((count, count)) if self.latency_s is None else np.array(self.latency_s, np.float64)

    def swap_groups(self) -> list[str]:
        """Return the names in order of their numbers."""
        return list(dict.fromkeys(spec.sharing.group for spec in self.instances if spec.sharing is not None))

    def policy(self, key: EndpointKey) -> EndpointPolicy:
        return self.policies if isinstance(self.policies, EndpointPolicy) else self.policies[key]

    def reference_engine(self, key: EndpointKey) -> EngineConfig:
        """Return the engine of the endpoint's first instance."""
        return next(spec.engine for spec in self.instances if (spec.model, spec.region) == key)

    def requests_at_once(self, key: EndpointKey) -> int:
        """Return how many requests the endpoint's first instance runs at once."""
        return self.reference_engine(key).max_num_seqs

    def reference_profile(self, key: EndpointKey) -> Profile:
        """Return its profile, for orderings that compare service times."""
        return self.reference_engine(key).profile

    def candidates(self, model: str, region: str, within: Collection[str] = ()) -> list[int]:
        """Return the endpoints of *model* in the order that a caller in *region* prefers; *within* regions, or any."""
        latency_s = self.latency_s[self.regions.index(region)]
        places = {
            where: at
            for at, (name, where) in enumerate(self.endpoints)
            if name == model and (not within or where in within)
        }
        return [places[to] for to in by_preference(region, places, lambda to: latency_s[self.regions.index(to)])]

    def nearest(self) -> list[list[int]]:
        """Return the endpoint that callers prefer, by model and their origin; 0 where the model is not served to them."""
        return [[next(iter(self.candidates(model, *origin)), 0) for origin in self.origins] for model in self.models]

    def engines(self) -> dict[tuple[str, str], EngineConfig]:
        """Return the engine of each model on each GPU type, for redeploying: the first instance's."""
        engines: dict[tuple[str, str], EngineConfig] = {}
        for spec in self.instances:
            engines.setdefault((spec.model, spec.gpu_type), spec.engine)
        return engines

    def cached_block_sizes(self) -> set[int]:
        """Return the block sizes, in tokens, of the engines that cache prefixes."""
        return {spec.engine.block_size_tokens for spec in self.instances if spec.engine.prefix_caching}

    def longest_tokens(self) -> list[int]:
        """Return the most prompt and output tokens of each model that any instance can hold; 0 without an instance."""
        longest: dict[str, int] = {}
        for spec in self.instances:
            # The last token produced is never computed, so it needs no room.
            most = min(spec.engine.max_model_len, spec.engine.kv_capacity_tokens + 1)
            longest[spec.model] = min(longest.get(spec.model, most), most)
        return [longest.get(model, 0) for model in self.models]


def cluster_of(scenario: Scenario) -> Cluster:
    """Return the fleet, its policies and its classes. Raise ScenarioProblem."""
    keys = [(group.model, region) for group in scenario.fleet for region in group.regions]
    policies = {key: scenario.policy(*key) for key in keys}
    names, pooling, regions, of_all = scenario.names, scenario.pooling, list(scenario.regions), scenario.policies
    gpu_types = [gpus_as_type(group.gpu, group.tensor_parallel) for group in scenario.fleet]
    promises = [_promise(one) for one in scenario.classes.values()]
    classes = [_terms(*each) for each in zip(scenario.classes.items(), promises, strict=True)]
    instances = _instances(scenario, gpu_types, _engines(scenario, pooling))
    given_ms = {
        (origin, target): each_ms
        for origin, targets in scenario.latency_ms.items()
        for target, each_ms in targets.items()
    }
    return Cluster(
        instances,
        models=list(scenario.models),
        names=names,
        fallbacks={
            name: Fallback(model.fallback, model.fallback_wait_s)
            for name, model in scenario.models.items()
            if model.fallback
        },
        pooling=pooling,
        regions=regions,
        residency=list(dict.fromkeys(map(tuple, scenario.residency.values()))),
        latency_s=[[latency_ms(given_ms, here, to, unknown_ms=0.0) / 1000 for to in regions] for here in regions],
        policies=policies,
        sweeps=of_all.sweeps,
        reordering=of_all.reordering,
        prewarming=of_all.prewarming,
        prewarm_k=of_all.prewarm_k,
        prewarm_share=of_all.prewarm_share,
        backends={kind: WarmTerms(**one.model_dump()) for kind, one in scenario.backends.items()},
        delays=scenario.delays,
        share_spot=of_all.share_spot,
        promises=promises,
        classes=classes,
        max_hold_s=of_all.max_hold_s,
    )


def _instances(scenario: Scenario, gpu_types: Sequence[str], engines: Sequence[EngineConfig]) -> list[InstanceSpec]:
    """Return the instances of all groups of the fleet; *gpu_types* and *engines* are by group."""
    # Ready instances have the first numbers of a model in a region, before the empty places of earlier groups.
    ready: Counter[EndpointKey] = Counter()
    rest = Counter({(group.model, region): 0 for group in scenario.fleet for region in group.regions})
    for group in scenario.fleet:
        rest.update({(group.model, region): group.instances for region in group.regions})
    instances: list[InstanceSpec] = []
    for at, group in enumerate(scenario.fleet):
        states = [State.READY] * group.instances + [State.ASLEEP] * group.asleep
        states += [State.SPOT] * group.spot + [State.EMPTY] * group.empty
        gpu, count = scenario.gpus[group.gpu], group.tensor_parallel
        for region in group.regions:
            key = group.model, region
            for number, state in enumerate(states, 1):
                named = ready if number <= group.instances else rest
                named[key] += 1
                instances.append(
                    InstanceSpec(
                        group.model,
                        region,
                        engines[at],
                        gpu_types[at],
                        f"{group.model}-{region}-{named[key]}",
                        state,
                        usd_per_hour=gpu.usd_per_hour * count,
                        spot_usd_per_hour=gpu.spot_usd_per_hour * count,
                        start_s=group.start_s,
                        reclaim_s=group.reclaim_s,
                        pull_s=group.pull_s,
                        redeploy_s=group.redeploy_s,
                        sharing=_sharing(scenario, group, region, number),
                        **(NO_LIMITS if group.takes_all else {}),
                    )
                )
    return instances


def _engines(scenario: Scenario, pooling: Container[str]) -> list[EngineConfig]:
    """Return the engine of each group of the fleet."""
    profiles, front_ends = {}, {}
    for number, one in enumerate(scenario.profiles):
        setting = one.model, one.gpu, one.tensor_parallel
        front_ends[setting] = FrontEnd(**one.front_end.model_dump(exclude_none=True))
        prefill = one.prefill.t0_s, one.prefill.a_s, one.prefill.b_s_per_token, one.prefill.c_s_per_token2
        try:
            profiles[setting] = (
                profile_of_prefills(*prefill)
                if one.decode is None
                else Profile(*prefill, one.decode.a_s, one.decode.b_s_per_sequence, one.decode.c_s_per_token)
            )
        except ValueError as error:
            raise ScenarioProblem(("profiles", number), str(error)) from error
    return [
        EngineConfig(
            max_num_seqs=group.max_num_seqs,
            max_num_batched_tokens=group.max_num_batched_tokens,
            block_size_tokens=group.block_size_tokens,
            kv_blocks=group.kv_tokens // group.block_size_tokens,
            policy=group.queue,
            # The token that ends a prompt without output is no part of its length.
            max_model_len=scenario.models[group.model].context_tokens + (group.model in pooling),
            profile=profiles[group.model, group.gpu, group.tensor_parallel],
            prefix_caching=group.prefix_caching,
            offload_blocks=group.offload_tokens // group.block_size_tokens,
            restore_s=group.restore_s,
            restore_s_per_token=group.restore_s_per_token,
            max_loras=group.max_loras,
            max_cpu_loras=group.max_cpu_loras,
            adapter_storage_s=group.adapter_storage_s,
            adapter_memory_s=group.adapter_memory_s,
            front_end=front_ends[group.model, group.gpu, group.tensor_parallel],
        )
        for group in scenario.fleet
    ]


def _sharing(scenario: Scenario, group: Group, region: str, number: int) -> Sharing | None:
    """Return the GPU sharing of instance *number* of *group* in *region*; None without any."""
    if (given := group.sharing) is None:
        return None
    memory = scenario.swap_groups.get(given.group)
    return Sharing(
        f"{given.group}-{region}-{number}",
        given.sleep_s,
        given.wake_s,
        given.reload_s,
        given.weights_gb * 1e9,
        inf if memory is None else memory.cpu_memory_gb * 1e9,
    )


def _promise(one: SloClassOf) -> Promise:
    """Return the targets of a class, infinity where there is none."""
    ttft_s, itl_s, e2e_s = (inf if ms is None else ms / 1000 for ms in (one.ttft_ms, one.itl_ms, one.e2e_ms))
    return Promise(ttft_s, itl_s, e2e_s, inf if one.deadline_s is None else one.deadline_s)


def _terms(named: tuple[str, SloClassOf], promise: Promise) -> ClassTerms:
    """Return the terms on which the dispatcher queues the requests of a class."""
    name, one = named
    due_s, end_s = (None if each_s == inf else each_s for each_s in (promise.ttft_s, promise.end_s))
    return ClassTerms(
        name,
        one.priority,
        due_s,
        end_s,
        one.deadline_s,
        one.kind == "interactive",
        one.kind == "opportunistic",
        one.on_reclaim == "end",
        one.if_unreachable,
        one.degrades_to or "",
    )
