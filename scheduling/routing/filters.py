"""Which instances of an endpoint may get a request: the one place of rules by request and instance."""

from scheduling.compiled import compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.adapters import exclude_without_adapter


@compiled_internal
def exclude(fleet: FleetArrays, endpoints: EndpointArrays, waiting: WaitingArrays, endpoint: int, slot: int) -> bool:
    """Pass over the instances of *endpoint* that may not get the request in *slot* now; return whether a rule applies to it.

    If one does, call `allow_all` after the decision.
    """
    adapter = int(waiting.adapter[slot])
    if adapter < 0:
        return False
    prompt, output = int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot])
    exclude_without_adapter(fleet, endpoints, endpoint, adapter, prompt, output)
    return True


@compiled_internal
def allow_all(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> None:
    """End `exclude`."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        fleet.passed_over[endpoints.members[at]] = 0
