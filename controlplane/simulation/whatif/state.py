"""What runs and waits at a start, put under the simulation of a future."""

from dataclasses import replace
from typing import Any

from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import Stage
from scheduling.simulation.staging.state import Forked, forked_state


def with_state(state: dict[str, Any], scenario: Scenario, staged: Stage, seed: int, *, recorded: bool) -> Stage:
    """*staged*, made of *scenario*, beginning with *state*, that of `fork_fleet`; *seed* draws what is still to come of it.

    *recorded*: requests that have ended since are as long as they were.
    """
    given = dict(state)
    if recorded:
        _end_as_recorded(given)
    tenants = list(staged.names.tenants)
    forked = forked_state(Forked(**given), scenario, staged.cluster, tenants, seed)
    if staged.scaled is not None:
        for strategy in staged.scaled.strategies.values():
            strategy.memory.update(given.get("memory", {}))
    return replace(staged, state=forked, names=replace(staged.names, tenants=tenants))


def _end_as_recorded(state: dict[str, Any]) -> None:
    """Give the requests of *state* that have ended since the lengths that they had."""
    rows = [dict(row) for row in state["running"]], [dict(row) for row in state["waiting"]]
    state["running"], state["waiting"] = rows
    known = {row["request_id"]: row for of in rows for row in of}
    ended = LedgerRow.objects.filter(request_id__in=list(known), outcome=Outcome.DONE)
    for request_id, prompt, output in ended.values_list("request_id", "prompt_tokens", "output_tokens"):
        row = known[request_id]
        row["prompt_tokens"], row["true_output"] = prompt or row["prompt_tokens"], max(1, output)
