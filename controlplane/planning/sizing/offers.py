"""What each model can run on: GPUs of an instance, its engine, and its throughput within the promise."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from controlplane.fleet.models import Deployment, GpuType, Model, PerformanceProfile, SloClass, SloKind
from controlplane.planning.plans.capability import BLOCK_TOKENS, engine_of
from controlplane.planning.sizing.demand import OfModel
from controlplane.planning.sizing.selectors import Types
from scheduling.fleet.profile_estimate import Sizes, estimate, facts_of
from scheduling.planning.capacity import Capability
from scheduling.planning.simulated_capability import simulated_capability, strictest
from scheduling.policy import COLUMNS
from scheduling.queueing.promises import Promise
from scheduling.simulation.engine.config import EngineConfig

DEGREES: Final = (1, 2, 4, 8)
"""Of tensor parallelism, within a node."""
TRIED: Final = 2
"""Degrees without a measured profile that are tried: the least that fits, and the next."""
SIZES, REQUESTS = (1, 4), 1500
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
            "prefix_caching": True,
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
    made = []
    for name, of_model in models.items():
        for gpu_name, (gpu_type, usd) in types.items():
            known = profiles.get((name, gpu_name), [])
            options = _options(rows[name], gpu_type, like.get(name), known)
            if not options:
                made.append(Offer(name, gpu_name, usd, why_not=_why_not(gpu_type)))
                continue
            valued = [_valued(name, gpu_name, usd, row, profile, of_model, classes) for row, profile in options]
            made.append(max(valued, key=lambda offer: offer.tokens_per_s / offer.tensor_parallel))
    return made


def _why_not(gpu_type: GpuType) -> str:
    return f"does not fit {DEGREES[-1]}" if facts_of(gpu_type.name) or gpu_type.pk else "unknown"


def _options(
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
    return options if measured else options[:TRIED]


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


def _valued(
    model: str,
    gpu_type: str,
    usd: float,
    row: Deployment,
    profile: PerformanceProfile,
    of_model: OfModel,
    classes: Mapping[str, SloClass],
) -> Offer:
    interactive = [classes[name] for name in of_model.classes if classes[name].kind == SloKind.INTERACTIVE]
    promise, percentile = strictest(
        (each.ttft_target_ms, each.itl_target_ms, each.e2e_target_ms, each.percentile) for each in interactive
    )
    prompt, output = (np.array(each[-PAIRS:], np.int64) for each in (of_model.prompt, of_model.output))
    cv = max(1.0, round(4 * of_model.cv) / 4)
    able = _measured(engine_of(row, profile), prompt.tobytes(), output.tobytes(), promise, percentile, cv)
    share = float(prompt.sum() / max(1, prompt.sum() + output.sum()))
    why_not = f"{able.out_of_reach:.0%} of requests miss their promise on an idle one" if able.out_of_reach else ""
    tokens_per_s = able.at(share)
    return Offer(
        model, gpu_type, usd, row, profile, able, tokens_per_s, why_not if tokens_per_s else "promise out of reach"
    )


@lru_cache(maxsize=512)
def _measured(
    engine: EngineConfig, prompt: bytes, output: bytes, promise: Promise, percentile: float, cv: float
) -> Capability:
    lengths = (np.frombuffer(each, np.int64) for each in (prompt, output))
    return simulated_capability(
        engine, *lengths, promise, percentile=percentile, cv=cv, sizes=SIZES, most_requests=REQUESTS
    )
