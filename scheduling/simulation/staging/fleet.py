"""The fleet of a scenario and its policies, as a cluster."""

from collections import Counter
from dataclasses import fields
from typing import Any, Final

from scheduling.applications.warm_pool import WarmTerms
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.pooling_profile import profile_of_prefills
from scheduling.fleet.profile import Profile
from scheduling.routing.models import Fallback
from scheduling.routing.regions import latency_ms
from scheduling.simulation.cluster.description import (
    Cluster,
    Delays,
    EndpointKey,
    InstanceSpec,
    Sharing,
)
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Price
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import Group
from scheduling.simulation.staging.problem import ScenarioProblem
from scheduling.simulation.staging.requests import terms_of

NO_LIMITS: Final[dict[str, Any]] = {"dispatch_max_num_seqs": 100_000, "dispatch_kv_tokens": 1 << 40}
"""Limits of the dispatcher for an instance that takes everything at once."""


def instance_gpu(group: Group) -> str:
    """Return the GPUs of one instance as one type, such as `4 x h100-80gb`, by which hours and dollars are counted."""
    return gpus_as_type(group.gpu, group.tensor_parallel)


def gpus_as_type(gpu: str, tensor_parallel: int) -> str:
    """Return *tensor_parallel* GPUs as one type."""
    return gpu if tensor_parallel == 1 else f"{tensor_parallel} x {gpu}"


def prices_of(scenario: Scenario) -> dict[str, Price]:
    """Return prices by the GPUs of one instance."""
    prices = {}
    for group in scenario.fleet:
        gpu = scenario.gpus[group.gpu]
        count = group.tensor_parallel
        prices[instance_gpu(group)] = Price(gpu.usd_per_hour * count, gpu.spot_usd_per_hour * count)
    return prices


def cluster_of(scenario: Scenario) -> Cluster:
    """Return the fleet and its policies. Raise ScenarioProblem."""
    regions = list(scenario.regions)
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
    instances: list[InstanceSpec] = []
    # Ready instances have the first numbers of a model in a region, before the empty places of earlier groups.
    ready: Counter[EndpointKey] = Counter()
    rest: Counter[EndpointKey] = Counter()
    for group in scenario.fleet:
        rest.update({(group.model, region): group.instances for region in group.regions})
    for group in scenario.fleet:
        engine = EngineConfig(
            max_num_seqs=group.max_num_seqs,
            max_num_batched_tokens=group.max_num_batched_tokens,
            block_size_tokens=group.block_size_tokens,
            kv_blocks=group.kv_tokens // group.block_size_tokens,
            policy=group.queue,
            # The token that ends a prompt without output is no part of its length.
            max_model_len=scenario.models[group.model].context_tokens + (group.model in scenario.pooling),
            profile=profiles[group.model, group.gpu, group.tensor_parallel],
            prefix_caching=group.prefix_caching,
            max_loras=group.max_loras,
            max_cpu_loras=group.max_cpu_loras,
            adapter_storage_s=group.adapter_storage_s,
            adapter_memory_s=group.adapter_memory_s,
            front_end=front_ends[group.model, group.gpu, group.tensor_parallel],
        )
        states = [State.READY] * group.instances + [State.ASLEEP] * group.asleep
        states += [State.SPOT] * group.spot + [State.EMPTY] * group.empty
        for region in group.regions:
            key, others = (group.model, region), len(states) - group.instances
            names = [
                *range(ready[key] + 1, ready[key] + group.instances + 1),
                *range(rest[key] + 1, rest[key] + others + 1),
            ]
            ready[key] += group.instances
            rest[key] += others
            instances += [
                InstanceSpec(
                    group.model,
                    region,
                    engine,
                    instance_gpu(group),
                    f"{group.model}-{region}-{name}",
                    state,
                    usd_per_hour=scenario.gpus[group.gpu].usd_per_hour * group.tensor_parallel,
                    start_s=group.start_s,
                    reclaim_s=group.reclaim_s,
                    pull_s=group.pull_s,
                    sharing=_sharing(group, region, number),
                    **(NO_LIMITS if group.takes_all else {}),
                )
                for number, (name, state) in enumerate(zip(names, states, strict=True), 1)
            ]
    unknown = set(scenario.delays) - {each.name for each in fields(Delays)}
    if unknown:
        known = ", ".join(each.name for each in fields(Delays))
        raise ScenarioProblem(("delays", min(unknown)), f"is no delay; there is {known}")
    try:
        delays = Delays(**scenario.delays)  # type: ignore[arg-type]  # counts among them are checked by use
    except ValueError as error:
        raise ScenarioProblem(("delays",), str(error)) from error
    try:
        return Cluster(
            instances,
            models=list(scenario.models),
            fallbacks={
                name: Fallback(model.fallback, model.fallback_wait_s)
                for name, model in scenario.models.items()
                if model.fallback
            },
            pooling=scenario.pooling,
            regions=regions,
            latency_s=_latency_s(scenario, regions),
            policies={key: scenario.policy(*key) for key in ready},
            sweeps=scenario.policies.sweeps,
            reordering=scenario.policies.reordering,
            prewarming=scenario.policies.prewarming,
            prewarm_k=scenario.policies.prewarm_k,
            prewarm_share=scenario.policies.prewarm_share,
            backends={kind: WarmTerms(**one.model_dump()) for kind, one in scenario.backends.items()},
            delays=delays,
            share_spot=scenario.policies.share_spot,
            swap_memory_bytes=_swap_memory(scenario, instances),
            classes=terms_of(scenario),
            max_hold_s=scenario.policies.max_hold_s,
        )
    except ValueError as error:
        raise ScenarioProblem((), str(error)) from error


def _sharing(group: Group, region: str, number: int) -> Sharing | None:
    """Return the GPU sharing of instance *number* of *group* in *region*; None without any."""
    if (given := group.sharing) is None:
        return None
    name = f"{given.group}-{region}-{number}"
    return Sharing(name, given.sleep_s, given.wake_s, given.reload_s, given.weights_gb * 1e9)


def _swap_memory(scenario: Scenario, instances: list[InstanceSpec]) -> dict[str, float]:
    """Return CPU memory in bytes by swap group, where it is limited."""
    names = {spec.sharing.group for spec in instances if spec.sharing is not None}
    given = {
        f"{group}-{region}": table.cpu_memory_gb * 1e9
        for group, table in scenario.swap_groups.items()
        for region in scenario.regions
    }
    return {name: given[place] for name in names if (place := name.rsplit("-", 1)[0]) in given}


def _latency_s(scenario: Scenario, regions: list[str]) -> list[list[float]]:
    rows = scenario.latency_ms.items()
    given = {(origin, target): each_ms for origin, targets in rows for target, each_ms in targets.items()}
    return [[latency_ms(given, origin, to, unknown_ms=0.0) / 1000 for to in regions] for origin in regions]
