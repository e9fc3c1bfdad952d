"""How long instances take from being asked for until they serve: as it was seen, for plans, simulations and estimates of
waiting alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance
from controlplane.tuning.selectors import tuned

Key = tuple[str, str]
"""(model, GPU type), by name."""
MOVES = 5_000
"""Newest moves of instances in which starts are looked for."""
STARTS = 50
"""Newest starts of a model on a GPU type that count: a new image or a nearer disk must not be outvoted for weeks."""
LONGEST_S = 7200.0
"""Longer starts (SageServe 7.1: two hours, with remote weights) spanned a stop of the stack and are left out."""


@dataclass(frozen=True, slots=True)
class MedianTime:
    """The median of *measured* times, or the usual time where none was measured."""

    seconds: float
    measured: int = 0
    p95_s: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, took_s: Sequence[float]) -> "MedianTime":
        return cls(float(np.median(took_s)), len(took_s), float(np.percentile(took_s, 95)))


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Start times by (model, GPU type); the usual one where none was measured."""

    seen: Mapping[Key, MedianTime]
    begun: Mapping[str, datetime] = field(default_factory=dict)
    """Return the times at which starting instances were requested, by key."""

    def of(self, model: str, gpu_type: str) -> MedianTime:
        usual_s = tuned(model).USUAL_START_S
        return self.seen.get((model, gpu_type)) or MedianTime(usual_s, p95_s=usual_s)


def read() -> StartTimes:
    """Read start times from the events of the last moves, without failed starts."""
    instances = Instance.objects.order_by().values_list("pk", "deployment__model__name", "deployment__gpu_type__name")
    keys = {str(pk): (model, gpu_type) for pk, model, gpu_type in instances}
    moves = Event.objects.filter(kind="instance.moved").order_by("-pk").values_list("subject_id", "at", "after")
    asked: dict[str, datetime] = {}
    took_s: dict[Key, list[float]] = {}
    for subject, at, after in reversed(moves[:MOVES]):
        match after.get("state"):
            case InstanceState.PROVISIONING:
                asked[subject] = at
            case InstanceState.READY if subject in asked and subject in keys:
                took_s.setdefault(keys[subject], []).append((at - asked.pop(subject)).total_seconds())
            case InstanceState.FAILED | InstanceState.STOPPED:
                asked.pop(subject, None)
    counted = {key: [each for each in took if each <= LONGEST_S][-STARTS:] for key, took in took_s.items()}
    seen = {key: MedianTime.of(took) for key, took in counted.items() if took}
    return StartTimes(seen, asked)
