"""The least instances that each endpoint keeps, by which alerts, the Fleet page and REST say that it is short.

Instances that take requests count, and those that are away by plan: in maintenance, or asleep while another of their swap
group is awake.
"""

from collections import Counter
from datetime import datetime
from typing import NamedTuple

from django.db.models import Q, Sum

from controlplane.fleet.lifecycle.states import AWAKE, InstanceState
from controlplane.fleet.maintenance import instances_of
from controlplane.fleet.models import Deployment, Instance, Maintenance

S = InstanceState
Place = tuple[str, str]
PLACE = ("deployment__model__name", "deployment__region__name")


class Minimum(NamedTuple):
    """The least instances of an endpoint and those that are ready by their rows; *held* names who holds one, and why."""

    instances: int
    where: str = ""
    ready: int = 0
    maintained: int = 0
    until: datetime | None = None
    asleep: int = 0
    held: str = ""

    @property
    def due(self) -> int:
        """Return how many have to take requests now."""
        return max(0, self.instances - self.maintained - self.asleep)

    @property
    def why(self) -> str:
        """Say what is away, each after a semicolon."""
        said = [f"; {self.maintained} in maintenance until {self.until:%d %b %H:%M} UTC"] if self.until else []
        said += [f"; {self.asleep} asleep in swap groups"] if self.asleep else []
        return "".join([*said, f"; held by {self.held}" if self.held else ""])

    def short(self, ready: int | None) -> str:
        """Say that fewer take requests than have to; empty where they are enough. *ready* is None where it is not known."""
        ready = self.ready if ready is None else ready
        return f"{ready} of {self.instances} instances of {self.where} are ready" if ready < self.due else ""


def minimums() -> dict[Place, Minimum]:
    """Return the minimum of each endpoint with an active deployment, by (model, region)."""
    maintained, ready, asleep = Counter[Place](), Counter[Place](), Counter[Place]()
    by, until = dict[Place, str](), dict[Place, datetime]()
    for window in Maintenance.objects.under_way():
        gone = instances_of(window).filter(Q(restart=str(window)) | Q(swap_group__isnull=False), held="")
        counts: Counter[Place] = Counter(gone.exclude(state=S.READY).values_list(*PLACE))
        maintained += counts
        until |= {key: max(window.until, until.get(key, window.until)) for key in counts}
    rows = list(Instance.objects.order_by("name").values_list(*PLACE, "state", "held", "swap_group"))
    awake = {group for *_, state, _, group in rows if state in AWAKE} - {None}
    for model, region, state, held, group in rows:
        ready[model, region] += state == S.READY
        asleep[model, region] += group in awake and not held and state in (S.SLEEPING, S.STOPPED)
        if held and state == S.STOPPED:
            by[model, region] = held
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True).order_by()
    sums = active.values_list("model__name", "region__name", "region__title").annotate(Sum("min_instances"))
    return {
        (key := (model, region)): Minimum(
            least, f"{model} in {title}", ready[key], maintained[key], until.get(key), asleep[key], by.get(key, "")
        )
        for model, region, title, least in sums
    }
