"""Fork of the live fleet: the state in its gateway, and the rows, as the start of a simulation."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from controlplane.dispatch.queues.commands import fleet_state
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import Outcome
from controlplane.planning.models import PolicyMode, ScalingPolicy, mode_of
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.arrivals import RECENT, forecast_arrivals
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts.past import past_demand
from scheduling.fleet.state import Condition, FleetState, InstanceState
from scheduling.simulation.scenario.fleet import gpus_as_type

RATIOS: Final = 400
"""Maximum newest requests of each model from which remaining outputs are drawn."""


def fork_fleet(horizon_s: float) -> Start:
    """Return the present fleet as a start, with forecast requests for *horizon_s*.

    Raises GatewaySilent when no gateway answers within seconds, ValueError if no deployment has a performance profile.
    """
    return fork_of(fleet_state(), horizon_s)


def fork_of(state: FleetState, horizon_s: float) -> Start:
    """Fork from *state*, of a gateway, completed with values that only rows have."""
    at = datetime.fromtimestamp(state.at, UTC)
    names = set(Deployment.objects.filter(active=True).values_list("model__name", flat=True))
    fleet = inventory.read(names)
    values = scenario_of(fleet, ledger_rows(at - RECENT, at), at)
    if not values["fleet"]:
        raise ValueError("No active deployment has a performance profile, which gives instances' times.")
    _complete(state, fleet, at)
    _fit(values, state)
    remarks = _silent_instances(state)
    arrivals, about_arrivals = forecast_arrivals(at, horizon_s, state.requests)
    remarks += _without_strategy(names)
    unknown = sorted(names - set(values["models"]))
    if unknown:
        remarks.append(
            f"{', '.join(unknown)} is left out for lack of a performance profile, which gives instances' times."
        )
    return Start(
        kind="fleet",
        at=at,
        scenario=values | {"demand": {"too_long": "clip"}},
        state=state,
        arrivals=arrivals,
        past=past_demand(at),
        remarks=[*remarks, *about_arrivals],
    )


IDLE_MODES = {PolicyMode.OFF: "off", PolicyMode.SHADOW: "in shadow mode"}


def _without_strategy(names: set[str]) -> list[str]:
    """Return a remark for each mode in which the strategies of some of *names* do not act."""
    policies = {row.model.name: row for row in ScalingPolicy.objects.select_related("model")}
    by_mode: dict[str, list[str]] = {}
    for name in sorted(names):
        by_mode.setdefault(mode_of(policies.get(name)), []).append(name)
    return [
        f"{', '.join(by_mode[mode])}: scaling is {words} now; futures that set no strategy have the floor alone."
        for mode, words in IDLE_MODES.items()
        if mode in by_mode
    ]


def _complete(state: FleetState, fleet: inventory.Fleet, at: datetime) -> None:
    """Add to *state* the numbers of GPUs and recent lengths."""
    for one in state.instances:
        row = fleet.deployments.get((one.model, one.region, one.gpu))
        one.gpu = gpus_as_type(one.gpu, row.tensor_parallel if row else 1)
    state.lengths = _lengths(at)
    _unlink(state)


def _unlink(state: FleetState) -> None:
    """Put random numbers in the place of hashes of tokens, the same one for each: those without a key.

    So what is stored says which prompts begin alike, and nothing of their text, not even to one who can guess it.
    """
    texts = [prompt.tokens for prompt in state.prompts]
    hashes, numbers = np.unique(np.frombuffer(b"".join(texts), np.int64), return_inverse=True)
    drawn = np.random.default_rng().integers(-(1 << 63), (1 << 63) - 1, hashes.size)[numbers].tobytes()
    ends = np.cumsum([0, *map(len, texts)]).tolist()
    for at, prompt in enumerate(state.prompts):
        prompt.tokens = drawn[ends[at] : ends[at + 1]]


def _silent_instances(state: FleetState) -> list[str]:
    """Return a remark on ready instances that do not answer; none if all do."""
    silent = sum(one.state is Condition.READY and not one.reachable for one in state.instances)
    count = len(state.instances)
    return [f"{count - silent} of {count} instances answered; the others are as at their last heartbeat."] * bool(
        silent
    )


def _lengths(at: datetime) -> dict[str, list[float]]:
    """Return true over predicted output of recently ended requests, by model."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    done = ledger_rows(at - RECENT, at).filter(outcome=Outcome.DONE, predicted_output_tokens__gt=0)
    columns = ("model", "output_tokens", "predicted_output_tokens")
    for model, output, predicted in done.order_by("-arrived_at").values_list(*columns)[: 20 * RATIOS]:
        if len(ratios[model]) < RATIOS:
            ratios[model].append(round(output / predicted, 4))
    return dict(ratios)


def _fit(values: dict[str, Any], state: FleetState) -> None:
    """Adapt the scenario's tables to the instances themselves: memory, round trips, and a place for each."""
    by_place: defaultdict[tuple[str, str, str], list[InstanceState]] = defaultdict(list)
    trips: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in state.instances:
        by_place[one.model, one.region, one.gpu].append(one)
        if one.round_trips[0] > 0:
            trips[one.model, one.region].append(one.round_trips[0])
    for table in values["fleet"]:
        here = by_place[table["model"], table["regions"][0], gpus_as_type(table["gpu"], table["tensor_parallel"])]
        known = [one.kv_tokens for one in here if one.kv_tokens]
        table["kv_tokens"] = min(known) if known else table["kv_tokens"]
        if table.get("sharing") is None:
            alone = sum(not one.swap_group for one in here)
            missing = alone - table["instances"] - table.get("empty", 0)
            table["empty"] = table.get("empty", 0) + max(0, missing)
    for endpoint in values["endpoints"]:
        measured = trips[endpoint["model"], endpoint["region"]]
        if measured:
            endpoint["dispatch_round_trip_ms"] = 1000 * float(np.median(measured))
