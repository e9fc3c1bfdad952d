"""When each instance cost something, by its row and the events of its moves."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance
from controlplane.fleet.models.instances import gpus_of
from controlplane.usage.models import InstanceHour

ENDED_AT = "ended_at"
"""Input of a move to *stopped* that was noticed late: when the server had ended."""


@dataclass(frozen=True, slots=True)
class PaidInstance:
    """An instance with its GPUs, and the periods (epoch seconds) in which it had them."""

    name: str
    model: str
    gpu_type: str
    gpus: int
    periods: list[tuple[float, float]]

    def within(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Its periods cut to [begin, end)."""
        cut = ((max(since, begin_s), min(until, end_s)) for since, until in self.periods)
        return [(since, until) for since, until in cut if since < until]


def paid_instances(since: datetime, until: datetime) -> list[PaidInstance]:
    """Instances that had GPUs within [since, until), from the oldest row on.

    An instance has its GPUs in every state but *stopped*, as nodes count them; one that shares them not while it sleeps. Its
    states before now are those that its moves left; its GPUs are what they are now. An instance whose row was deleted is
    no longer known.
    """
    moves: dict[str, list[Event]] = defaultdict(list)
    events = Event.objects.filter(subject_type="instance", kind="instance.moved", at__gte=since).order_by("pk")
    for event in events:
        moves[event.subject_id].append(event)
    rows = Instance.objects.filter(created_at__lt=until).values_list(
        "pk",
        "name",
        "state",
        "created_at",
        "deployment__model__name",
        "deployment__gpu_type__name",
        gpus_of(),
        "swap_group",
    )
    known = (
        PaidInstance(
            name,
            model,
            gpu_type,
            gpus,
            paid_periods(max(since, created_at), until, state, moves[str(pk)], shares_gpus=group is not None),
        )
        for pk, name, state, created_at, model, gpu_type, gpus, group in rows
    )
    return [instance for instance in known if instance.periods]


def counted_before(since: datetime, until: datetime) -> dict[datetime, list[PaidInstance]]:
    """Return, for each quarter of an hour in [since, until) that was counted, the instances that were paid then."""
    known: dict[datetime, list[PaidInstance]] = defaultdict(list)
    rows = InstanceHour.objects.filter(hour__gte=since, hour__lt=until, paid__isnull=False).order_by("pk")
    for row in rows:
        begin_s = row.hour.timestamp()
        periods = [(begin_s + begin, begin_s + end) for begin, end in row.paid or []]
        known[row.hour.astimezone(UTC)].append(PaidInstance(row.instance, row.model, row.gpu_type, row.gpus, periods))
    return known


def paid_periods(
    since: datetime, until: datetime, state: str, moves: Iterable[Event], *, shares_gpus: bool = False
) -> list[tuple[float, float]]:
    """Periods in [since, until), in epoch seconds, in which an instance had GPUs.

    Args:
        state: what it is in now.
        moves: its moves from *since* on, the oldest first.
    """
    without = {InstanceState.STOPPED, *([InstanceState.SLEEPING] if shares_gpus else [])}
    begin_s, end_s = since.timestamp(), until.timestamp()
    moves = [event for event in moves if "state" in event.after]
    now = moves[0].before.get("state", state) if moves else state
    periods: list[tuple[float, float]] = []
    for event in moves:
        at_s = min(max(_moment_s(event), begin_s), end_s)
        if now not in without and at_s > begin_s:
            periods.append((begin_s, at_s))
        begin_s, now = at_s, event.after["state"]
    if now not in without and begin_s < end_s:
        periods.append((begin_s, end_s))
    return periods


def _moment_s(event: Event) -> float:
    ended_at = event.inputs.get(ENDED_AT)
    return (datetime.fromisoformat(ended_at) if ended_at else event.at).timestamp()
