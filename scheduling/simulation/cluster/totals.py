"""What the global router and the reactive trigger look at: sums over an endpoint's instances, kept up to date.

A decision that asks how full an endpoint is would look at all its instances; a change concerns one. So an instance adds
its changes to the sums of its endpoint, and remembers what it has added (`summed_...`). They hold no more than the fleet
arrays: who brings an instance up to the moment updates them. What they may lack is bounded by a straight line in
time, in whole numbers, so that ten million changes leave no rounding behind.
"""

import math
from typing import Final

from scheduling.compiled import compiled_inline, compiled_internal, index
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.simulation.engine.progress import observe
from scheduling.simulation.engine.state import EngineArrays

PARTS: Final = 1024
"""Of a token, in bounds."""


@compiled_internal
def sum_up(fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int) -> None:
    """Recompute the sums of *endpoint*, after instances came, went, or began or ceased to accept work."""
    total = engines.totals[endpoint]
    total.kv_tokens = total.kv_capacity_tokens = total.running = total.max_num_seqs = 0
    total.growth_per_s = total.growth = total.open = 0
    for at in range(index(endpoints.first[endpoint]), index(endpoints.first[endpoint + 1])):
        instance = index(endpoints.members[at])
        if fleet.accepting[instance] != 0:
            engine = engines.instances[instance]
            engine.summed_running, engine.summed_kv_tokens = fleet.running[instance], fleet.kv_tokens[instance]
            total.running += engine.summed_running
            total.kv_tokens += engine.summed_kv_tokens
            total.max_num_seqs += fleet.max_num_seqs[instance]
            total.kv_capacity_tokens += fleet.kv_capacity_tokens[instance]
            engines.open[index(endpoints.first[endpoint] + total.open)] = instance
            total.open += 1
            engine.summed_growth_per_s = engine.summed_growth = 0
            update_growth_totals(fleet, engines, instance)


@compiled_inline
def update_totals(fleet: FleetArrays, engines: EngineArrays, instance: int) -> None:
    """Bring the sums of its endpoint up to what *instance* runs and holds now."""
    if fleet.accepting[instance] != 0:
        engine, total = engines.instances[instance], engines.totals[index(fleet.endpoint[instance])]
        running, kv_tokens = fleet.running[instance], fleet.kv_tokens[instance]
        total.running += running - engine.summed_running
        total.kv_tokens += kv_tokens - engine.summed_kv_tokens
        engine.summed_running, engine.summed_kv_tokens = running, kv_tokens


@compiled_inline
def update_growth_totals(fleet: FleetArrays, engines: EngineArrays, instance: int) -> None:
    """Bring the sums of its endpoint up to how fast *instance* may grow from now on, and what it may have grown by."""
    if fleet.accepting[instance] != 0:
        engine, total = engines.instances[instance], engines.totals[index(fleet.endpoint[instance])]
        per_s, growth = 0, 0
        if engines.exceeding[instance] != 0:
            beyond = engine.step_decodes - engine.step_within
            per_s = math.ceil(PARTS * beyond * engine.most_per_s)
            # One iteration more than the bound says: sums are rounded.
            growth = PARTS * beyond * (1 - engine.counted) - math.floor(per_s * engine.started_s)
        total.growth_per_s += per_s - engine.summed_growth_per_s
        total.growth += growth - engine.summed_growth
        engine.summed_growth_per_s, engine.summed_growth = per_s, growth


@compiled_inline
def report(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, source: int) -> None:
    """Count every token of *instance* that has come out, as *source* sees this moment, and update its endpoint's sums."""
    observe(fleet, engines, instance, now_s, instance < source)
    update_totals(fleet, engines, instance)
    update_growth_totals(fleet, engines, instance)


@compiled_inline
def grown_at_most(engines: EngineArrays, endpoint: int, now_s: float) -> int:
    """KV tokens that *endpoint* may have grown by at the most, and the sums do not know of."""
    total = engines.totals[endpoint]
    return int(max((total.growth_per_s * now_s + total.growth) / PARTS, 0.0)) + 1


@compiled_internal
def observe_endpoint(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """Count every token that has come out at *endpoint* up to this moment."""
    for at in range(index(endpoints.first[endpoint]), index(endpoints.first[endpoint + 1])):
        instance = index(endpoints.members[at])
        report(fleet, engines, instance, now_s, source)


@compiled_inline
def grown_tokens(engines: EngineArrays, instance: int, now_s: float) -> float:
    """KV tokens that *instance*, in a segment, may have grown by at the most, and the fleet arrays do not know of."""
    engine = engines.instances[instance]
    # One iteration more than the bound says: sums are rounded.
    ended = min((now_s - engine.started_s) * engine.most_per_s + 1.0, float(engine.steps)) - engine.counted
    return float((engine.step_decodes - engine.step_within) * ended)


@compiled_inline
def observe_memory(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """Bring the fleet arrays of *endpoint* up to now, where it matters for memory: at instances that may have grown."""
    first = index(endpoints.first[endpoint])
    for at in range(first, first + index(engines.totals[endpoint].open)):
        instance = index(engines.open[index(at)])
        if engines.exceeding[instance] != 0:
            report(fleet, engines, instance, now_s, source)
