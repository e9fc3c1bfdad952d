"""The week ahead: instances by hour as the planner would have them, if it planned each hour for its forecast.

Each hour, and each moment at which scheduled minimums or maintenance change, is a plan of `make_plan` from the instances
before it. Endpoints with less than two days of demand keep that of now.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from controlplane.fleet.selectors import maintenance_windows, schedules
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts.services import HOUR_S, endpoints_by_hour
from controlplane.planning.models import ProjectedFleet
from controlplane.planning.plans import inventory, services
from controlplane.planning.plans.expected import levels

if TYPE_CHECKING:
    from scheduling.planning.advisor import EndpointDemand, PlanInputs
    from scheduling.planning.places import Endpoint, Place

    ByHour = Mapping[Endpoint, list[EndpointDemand]]

HOURS: Final = 7 * 24
EVERY_S: Final = 900.0


def make(now: datetime) -> list[ProjectedFleet]:
    """Store the projection of the hours after *now* in place of the last one; nothing while nothing can be planned."""
    followers = {name: row.strategy for name, row in services.policies_in_force().items()}
    inputs = services.read_inputs(now, followers)
    if inputs is None:
        return []
    start = demand.window_start(now, HOUR_S) + timedelta(seconds=HOUR_S)
    changes = _changes(start)
    moments = sorted({*changes, *(start + hour * timedelta(seconds=HOUR_S) for hour in range(HOURS))})
    counts = _planned(inputs, moments, changes, _demand(inputs, start, followers))
    places = [[*place, [of[place] for of in counts]] for place in sorted(counts[0])]
    made = ProjectedFleet.objects.create(made_at=now, moments=[at.timestamp() for at in moments], places=places)
    ProjectedFleet.objects.exclude(pk=made.pk).delete()
    return [made]


def _planned(
    inputs: "PlanInputs", moments: Sequence[datetime], changes: Collection[datetime], ahead: "ByHour"
) -> "list[dict[Place, int]]":
    """Return instances by place from each of *moments* on, the fleet being another after *changes*; demand is *ahead*."""
    from scheduling.planning.advisor import make_plan
    from scheduling.planning.programme import SolverLost

    planned, fleet, stretch = set(inputs.fleet.models), None, 0
    known: dict[object, dict[Place, int]] = {}
    counts, made = {place: row.instances for place, row in inputs.fleet.deployments.items()}, []
    for at in moments:
        if fleet is None or at in changes:
            fleet, stretch = inventory.read(at=at).to_plan(), stretch + 1
        hour = int((at - moments[0]).total_seconds() // HOUR_S)
        of = {endpoint: each[hour] for endpoint, each in ahead.items()}
        own = fleet.only(planned)
        there, left = {}, dict(own.units)
        for place, row in own.deployments.items():  # what was on GPUs in maintenance is gone
            room = left[place[1:]] // row.gpus if place[1:] in left else row.max_instances
            there[place] = replace(row, instances=min(counts.get(place, 0), row.max_instances, room), spot=0)
            if place[1:] in left:
                left[place[1:]] -= row.gpus * there[place].instances
        key = (
            stretch,
            tuple(row.instances for row in there.values()),
            tuple(each.kept.tobytes() for each in of.values()),
        )
        if key not in known:
            asked = replace(inputs.demand, start_s=at.timestamp(), window_s=float(HOUR_S), of=of)
            try:
                plan = make_plan(at.timestamp(), replace(inputs, demand=asked, fleet=replace(own, deployments=there)))
                targets = plan.plan.targets
                known[key] = {place: int(targets[plan.planned.index(place)]) for place in there}
            except SolverLost:  # as live, what was planned before stays
                known[key] = {place: row.instances for place, row in there.items()}
        others = {
            place: min(max(row.instances, row.min_instances), row.max_instances)
            for place, row in fleet.deployments.items()
            if place[0] not in planned
        }
        counts = known[key] | others
        made.append(counts)
    return made


def _changes(start: datetime) -> set[datetime]:
    """Return the moments of the hours from *start* at which minimums or maintenance change."""
    until = start + HOURS * timedelta(seconds=HOUR_S)
    at = {end for one in maintenance_windows(start, until) for end in (one.from_at, one.ends_at)}
    for schedule in schedules().values():
        steps = schedule.steps(start.timestamp(), until.timestamp())
        at |= {datetime.fromtimestamp(at_s, start.tzinfo) for at_s, _ in steps}
    return {each for each in at if start <= each < until}


def _demand(inputs: "PlanInputs", start: datetime, followers: Mapping[str, str]) -> "ByHour":
    """Return the demand of each endpoint by hour from *start*, at the level of its strategy among *followers*."""
    from scheduling.planning.advisor import Band, EndpointDemand

    forecasts = endpoints_by_hour(start - timedelta(seconds=HOUR_S), HOURS + 1)  # the first is the running hour
    ahead = {}
    for endpoint, now in inputs.demand.of.items():
        follows, made = inputs.follows[endpoint[0]], forecasts.get(endpoint)
        if made is None:
            most = int(np.argmax(now.kept)) if len(now.kept) else 0
            level = {name: getattr(now, name)[most : most + 1] for name in ("kept", "soon", "prompt")}
            mean = None if now.mean is None else now.mean[most : most + 1]
            ahead[endpoint] = [replace(now, **level, mean=mean, now_tokens_per_s=0.0)] * HOURS
            continue
        band, _ = levels(endpoint[0], followers[endpoint[0]])
        prompt, output = (
            [Band(*map(np.atleast_1d, at)) for at in zip(each.mean, getattr(each, band), strict=True)] for each in made
        )
        ahead[endpoint] = [
            EndpointDemand.of(*at, follows, now.beta_tokens_per_s, now.cv)
            for at in list(zip(prompt, output, strict=True))[1 : HOURS + 1]
        ]
    return ahead
