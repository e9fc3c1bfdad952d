"""The fleet of the rows as a simulated cluster: how fast its instances start, and what its round trips took."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
from django.db.models import QuerySet
from numpy.typing import NDArray

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment
from controlplane.fleet.selectors import region_latencies_ms
from controlplane.gateway.models import LedgerRow
from controlplane.planning.plans import capability, inventory

if TYPE_CHECKING:
    from scheduling.simulation.cluster.description import Cluster

USUAL_START_S = 120.0
"""From asking for an instance until it serves, where none was seen to start."""
LONGEST_START_S = 7200.0
"""What takes longer (SageServe 7.1: two hours, with weights from afar) happened while the stack was stopped."""
TRACES = 500
"""Newest requests by whose decision traces round trips are known."""


def start_s() -> float:
    """Median time from asking for an instance until it served, over the last that were seen to start."""
    moves = Event.objects.filter(kind="instance.moved").order_by("-pk")[:1000]
    asked: dict[str, datetime] = {}
    took: list[float] = []
    for subject, at, after in reversed(moves.values_list("subject_id", "at", "after")):
        match after.get("state"):
            case InstanceState.PROVISIONING:
                asked[subject] = at
            case InstanceState.READY if subject in asked:
                took.append((at - asked.pop(subject)).total_seconds())
    took = [each for each in took if each <= LONGEST_START_S]
    return float(np.median(took)) if took else USUAL_START_S


def round_trips_s(rows: QuerySet[LedgerRow]) -> dict[tuple[str, str], float]:
    """The dispatch round trip that was measured, by endpoint: the median of what the newest decisions knew."""
    known: dict[tuple[str, str], list[float]] = {}
    for model, region, trace in rows.order_by("-arrived_at").values_list("model", "region", "trace")[:TRACES]:
        for step in trace:
            if round_trip_ms := step.get("round_trip_ms"):
                known.setdefault((model, region), []).append(round_trip_ms / 1000)
    return {endpoint: float(np.median(measured_s)) for endpoint, measured_s in known.items()}


def cluster_of(
    fleet: inventory.Fleet, deployments: Sequence[Deployment], rows: QuerySet[LedgerRow]
) -> tuple["Cluster", NDArray[np.float64]]:
    """As many instances as each deployment may have, those that are there ready; and their prices in USD an hour.

    Round trips are those of *rows*, latencies between regions those of the inventory.
    """
    from scheduling.routing.regions import latency_ms
    from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
    from scheduling.simulation.cluster.world import State

    starts_s, trips_s = start_s(), round_trips_s(rows)
    specs: list[InstanceSpec] = []
    usd: list[float] = []
    routing: dict[tuple[str, str], str] = {}
    ordering: dict[tuple[str, str], str] = {}
    stretch: dict[tuple[str, str], float] = {}
    ahead: dict[tuple[str, str], int | None] = {}
    bounds: Counter[tuple[str, str]] = Counter()
    for place, row in fleet.deployments.items():
        profile = row.profile()
        if row not in deployments or profile is None:
            continue
        engine = capability.engine_of(row, profile.coefficients())
        ready = min(max(fleet.present[place], row.min_instances, 1), row.max_instances)
        model, region, gpu_type = place
        for number in range(row.max_instances):
            state = State.READY if number < ready else State.EMPTY
            each_usd = float(row.gpu_type.on_demand_usd_per_hour) * row.tensor_parallel
            name = f"{model}-{region}-{number + 1}"
            specs.append(InstanceSpec(model, region, engine, gpu_type, name, state, usd_per_hour=each_usd))
            usd.append(each_usd)
        routing.setdefault((model, region), row.routing_policy)
        ordering.setdefault((model, region), row.ordering_policy)
        stretch.setdefault((model, region), row.ordering_stretch)
        ahead.setdefault((model, region), row.requests_ahead_limit)
        bounds[model, region] += row.queue_bound
    # Live, an instance that is let go is stopped; it comes back as any other does.
    delays = Delays(spot_median_s=starts_s, spot_max_s=5 * starts_s, start_s=0.0, local_weights_s=starts_s)
    regions = list(dict.fromkeys(spec.region for spec in specs))
    known_ms = region_latencies_ms()
    cluster = Cluster(
        specs,
        regions=regions,
        latency_s=[[latency_ms(known_ms, origin, target) / 1000 for target in regions] for origin in regions],
        routing=routing,
        ordering=ordering,
        ordering_stretch=stretch,
        dispatch_round_trip_s={endpoint: trips_s.get(endpoint, 0.0) for endpoint in ahead},
        requests_ahead_limit=ahead,
        queue_bound=dict(bounds),
        delays=delays,
        share_spot=False,
        sweeps=True,
    )
    return cluster, np.array(usd)
