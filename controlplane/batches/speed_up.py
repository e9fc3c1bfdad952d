"""The price of speeding a batch up: what its lines would take of the fleet, and what interactive requests would feel.

An operator brings the deadline of a batch forward for the queue manager, which then releases its lines above the marks of
use, as fast as that deadline needs. This is what that does to the engines, by their performance profile.
"""

import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.utils import timezone
from msgspec import Struct

from controlplane.batches.models import Batch, BatchStatus
from controlplane.fleet.models import Instance, PerformanceProfile
from controlplane.tuning.selectors import tuned
from scheduling.fleet.profile import Profile
from scheduling.queueing.held_work import service_s
from scheduling.queueing.release_rule import SLACK

SHARES = (0.5, 0.25)
"""Of the time that a batch still takes: what it can be sped up to."""
RELEASE = "NIW_RELEASE"
SHORTEST_S = 60.0
STEPS_FELT = 2
"""Engine steps that a first token takes at most while its prompt is one chunk: the one that runs, and its own."""


class InstanceLoad(Struct, frozen=True):
    """An instance that serves the model of a batch, as it was read last."""

    instance_id: int
    running: int
    sequences: int
    """That it runs at once."""
    kv_ratio: float


class Choice(Struct, frozen=True):
    """A deadline that a batch can be given, and its price."""

    within_s: float
    done_by: datetime
    more_at_once: float
    """Lines that run at once, more than now."""
    use_ratio: float
    """Of sequences or KV memory, whichever is fuller, by all requests of the model."""
    then_ratio: float
    step_ms: float
    """Mean time of an engine step with what runs now."""
    then_step_ms: float

    @property
    def full(self) -> bool:
        """Whether more is asked for than there is room: interactive requests would wait for a free place."""
        return self.then_ratio > 1.0

    @property
    def later_ms(self) -> float:
        """How much later the first token of an interactive request is at most, while there is room."""
        return STEPS_FELT * (self.then_step_ms - self.step_ms)


def refusal(batch: Batch) -> str:
    """Return why *batch* cannot be sped up; empty where it can."""
    if batch.status != BatchStatus.IN_PROGRESS:
        return f"{batch} is {batch.get_status_display().lower()}: only a running batch is sped up."
    if batch.model and (rule := getattr(tuned(batch.model), RELEASE)) != SLACK:
        return f"{batch.model} releases held work by the rule {rule!r}, which no deadline changes (NIW_RELEASE)."
    return ""


def choices(batch: Batch, loads: Iterable[InstanceLoad]) -> list[Choice]:
    """Return deadlines for *batch* with their prices; none while its pace, its tokens or the load are not known."""
    loads = [load for load in loads if load.sequences]
    profiles = _profiles(batch.model, [load.instance_id for load in loads])
    loads = [load for load in loads if load.instance_id in profiles]
    if batch.pace is None or not batch.completed or not loads or not batch.lines_per_s:
        return []
    prompt, output = batch.input_tokens // batch.completed, max(1, batch.output_tokens // batch.completed)
    shortest_s = min(service_s(profile, prompt, output) for profile, _ in profiles.values())
    places = sum(load.sequences for load in loads)
    memory = sum(profiles[load.instance_id][1] for load in loads)
    running = sum(load.running for load in loads)
    tokens = sum(load.kv_ratio * profiles[load.instance_id][1] for load in loads)
    now, made = timezone.now(), []
    for share in SHARES:
        within_s = max(SHORTEST_S, 2.0 * shortest_s, share * batch.pace.left_s)
        if within_s >= batch.pace.left_s:
            continue
        more = (batch.lines_left / within_s - batch.lines_per_s) * shortest_s
        more_tokens = more * (prompt + output / 2)
        steps = [
            _steps_s(
                profiles[load.instance_id][0], load, tokens / len(loads), more / len(loads), more_tokens / len(loads)
            )
            for load in loads
        ]
        made.append(
            Choice(
                within_s,
                now + timedelta(seconds=within_s),
                more,
                max(running / places, tokens / memory),
                max((running + more) / places, (tokens + more_tokens) / memory),
                *(1000 * sum(each) / len(steps) for each in zip(*steps, strict=True)),
            )
        )
    return made


def _profiles(model: str, instances: list[int]) -> dict[int, tuple[Profile, float]]:
    """Return the profile and the KV tokens of each of *instances* of *model* for which both are known."""
    of = {
        (row.gpu_type_id, row.tensor_parallel): row.coefficients()
        for row in PerformanceProfile.objects.filter(model__name=model)
    }
    rows = Instance.objects.filter(pk__in=instances, kv_capacity_tokens__gt=0)
    known = rows.values_list("pk", "deployment__gpu_type", "deployment__tensor_parallel", "kv_capacity_tokens")
    return {pk: (of[gpus, degree], float(tokens)) for pk, gpus, degree, tokens in known if (gpus, degree) in of}


def _steps_s(
    profile: Profile, load: InstanceLoad, tokens: float, more: float, more_tokens: float
) -> tuple[float, float]:
    """Return the time of an engine step with what runs now, and with *more* lines of *more_tokens*."""
    now = profile.step_time_s(0, max(1, load.running), math.ceil(tokens))
    return now, profile.step_time_s(0, math.ceil(max(1, load.running) + more), math.ceil(tokens + more_tokens))
