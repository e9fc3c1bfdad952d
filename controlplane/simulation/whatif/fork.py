"""A fork of the living fleet: what its gateway has in memory and what the rows say, as the start of a simulation."""

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np

from controlplane.accounts.models import Tenant
from controlplane.dispatch.queues.commands import ask
from controlplane.fleet.lifecycle.states import COMING, InstanceState
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import Outcome
from controlplane.planning.comparison.scenario import scenario_of
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.plans import inventory
from controlplane.simulation.selectors import asked_rows
from controlplane.simulation.whatif.arrivals import RECENT, forecast_arrivals
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts.past import past_demand
from scheduling.simulation.cluster.world import State
from scheduling.simulation.staging.fleet import gpus_as_type

STATES: Final = {
    InstanceState.PROVISIONING: State.LOADING,
    InstanceState.LOADING: State.LOADING,
    InstanceState.READY: State.READY,
    InstanceState.DRAINING: State.DRAINING,
    InstanceState.SLEEPING: State.ASLEEP,
    InstanceState.STOPPED: State.EMPTY,
    InstanceState.FAILED: State.FAILED,
}
"""Of a simulation. One that is being got or loads is ready after what is left of the time that starts were seen to take."""
EPOCH_S: Final = 1e9
"""What strategies remember that is larger is a moment."""
RATIOS: Final = 400
"""Newest requests of each model from which outputs that are still to come are drawn."""


def fork_fleet(horizon_s: float) -> Start:
    """The fleet as it is now, with requests for *horizon_s* to come at the level of the forecasts.

    Raises GatewaySilent when no gateway answers within seconds, ValueError if no deployment has a performance profile.
    """
    return fork_of(ask("snapshot"), horizon_s)


def fork_of(seen: dict[str, Any], horizon_s: float) -> Start:
    """The same of what a gateway has *seen* (`dispatch.snapshot`)."""
    at = datetime.fromtimestamp(seen["at"], UTC)
    names = set(Deployment.objects.filter(active=True).values_list("model__name", flat=True))
    fleet = inventory.read(names)
    values = scenario_of(fleet, asked_rows(at - RECENT, at))
    if not values["fleet"]:
        raise ValueError("No active deployment has a performance profile: nothing says how long its instances take.")
    state, remarks = _state(seen, fleet, at)
    _fit(values, state)
    arrivals, about_arrivals = forecast_arrivals(at, horizon_s, [*state["running"], *state["waiting"]])
    if shadowed := _shadowed(names):
        remarks.append(f"{', '.join(shadowed)}: in shadow mode now; futures assume the strategy acts.")
    unknown = sorted(names - set(values["models"]))
    if unknown:
        remarks.append(f"{', '.join(unknown)} is left out: no performance profile says how long its instances take.")
    return Start(
        kind="fleet",
        at=at,
        scenario=values | {"demand": {"too_long": "clip"}},
        state=state,
        arrivals=arrivals,
        past=past_demand(at),
        remarks=[*remarks, "Prefix caches begin empty.", *about_arrivals],
    )


def _shadowed(names: set[str]) -> list[str]:
    """Those of *names* whose strategy does not act: a future that gives them another one assumes that it would."""
    acts = ScalingPolicy.objects.filter(mode__in=(PolicyMode.AUTO, PolicyMode.ASK))
    return sorted(names - set(acts.values_list("model__name", flat=True)))


def _state(seen: dict[str, Any], fleet: inventory.Fleet, at: datetime) -> tuple[dict[str, Any], list[str]]:
    """The rows of `Forked` of what the gateway has *seen*, and remarks."""
    tenants = dict(Tenant.objects.values_list("pk", "name"))
    for row in (*seen["running"], *seen["waiting"]):
        row["tenant"] = tenants.get(row.pop("tenant_id"), "")
    degrees = {place: row.tensor_parallel for place, row in fleet.deployments.items()}
    silent = []
    for row in seen["instances"]:
        gpu_type, state = row.pop("gpu_type"), InstanceState(row["state"])
        place = row["model"], row["region"], gpu_type
        row["gpu"] = gpus_as_type(gpu_type, degrees.get(place, 1))
        row["state"] = STATES[state].name
        row["ends_s"] = None
        if state in COMING and row.get("up_s") is not None:  # by a swap
            row["ends_s"] = max(0.0, row["up_s"])
        elif state in COMING:
            row["ends_s"] = max(0.0, fleet.starts.of(row["model"], gpu_type).seconds + row["since_s"])
        if state == InstanceState.READY and not row["reachable"]:
            silent.append(row)
    remarks = []
    if silent:
        answered = [row["heartbeat_s"] for row in silent if row["heartbeat_s"] is not None]
        since = f" of {(at + timedelta(seconds=min(answered))):%H:%M:%S}" if answered else ""
        count = len(seen["instances"])
        remarks.append(
            f"{count - len(silent)} of {count} instances answered; {len(silent)} taken as at their last heartbeat{since}."
        )
    known = {name: seen[name] for name in ("instances", "running", "waiting", "endpoints", "groups", "swept_s")}
    return known | {"lengths": _lengths(at), "memory": _memory(at)}, remarks


def _lengths(at: datetime) -> dict[str, list[float]]:
    """By model, true over predicted output of requests that ended lately."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    done = asked_rows(at - RECENT, at).filter(outcome=Outcome.DONE, predicted_output_tokens__gt=0)
    columns = ("model", "output_tokens", "predicted_output_tokens")
    for model, output, predicted in done.order_by("-arrived_at").values_list(*columns)[: 20 * RATIOS]:
        if len(ratios[model]) < RATIOS:
            ratios[model].append(round(output / predicted, 4))
    return dict(ratios)


def _memory(at: datetime) -> dict[str, float]:
    """What strategies remember, with moments from *at* on."""
    at_s = at.timestamp()
    return {
        name: value - at_s if value > EPOCH_S else value
        for memory in ScalingPolicy.objects.values_list("memory", flat=True)
        for name, value in memory.items()
        if isinstance(value, int | float)
    }


def _fit(values: dict[str, Any], state: dict[str, Any]) -> None:
    """Let the scenario's tables say what the instances themselves say: memory, round trips, and enough places for all."""
    by_place: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    trips: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in state["instances"]:
        by_place[row["model"], row["region"], row["gpu"]].append(row)
        if row["round_trips"][0] > 0:
            trips[row["model"], row["region"]].append(row["round_trips"][0])
    placed: Counter[tuple[str, str, str]] = Counter()
    for table in values["fleet"]:
        place = table["model"], table["regions"][0], gpus_as_type(table["gpu"], table["tensor_parallel"])
        rows = by_place[place]
        known = [row["kv_tokens"] for row in rows if row["kv_tokens"]]
        table["kv_tokens"] = min(known) if known else table["kv_tokens"]
        if table.get("sharing") is None:
            alone = [row for row in rows if not row["swap_group"]]
            missing = len(alone) - table["instances"] - table.get("empty", 0)
            table["empty"] = table.get("empty", 0) + max(0, missing)
            placed[place] += 1
    for endpoint in values["endpoints"]:
        measured = trips[endpoint["model"], endpoint["region"]]
        if measured:
            endpoint["dispatch_round_trip_ms"] = 1000 * float(np.median(measured))
