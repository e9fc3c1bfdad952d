"""Reads of swap groups: members, the awake instance, times of a swap, and where weights go."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import QuerySet

from controlplane.fleet.lifecycle.start_times import MedianTime
from controlplane.fleet.lifecycle.states import AWAKE, InstanceState
from controlplane.fleet.models import Instance, Swap, SwapGroup, SwapState, Tier
from controlplane.fleet.swaps.times import SwapTimes, read
from scheduling.compiled import uncompiled
from scheduling.fleet import sleep_level

COUNTED = 200
"""Newest swaps of a group by which its members are ranked; the last of them weighs 2% of the first."""
LAST = 5
"""Swaps of a group that are shown."""
NOTHING = MedianTime(0.0)


def open_swaps() -> QuerySet[Swap]:
    """Return swaps in progress, oldest first."""
    rows = Swap.objects.filter(state=SwapState.IN_PROGRESS).order_by("pk")
    return rows.select_related("group", "instance", "gave_way")


@dataclass(frozen=True, slots=True)
class Member:
    """Member of a swap group, and the time of a swap to it."""

    instance: Instance
    tier: Tier
    sleep: MedianTime
    """Of the member that is awake, once it is drained."""
    load: MedianTime
    """Of this one, from its tier."""
    leave: MedianTime
    """Of this one when it sleeps next."""
    back: MedianTime
    """Of this one when it comes up next: from its tier, or from the one to which it sleeps."""

    @property
    def is_awake(self) -> bool:
        return self.instance.state in AWAKE

    @property
    def seconds(self) -> float:
        """Seconds of a swap to it, after the drain."""
        return self.sleep.seconds + self.load.seconds

    @property
    def is_measured(self) -> bool:
        return self.load.measured > 0 and (self.sleep is NOTHING or self.sleep.measured > 0)


@dataclass(frozen=True, slots=True)
class GroupStatus:
    group: SwapGroup
    members: list[Member]
    swaps: list[Swap]
    """The newest first."""

    @property
    def awake(self) -> Instance | None:
        return next((one.instance for one in self.members if one.is_awake), None)

    @property
    def running(self) -> Swap | None:
        """The swap in progress."""
        return next((swap for swap in self.swaps if swap.state == SwapState.IN_PROGRESS), None)


def statuses(model: str = "", region: str = "", name: str = "") -> list[GroupStatus]:
    """Return the status of groups with an instance of *model* in *region*; "" for any."""
    groups = SwapGroup.objects.filter(instances__isnull=False)
    for field, value in (("model__name", model), ("region__name", region)):
        if value:
            groups = groups.filter(**{f"instances__deployment__{field}": value})
    if name:
        groups = groups.filter(name=name)
    groups = groups.distinct().order_by("name")
    if not groups:
        return []
    times = read()
    rows = Instance.objects.select_related(
        "deployment__model", "deployment__region", "deployment__gpu_type", "node", "swap_group"
    )
    members: dict[int, list[Instance]] = {}
    for row in rows.filter(swap_group__in=groups.values("pk")).order_by("name"):
        members.setdefault(row.swap_group_id or 0, []).append(row)
    return [
        GroupStatus(
            group,
            _members(group, members.get(group.pk, []), times),
            list(group.swaps.select_related("instance", "gave_way")[:LAST]),
        )
        for group in groups
    ]


def sleeps_to(group: SwapGroup, rows: Sequence[Instance]) -> dict[int, Tier]:
    """Return the tier to which each of *rows*, the members of *group*, would sleep now."""
    members = [
        sleep_level.Member(
            float(row.deployment.model.weights_bytes),
            in_memory=row.state == InstanceState.SLEEPING and row.tier == Tier.CPU,
        )
        for row in rows
    ]
    numbers = {row.pk: at for at, row in enumerate(rows)}
    for made in reversed(group.swaps.exclude(ended_at=None).values_list("instance", flat=True)[:COUNTED]):
        if made in numbers:
            uncompiled(sleep_level.count_swap)(members, numbers[made])
    memory_bytes, level_of = (
        group.cpu_memory_bytes,
        uncompiled(sleep_level.sleep_level),
    )  # a page must not wait for Numba
    levels = (level_of(members, at, math.inf if memory_bytes is None else memory_bytes) for at in range(len(rows)))
    return {
        row.pk: Tier.CPU if level == sleep_level.IN_MEMORY else Tier.STORAGE
        for row, level in zip(rows, levels, strict=True)
    }


def _members(group: SwapGroup, rows: list[Instance], times: SwapTimes) -> list[Member]:
    awake, sleeps = next((row for row in rows if row.state in AWAKE), None), sleeps_to(group, rows)
    sleep = NOTHING if awake is None else times.sleep(awake.deployment, sleeps[awake.pk])
    return [
        Member(
            row,
            row.tier,
            sleep,
            times.load(row.deployment, row.tier),
            times.sleep(row.deployment, sleeps[row.pk]),
            times.load(row.deployment, sleeps[row.pk] if row.state in AWAKE else row.tier),
        )
        for row in rows
    ]
