"""Swap groups as scenario tables: members, awake instances, and sleep and wake times."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Instance, Tier
from controlplane.fleet.swaps import times

Place = tuple[str, str, str]
"""(model, region, GPU type) names."""


@dataclass(slots=True)
class Shared:
    """Instances that share GPUs, each as its own fleet table."""

    members: dict[Place, list[dict[str, Any]]] = field(default_factory=dict)
    """Table keys per instance, in addition to its deployment's."""
    present: Counter[Place] = field(default_factory=Counter)
    """Instances that are awake or waking."""
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tables of `[swap_groups]`."""


def read() -> Shared:
    shared, known = Shared(), None
    rows = (
        Instance.objects.filter(swap_group__isnull=False, held="").exclude(state=InstanceState.FAILED).order_by("name")
    )
    of = ("model", "region", "gpu_type")
    for row in rows.select_related("swap_group", *(f"deployment__{each}" for each in of)):
        known = known or times.read()
        deployment, group = row.deployment, row.swap_group
        assert group is not None
        place = deployment.model.name, deployment.region.name, deployment.gpu_type.name
        awake = row.state in PRESENT
        shared.present[place] += awake
        counted = "instances" if awake else "empty" if row.tier == Tier.STOPPED else "asleep"
        shared.members.setdefault(place, []).append(
            {
                "instances": 0,
                counted: 1,
                "sharing": {
                    "group": group.name,
                    "sleep_s": known.sleep(deployment, Tier.CPU).seconds,
                    "wake_s": known.load(deployment, Tier.CPU).seconds,
                    "reload_s": known.load(deployment, Tier.STORAGE).seconds,
                    "weights_gb": deployment.model.weights_bytes / 1e9,
                },
            }
        )
        if group.cpu_memory_bytes is not None:
            shared.groups[group.name] = {"cpu_memory_gb": group.cpu_memory_bytes / 1e9}
    return shared
