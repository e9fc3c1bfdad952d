"""The fleet of a capacity plan as a fleet file, and as a future of a what-if."""

from collections import Counter
from typing import Any, Final

from controlplane.fleet.models import Deployment, GpuType, Node
from controlplane.planning.models import CapacityPlan
from controlplane.planning.sizing.question import Question
from controlplane.planning.sizing.selectors import gpu_types
from scheduling.simulation.scenario.toml_text import to_toml

NODE_GPUS: Final = 8
"""Of a node that is bought."""


def fleet_file(row: CapacityPlan) -> str:
    """Return the fleet of *row* as a fleet file: new GPU types and nodes, and deployments of as many instances as it has.

    Deployments of its models that it does not need have none.
    """
    answer, types = row.answer, gpu_types(Question.model_validate(row.question).gpus)
    kept = {name: GpuType.objects.filter(name=name).exists() for name in types}
    numbers, nodes = Counter[str](Node.objects.values_list("region__name", flat=True)), []
    for each in answer["gpus"]:
        for left in range(each["buy"], 0, -NODE_GPUS):
            region = each["region"]
            numbers[region] += 1
            name = f"{region}-{each['gpu_type'].partition('-')[0]}-plan-{row.pk}-{numbers[region]}"
            nodes.append(
                {"name": name, "region": region, "gpu_type": each["gpu_type"], "gpu_count": min(left, NODE_GPUS)}
            )
    planned = {(each["model"], each["region"], each["gpu_type"]): each for each in answer["fleet"]}
    deployments = [
        dict(zip(("model", "region", "gpu_type"), place, strict=True))
        | {"tensor_parallel": each["tensor_parallel"]}
        | dict.fromkeys(("min_instances", "max_instances"), each["instances"])
        for place, each in planned.items()
    ]  # fmt: skip
    there = Deployment.objects.filter(active=True, model__name__in={place[0] for place in planned})
    for place in there.values_list("model__name", "region__name", "gpu_type__name"):
        if place not in planned:
            nothing = {"min_instances": 0, "max_instances": 0}
            deployments.append(dict(zip(("model", "region", "gpu_type"), place, strict=True)) | nothing)
    tables: dict[str, Any] = {
        "gpu_types": [
            {"name": name, "title": of.title, "memory_bytes": of.memory_bytes, "on_demand_usd_per_hour": usd}
            for name, (of, usd) in types.items()
            if not kept[name] and any(each["gpu_type"] == name for each in answer["gpus"])
        ],
        "nodes": nodes,
        "deployments": deployments,
    }
    check = answer.get("check", {})
    found = "keeps every promise" if check.get("holds") else "misses a promise" if check else "is not simulated yet"
    usd = answer["usd_per_month"]["on_demand"]
    about = f"# Capacity plan {row.pk}: ${usd:,.0f} a month on demand; in simulation it {found}.\n"
    return about + to_toml({name: of for name, of in tables.items() if of})
