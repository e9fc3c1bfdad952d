"""Times that instances take to fall asleep and wake: medians of what swaps measured, else the usual times.

Measured times are those of the last swaps of a model on a GPU type, by the tier that its weights went to or came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.fleet.lifecycle.start_times import MedianTime
from controlplane.fleet.models import Deployment, Swap, Tier
from controlplane.tuning.selectors import tuned

PCIE_BYTES_PER_S = 25e9
"""Of one GPU: what PCIe 4.0 x16 moves in practice, of 32 GB/s."""
STORAGE_BYTES_PER_S = 2e9
"""Sequential read rate of one local NVMe disk."""
DISCARD_S = 1.0
"""Weights that are discarded are moved nowhere."""
SWAPS = 500
"""Newest swaps in which times are looked for."""
COUNTED = 50
"""Newest ones of a model on a GPU type that count: a nearer disk must not be outvoted for weeks."""

Key = tuple[str, str, str]
"""(model, GPU type, tier), by name."""


@dataclass(frozen=True, slots=True)
class SwapTimes:
    slept: Mapping[Key, MedianTime]
    loaded: Mapping[Key, MedianTime]

    def sleep(self, deployment: Deployment, tier: str) -> MedianTime:
        """Return the time of a drained instance of *deployment* to move its weights to *tier*."""
        key = deployment.model.name, deployment.gpu_type.name, tier
        return self.slept.get(key) or MedianTime(usual_sleep_s(deployment, tier))

    def load(self, deployment: Deployment, tier: str) -> MedianTime:
        """Return the time from *tier* until it answers."""
        key = deployment.model.name, deployment.gpu_type.name, tier
        return self.loaded.get(key) or MedianTime(usual_load_s(deployment, tier))


def usual_sleep_s(deployment: Deployment, tier: str) -> float:
    """Return the time to move its weights over PCIe, all GPUs at once; short if they are discarded."""
    return _over_pcie_s(deployment) if tier == Tier.CPU else DISCARD_S


def usual_load_s(deployment: Deployment, tier: str) -> float:
    """Return the time to load its weights over PCIe or from disk, or of a start."""
    match tier:
        case Tier.GPU:
            return 0.0
        case Tier.CPU:
            return _over_pcie_s(deployment)
        case Tier.STORAGE:
            return deployment.model.weights_bytes / STORAGE_BYTES_PER_S
        case _:
            return float(tuned(deployment.model.name).USUAL_START_S)


def _over_pcie_s(deployment: Deployment) -> float:
    return deployment.model.weights_bytes / (PCIE_BYTES_PER_S * deployment.tensor_parallel)


def read() -> SwapTimes:
    """Read times from the newest swaps, without failed ones."""
    rows = Swap.objects.exclude(ended_at=None).select_related(
        *(f"{end}__deployment__{of}" for end in ("instance", "gave_way") for of in ("model", "gpu_type"))
    )
    slept: dict[Key, list[float]] = {}
    loaded: dict[Key, list[float]] = {}
    for row in rows[:SWAPS]:
        ends = (slept, row.gave_way, row.sleep_tier, row.sleep_s), (loaded, row.instance, row.tier, row.load_s)
        for times, instance, tier, took_s in ends:
            if instance is not None and took_s is not None:
                of = instance.deployment
                times.setdefault((of.model.name, of.gpu_type.name, tier), []).append(took_s)
    return SwapTimes(_medians(slept), _medians(loaded))


def _medians(took_s: Mapping[Key, list[float]]) -> dict[Key, MedianTime]:
    return {key: MedianTime.of(times[:COUNTED]) for key, times in took_s.items()}
