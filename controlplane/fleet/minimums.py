"""The least instances that each endpoint keeps: what is short of it, to alerts, the Fleet page and REST alike.

Instances that take requests count, and those that are away by plan: in maintenance, or asleep while another of their swap
group is awake.
"""

from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Q, Sum

from controlplane.fleet.lifecycle.states import AWAKE, InstanceState
from controlplane.fleet.maintenance import instances_of
from controlplane.fleet.models import Deployment, Instance, Maintenance

S = InstanceState
PLACE = ("deployment__model__name", "deployment__region__name")


class Minimum(NamedTuple):
    """The least instances of an endpoint, how many of them are away by plan, and who holds one (empty: nobody)."""

    instances: int
    where: str = ""
    ready: int = 0
    """By their rows, where nothing is known live."""
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
        """Say what is away, from a semicolon on; empty for nothing."""
        said = [f"{self.maintained} in maintenance until {self.until:%d %b %H:%M} UTC"] if self.until else []
        said += [f"{self.asleep} asleep in swap groups"] if self.asleep else []
        return "".join(f"; {each}" for each in [*said, *([f"held by {self.held}"] if self.held else [])])

    def short(self, ready: int | None) -> str:
        """Say that *ready* instances (None: not known) are fewer than have to take requests; empty where they are not."""
        ready = self.ready if ready is None else ready
        return f"{ready} of {self.instances} instances of {self.where} are ready" if ready < self.due else ""


def minimums() -> dict[tuple[str, str], Minimum]:
    """Return the minimum of each endpoint with an active deployment, by (model, region)."""
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True).order_by()
    sums = active.values_list("model__name", "region__name", "region__title").annotate(Sum("min_instances"))
    made = {(model, region): Minimum(least, f"{model} in {title}") for model, region, title, least in sums}

    def add(key: tuple[str, str], **changes: int | str | datetime | None) -> None:
        if key in made:
            made[key] = made[key]._replace(**changes)

    for *key, count in Instance.objects.filter(state=S.READY).order_by().values_list(*PLACE).annotate(Count("pk")):
        add((key[0], key[1]), ready=count)
    for window in Maintenance.objects.under_way():
        gone = instances_of(window).filter(Q(restart=str(window)) | Q(swap_group__isnull=False), held="")
        for key in gone.exclude(state=S.READY).values_list(*PLACE):
            now = made.get(key, Minimum(0))
            add(key, maintained=now.maintained + 1, until=max(now.until or window.until, window.until))
    awake = Instance.objects.filter(state__in=AWAKE, swap_group__isnull=False).values("swap_group")
    for key in Instance.objects.filter(swap_group__in=awake, held="", state__in=(S.SLEEPING, S.STOPPED)).values_list(
        *PLACE
    ):
        add(key, asleep=made.get(key, Minimum(0)).asleep + 1)
    held = Instance.objects.exclude(held="").filter(state=S.STOPPED).order_by("name")
    for *key, by in held.values_list(*PLACE, "held"):
        add((key[0], key[1]), held=by)
    return made
