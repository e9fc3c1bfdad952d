"""Inputs of the global router and the reactive trigger: sums over an endpoint's instances, kept up to date.

The load of an endpoint depends on all its instances, but a change concerns one. So an instance adds its changes to the sums
of its endpoint, and remembers what it has added (`summed_...`). The sums cover the same as the fleet arrays: updating an
instance updates them. What they lack is bounded by a straight line in time, in whole numbers, so that ten million changes
leave no rounding error.
"""

import math
from typing import Final

from scheduling.compiled import compiled_inline, compiled_internal, index
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once
from scheduling.simulation.engine.progress import observe
from scheduling.simulation.engine.state import EngineArrays

PARTS: Final = 1024
"""Parts of a token in bounds."""


@compiled_internal
def sum_up(fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int) -> None:
    """Recompute the sums of *endpoint*, after instances came, went, or changed whether they accept work."""
    total = engines.totals[endpoint]
    total.kv_tokens = total.kv_capacity_tokens = total.running = total.sequences = 0
    total.growth_per_s = total.growth = total.open = 0
    for at in range(index(endpoints.first[endpoint]), index(endpoints.first[endpoint + 1])):
        instance = index(endpoints.members[at])
        if fleet.accepting[instance] != 0:
            engine = engines.instances[instance]
            engine.summed_running, engine.summed_kv_tokens = fleet.running[instance], fleet.kv_tokens[instance]
            total.running += engine.summed_running
            total.kv_tokens += engine.summed_kv_tokens
            engine.summed_sequences = at_once(fleet, instance)
            total.sequences += engine.summed_sequences
            total.kv_capacity_tokens += fleet.kv_capacity_tokens[instance]
            engines.open[index(endpoints.first[endpoint] + total.open)] = instance
            total.open += 1
            engine.summed_growth_per_s = engine.summed_growth = 0
            update_growth_totals(fleet, engines, instance)


@compiled_inline
def update_totals(fleet: FleetArrays, engines: EngineArrays, instance: int) -> None:
    """Update the endpoint's sums to what *instance* runs and holds now."""
    if fleet.accepting[instance] != 0:
        engine, total = engines.instances[instance], engines.totals[index(fleet.endpoint[instance])]
        running, kv_tokens = fleet.running[instance], fleet.kv_tokens[instance]
        total.sequences += at_once(fleet, instance) - engine.summed_sequences
        engine.summed_sequences = at_once(fleet, instance)
        total.running += running - engine.summed_running
        total.kv_tokens += kv_tokens - engine.summed_kv_tokens
        engine.summed_running, engine.summed_kv_tokens = running, kv_tokens


@compiled_inline
def update_growth_totals(fleet: FleetArrays, engines: EngineArrays, instance: int) -> None:
    """Update the endpoint's sums to how fast *instance* may grow from now on, and how much it may have grown."""
    if fleet.accepting[instance] != 0:
        engine, total = engines.instances[instance], engines.totals[index(fleet.endpoint[instance])]
        per_s, growth = 0, 0
        if engines.exceeding[instance] != 0:
            beyond = engine.step_decodes - engine.step_within
            per_s = math.ceil(PARTS * beyond * engine.most_per_s)
            # One iteration more than the bound: sums are rounded.
            growth = PARTS * beyond * (1 - engine.counted) - math.floor(per_s * engine.started_s)
        total.growth_per_s += per_s - engine.summed_growth_per_s
        total.growth += growth - engine.summed_growth
        engine.summed_growth_per_s, engine.summed_growth = per_s, growth


@compiled_inline
def report(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, source: int) -> None:
    """Count every token that *instance* has emitted, as *source* sees this moment, and update its endpoint's sums."""
    observe(fleet, engines, instance, now_s, instance < source)
    update_totals(fleet, engines, instance)
    update_growth_totals(fleet, engines, instance)


@compiled_inline
def grown_at_most(engines: EngineArrays, endpoint: int, now_s: float) -> int:
    """Return the most KV tokens that *endpoint* may have grown by without the sums including them."""
    total = engines.totals[endpoint]
    return int(max((total.growth_per_s * now_s + total.growth) / PARTS, 0.0)) + 1


@compiled_internal
def observe_endpoint(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """Count every token emitted at *endpoint* so far."""
    for at in range(index(endpoints.first[endpoint]), index(endpoints.first[endpoint + 1])):
        instance = index(endpoints.members[at])
        report(fleet, engines, instance, now_s, source)


@compiled_inline
def grown_tokens(engines: EngineArrays, instance: int, now_s: float) -> float:
    """Return the most KV tokens that *instance*, in a segment, may have grown by beyond the fleet arrays."""
    engine = engines.instances[instance]
    # One iteration more than the bound: sums are rounded.
    ended = min((now_s - engine.started_s) * engine.most_per_s + 1.0, float(engine.steps)) - engine.counted
    return float((engine.step_decodes - engine.step_within) * ended)


@compiled_inline
def observe_memory(
    fleet: FleetArrays, endpoints: EndpointArrays, engines: EngineArrays, endpoint: int, now_s: float, source: int
) -> None:
    """Update the fleet arrays of *endpoint* where memory may have changed: at instances that may have grown."""
    first = index(endpoints.first[endpoint])
    for at in range(first, first + index(engines.totals[endpoint].open)):
        instance = index(engines.open[index(at)])
        if engines.exceeding[instance] != 0:
            report(fleet, engines, instance, now_s, source)
