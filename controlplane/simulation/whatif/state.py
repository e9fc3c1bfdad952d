"""The state of a fleet as JSON in a row, and as the start of a staged simulation."""

from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import PlainSerializer, PlainValidator

from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.fleet.state import FleetState, HeldRequest, RunningRequest, WaitingRequest
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import Stage
from scheduling.simulation.staging.fork import fork

Request = TypeVar("Request", RunningRequest, WaitingRequest, HeldRequest)


def _read(value: Any) -> FleetState:
    if isinstance(value, FleetState):
        return value
    try:
        return msgspec.convert(value, FleetState)
    except msgspec.ValidationError as error:
        raise ValueError(f"This fork was stored by another version, start again from the fleet: {error}") from error


StoredState = Annotated[FleetState, PlainValidator(_read), PlainSerializer(msgspec.to_builtins)]


def with_state(state: FleetState, scenario: Scenario, staged: Stage, seed: int, *, recorded: bool) -> Stage:
    """Begin *staged*, made of *scenario*, with *state*; *seed* draws the lengths that are still unknown.

    *recorded*: requests that have ended since are as long as they were.
    """
    if recorded:
        state = _as_recorded(state)
    tenants = list(staged.names.tenants)
    forked = fork(state, scenario, staged.cluster, tenants, seed)
    if staged.scaled is not None:
        for strategy in staged.scaled.strategies.values():
            strategy.memory.update(state.memory)
    return replace(staged, state=forked, names=replace(staged.names, tenants=tenants))


def _as_recorded(state: FleetState) -> FleetState:
    """Return a copy in which requests that have ended since have the lengths of their records."""
    names = [one.request_id for one in state.requests]
    rows = LedgerRow.objects.filter(request_id__in=names, outcome=Outcome.DONE)
    lengths = {
        request_id: (prompt, max(1, output))
        for request_id, prompt, output in rows.values_list("request_id", "prompt_tokens", "output_tokens")
    }

    def recorded(one: Request) -> Request:
        if one.request_id not in lengths:
            return one
        prompt, output = lengths[one.request_id]
        return msgspec.structs.replace(one, prompt_tokens=prompt or one.prompt_tokens, true_output=output)

    return msgspec.structs.replace(
        state,
        running=[recorded(one) for one in state.running],
        waiting=[recorded(one) for one in state.waiting],
        held=[recorded(one) for one in state.held],
    )
