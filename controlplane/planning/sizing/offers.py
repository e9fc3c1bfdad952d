"""What each model can run on: GPUs of an instance, its engine, and its throughput within the promise."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from controlplane.fleet.models import Deployment, GpuType, Model, PerformanceProfile, SloClass, SloKind
from controlplane.fleet.selectors import without_prefix_cache
from controlplane.planning.plans.capability import BLOCK_TOKENS, engine_of
from controlplane.planning.sizing.demand import OfModel
from controlplane.planning.sizing.selectors import Types
from scheduling.fleet.profile_estimate import Sizes, estimate, facts_of
from scheduling.planning.capacity import Capability
from scheduling.planning.simulated_capability import rough_requests_per_s, simulated_capability, strictest
from scheduling.policy import COLUMNS
from scheduling.queueing.promises import Promise
from scheduling.simulation.engine.config import EngineConfig

DEGREES: Final = (1, 2, 4, 8)
"""Of tensor parallelism, within a node."""
SIZES, REQUESTS = (1, 4), 1000
"""Of the simulations that measure an instance: fleets, and requests of a window."""
PAIRS: Final = 1000
LIKE: Final = (
    *COLUMNS,
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "max_loras",
    "max_cpu_loras",
)
"""Columns that an instance has as those of the model's newest deployment."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One model on one GPU type: as an instance would run there, or why it cannot."""

    model: str
    gpu_type: str
    usd_per_hour: float
    """Of one GPU."""
    row: Deployment | None = None
    """Unsaved."""
    profile: PerformanceProfile | None = None
    capability: Capability | None = None
    tokens_per_s: float = 0.0
    why_not: str = ""
    prefix_caching: bool = True

    @property
    def tensor_parallel(self) -> int:
        return self.row.tensor_parallel if self.row else 1

    @property
    def usd_per_million_tokens(self) -> float | None:
        return self.usd_per_hour * self.tensor_parallel / 3.6e-3 / self.tokens_per_s if self.tokens_per_s else None

    def group(self, region: str, instances: int) -> dict[str, Any]:
        """Return a group of a scenario's fleet."""
        row = self.row
        assert row is not None
        return {
            "model": self.model,
            "regions": [region],
            "gpu": self.gpu_type,
            "tensor_parallel": row.tensor_parallel,
            "instances": instances,
            "kv_tokens": max(BLOCK_TOKENS, row.expected_kv_tokens),
            "max_num_seqs": row.max_num_seqs,
            "max_num_batched_tokens": max(row.max_num_batched_tokens, row.max_num_seqs),
            "max_loras": row.max_loras,
            "max_cpu_loras": row.max_cpu_loras,
            "block_size_tokens": BLOCK_TOKENS,
            "prefix_caching": self.prefix_caching,
            "queue": row.scheduling_policy,
        }


def offers(models: Mapping[str, OfModel], types: Types, classes: Mapping[str, SloClass]) -> list[Offer]:
    """Return an offer for each of *models* on each of *types*, in order."""
    rows = {row.name: row for row in Model.objects.filter(name__in=models)}
    profiles: dict[tuple[str, str], list[PerformanceProfile]] = {}
    for profile in PerformanceProfile.objects.filter(model__name__in=models).select_related("model", "gpu_type"):
        profiles.setdefault((profile.model.name, profile.gpu_type.name), []).append(profile)
    deployed = Deployment.objects.filter(active=True, model__name__in=models).select_related("model")
    like = {row.model.name: row for row in deployed.order_by("-pk")}
    made, uncached = [], without_prefix_cache()
    for name, of_model in models.items():
        for gpu_name, (gpu_type, usd) in types.items():
            options = options_of(rows[name], gpu_type, like.get(name), profiles.get((name, gpu_name), []))
            one = offer(rows[name], gpu_type, usd, options, of_model, classes)
            made.append(replace(one, prefix_caching=name not in like or like[name].pk not in uncached))
    return made


def options_of(
    model: Model, gpu_type: GpuType, like: Deployment | None, known: Iterable[PerformanceProfile]
) -> list[tuple[Deployment, PerformanceProfile]]:
    """Return the instances that fit, with their profiles: measured, else estimated."""
    measured = {profile.tensor_parallel: profile for profile in known}
    own = {name: getattr(like, name) for name in LIKE if like}
    options = []
    for degree in sorted(measured) or DEGREES:
        row = Deployment(model=model, gpu_type=gpu_type, tensor_parallel=degree, **own)
        if row.expected_kv_tokens < model.context_tokens:
            continue
        profile = measured.get(degree) or _estimated(row)
        if profile is not None:
            options.append((row, profile))
    return options


def _estimated(row: Deployment) -> PerformanceProfile | None:
    facts = facts_of(row.gpu_type.name)
    if facts is None:
        return None
    sizes = Sizes(row.model.weights_bytes, row.model.kv_bytes_per_token)
    made = estimate(sizes, facts, row.tensor_parallel, row.max_num_seqs)
    values = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return PerformanceProfile(
        model=row.model, gpu_type=row.gpu_type, tensor_parallel=row.tensor_parallel, estimated=True,
        source="estimated from the data sheet", **values,
    )  # fmt: skip


def offer(
    model: Model,
    gpu_type: GpuType,
    usd: float,
    options: Sequence[tuple[Deployment, PerformanceProfile]],
    of_model: OfModel,
    classes: Mapping[str, SloClass],
) -> Offer:
    """Return the best of *options*, as far as a rough estimate says, with its throughput by simulation."""
    if not options:
        return Offer(model.name, gpu_type.name, usd, why_not=f"does not fit {DEGREES[-1]}")
    interactive = [classes[name] for name in of_model.classes if classes[name].kind == SloKind.INTERACTIVE]
    promise, percentile = strictest(
        (each.ttft_target_ms, each.itl_target_ms, each.e2e_target_ms, each.percentile) for each in interactive
    )
    # Evenly over all of them: they lie one region after the other.
    picked = np.linspace(0, len(of_model.prompt) - 1, min(PAIRS, len(of_model.prompt))).astype(np.int64)
    prompt, output = (np.array(each, np.int64)[picked] for each in (of_model.prompt, of_model.output))
    lengths = float(prompt.mean()), float(output.mean())

    def rough(option: tuple[Deployment, PerformanceProfile]) -> tuple[bool, float]:
        engine = engine_of(*option)
        alone_s = engine.profile.step_time_s(0, 1, int(sum(lengths)))
        return alone_s <= promise.itl_s, rough_requests_per_s(engine, *lengths) / option[0].tensor_parallel

    row, profile = max(options, key=rough)
    columns = prompt, output, np.array(of_model.interactive, np.bool_)[picked]
    able = _measured(engine_of(row, profile), *(each.tobytes() for each in columns), promise, percentile)
    tokens_per_s = able.at(float(prompt.sum() / max(1, prompt.sum() + output.sum())))
    why_not = f"{able.out_of_reach:.0%} of requests miss their promise on an idle one" if able.out_of_reach else ""
    return Offer(
        model.name, gpu_type.name, usd, row, profile, able, tokens_per_s, why_not if tokens_per_s else "out of reach"
    )


@lru_cache(maxsize=512)
def _measured(
    engine: EngineConfig, prompt: bytes, output: bytes, interactive: bytes, promise: Promise, percentile: float
) -> Capability:
    lengths = np.frombuffer(prompt, np.int64), np.frombuffer(output, np.int64)
    judged = np.frombuffer(interactive, np.bool_)
    return simulated_capability(
        engine, *lengths, promise, interactive=judged, percentile=percentile, sizes=SIZES, most_requests=REQUESTS
    )
