"""Requests given to an instance beyond what it runs, so that no freed slot is idle for a round trip.

A slot is free when a request ends; a request sent for it then starts a dispatch round trip later: the gateway learns of
the end, decides and sends, and the instance accepts the request. So if no instance of an endpoint has room, each may
hold as many requests *ahead*, in its own queue, as end there within a round trip. That number is counted: a trip begins
with an end and includes all ends within one round trip after it. A single end counts as 1, so at least one request is
ahead; many ends in the same step count in full, because as many slots are empty then. Trips vary, so two mean
deviations are added to the mean.

The round trip is that of an instance under light load, as TCP BBR takes the lowest of recent round trips for that of the
path. Under load it includes the queue of the instance's API process: if that counted, a busy process would get more requests
ahead, which would make it busier. So a longer round trip counts only while the instance runs few requests, a shorter one
always.

An instance with an unknown round trip (0) gets none, nor one whose limit is 0: there the order is strict.
"""

from typing import Final

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once

# Columns of a row of `FleetArrays.round_trips`.
ROUND_TRIP_S: Final = 0
BEGAN_S: Final = 1  # start of the current trip
ENDED: Final = 2  # requests that ended in it
ENDS: Final = 3  # ends per trip, smoothed; 0 before the first trip is over
DEVIATION: Final = 4  # mean deviation of that, smoothed too

WEIGHT: Final = 0.125
"""Weight of the last trip in `ENDS`, and of the last measurement in `ROUND_TRIP_S`, as for TCP's round trip (RFC 6298).
"""
LIGHT: Final = 0.25
"""Share of its room up to which an instance's load does not lengthen its round trip."""
DEVIATION_WEIGHT: Final = 0.25
"""Weight of the last trip in `DEVIATION`; from there too."""
DEVIATIONS: Final = 2.0
"""Mean deviations above the mean; more ends than that occasionally leave a slot empty."""
MEASURED: Final = -1
"""As a limit: the measured allowance, at most what the instance runs at once."""


@compiled_internal
def allowance(fleet: FleetArrays, instance: int) -> int:
    """Return the requests that *instance* may have beyond its room when requests wait."""
    trips = fleet.round_trips
    if trips[instance, ROUND_TRIP_S] <= 0.0:
        return 0
    limit = fleet.ahead_limit[instance]
    if limit < 0 or limit > at_once(fleet, instance):
        limit = at_once(fleet, instance)
    ends = trips[instance, ENDS] + DEVIATIONS * trips[instance, DEVIATION]
    return int(min(limit, max(1, int(ends + 0.5))))


@compiled
def note_round_trip(fleet: FleetArrays, instance: int, round_trip_s: float, weight: float) -> None:
    """Record a measured round trip to *instance* with *weight*; the first one counts in full.

    A longer one counts only while *instance* runs at most `LIGHT` of what it is given at once: see the top of the module.
    """
    before_s = fleet.round_trips[instance, ROUND_TRIP_S]
    if before_s <= 0.0:
        weight = 1.0
    elif round_trip_s > before_s and fleet.running[instance] > LIGHT * at_once(fleet, instance):
        return
    fleet.round_trips[instance, ROUND_TRIP_S] = before_s + weight * (round_trip_s - before_s)


@compiled
def note_end(fleet: FleetArrays, instance: int, now_s: float) -> None:
    """Record that a request of *instance* has ended or otherwise left it."""
    trips = fleet.round_trips
    if trips[instance, ENDED] > 0.0:
        if now_s - trips[instance, BEGAN_S] < trips[instance, ROUND_TRIP_S]:
            trips[instance, ENDED] += 1.0
            return
        if trips[instance, ENDS] > 0.0:
            more = trips[instance, ENDED] - trips[instance, ENDS]
            trips[instance, DEVIATION] += DEVIATION_WEIGHT * (abs(more) - trips[instance, DEVIATION])
            trips[instance, ENDS] += WEIGHT * more
        else:
            trips[instance, ENDS] = trips[instance, ENDED]
    trips[instance, BEGAN_S], trips[instance, ENDED] = now_s, 1.0


@compiled_internal
def beyond_room(fleet: FleetArrays, instance: int, running: int, kv_tokens: int) -> int:
    """Return how many of *running* requests exceed the room of *instance*, by sequences or mean memory."""
    ahead = running - at_once(fleet, instance)
    beyond = kv_tokens - int(fleet.kv_capacity_tokens[instance])
    if beyond > 0:
        ahead = max(ahead, -(-beyond * running // kv_tokens))
    return int(max(ahead, 0))


@compiled
def requests_ahead(fleet: FleetArrays, instance: int) -> int:
    """Return the number of requests at *instance* beyond its room."""
    return beyond_room(fleet, instance, int(fleet.running[instance]), int(fleet.kv_tokens[instance]))


@compiled_internal
def open_ahead(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> bool:
    """Let `routing.has_room` use the allowances at *endpoint* until `close_ahead`; return whether there are any."""
    any_allowed = False
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        allowed = allowance(fleet, instance)
        fleet.ahead_open[instance] = allowed
        any_allowed = any_allowed or allowed > 0
    return any_allowed


@compiled_internal
def close_ahead(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> None:
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        fleet.ahead_open[endpoints.members[at]] = 0


def warm_up(fleet: FleetArrays) -> None:
    """Load every kernel of this module that runs live from the cache, or compile it."""
    note_round_trip(fleet, 0, 0.0, WEIGHT)
    note_end(fleet, 0, 0.0)
    requests_ahead(fleet, 0)
