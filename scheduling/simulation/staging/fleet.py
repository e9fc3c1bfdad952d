"""The fleet of a scenario, its policies and its classes, as a cluster."""

from collections import Counter
from collections.abc import Container, Sequence
from math import inf
from typing import Any, Final

from scheduling.applications.warm_pool import WarmTerms
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.pooling_profile import profile_of_prefills
from scheduling.fleet.profile import Profile
from scheduling.queueing.promises import ClassTerms
from scheduling.routing.models import Fallback
from scheduling.routing.regions import latency_ms
from scheduling.simulation.cluster.description import Cluster, EndpointKey, InstanceSpec, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import Group
from scheduling.simulation.scenario.policies import SloClassOf
from scheduling.simulation.staging.problem import ScenarioProblem

NO_LIMITS: Final[dict[str, Any]] = {"dispatch_max_num_seqs": 100_000, "dispatch_kv_tokens": 1 << 40}
"""Limits of the dispatcher for an instance that takes everything at once."""


def gpus_as_type(gpu: str, tensor_parallel: int) -> str:
    """Return the GPUs of one instance as one type, such as `4 x h100-80gb`, by which hours and dollars are counted."""
    return gpu if tensor_parallel == 1 else f"{tensor_parallel} x {gpu}"


def cluster_of(scenario: Scenario) -> Cluster:
    """Return the fleet, its policies and its classes. Raise ScenarioProblem."""
    keys = [(group.model, region) for group in scenario.fleet for region in group.regions]
    policies = {key: scenario.policy(*key) for key in keys}
    names, pooling, regions, of_all = scenario.names, scenario.pooling, list(scenario.regions), scenario.policies
    promises = [_promise(one) for one in scenario.classes.values()]
    classes = [_terms(*each) for each in zip(scenario.classes.items(), promises, strict=True)]
    instances = _instances(scenario, _engines(scenario, pooling))
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


def _instances(scenario: Scenario, engines: Sequence[EngineConfig]) -> list[InstanceSpec]:
    """Return the instances of all groups of the fleet, whose *engines* they have."""
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
                        gpus_as_type(group.gpu, count),
                        f"{group.model}-{region}-{named[key]}",
                        state,
                        usd_per_hour=gpu.usd_per_hour * count,
                        spot_usd_per_hour=gpu.spot_usd_per_hour * count,
                        start_s=group.start_s,
                        reclaim_s=group.reclaim_s,
                        pull_s=group.pull_s,
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
    return ClassTerms(
        name,
        one.priority,
        *(None if each_s == inf else each_s for each_s in (promise.ttft_s, promise.end_s)),
        one.deadline_s,
        one.kind == "interactive",
        one.kind == "opportunistic",
        one.on_reclaim == "end",
        one.if_unreachable,
        one.degrades_to or "",
    )
