"""Look-ahead figures of a simulated fleet for strategies and routers.

The look-ahead map (`scheduling.lookahead.maps`) is kept by token, but tokens are not events here. Routers that look ahead
query it at every request, so they get real maps, moved by many iterations at once (`follow`). Strategies query it at their
ticks and need no maps: the same figures are computed from the current sequences of the instances (`endpoint_outlook`), their
progress and expected ends. A test compares the two.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.lookahead.maps import advance, enter
from scheduling.lookahead.outlook import look, waiting_tokens
from scheduling.lookahead.rule import ITERATIONS
from scheduling.queueing.waiting_set import WaitingArrays
from scheduling.routing.regions import filled
from scheduling.simulation.engine.state import NONE, SEGMENT, EngineArrays


@compiled_internal
def follow(engines: EngineArrays, instance: int) -> None:
    """Advance the map of *instance* by the tokens emitted, up to the sequence that is furthest ahead in it."""
    ahead = engines.ahead
    engine: Any = engines.instances[instance]
    iteration = int(engine.iteration + engine.counted)
    furthest = int(ahead.clock[instance])
    sequence = int(engine.first_running)
    while sequence != NONE:
        this: Any = engines.sequences[sequence]
        if this.decoding != 0:
            furthest = max(furthest, int(ahead.began[sequence] + iteration + this.offset - 1))
        sequence = int(this.next)
    advance(ahead, instance, furthest - int(ahead.clock[instance]))


@compiled_internal
def join_map(engines: EngineArrays, instance: int) -> None:
    """Add to the map sequences that get a token without having decoded before: one more, or their first."""
    ahead = engines.ahead
    engine: Any = engines.instances[instance]
    for first in range(2):
        sequence = int(engine.joining)
        while sequence != NONE:
            this: Any = engines.sequences[sequence]
            if first == 0 and this.streaming != 0:
                behind = int(ahead.began[sequence] + this.produced_tokens - ahead.clock[instance])
                if behind > 0:
                    advance(ahead, instance, behind)
            elif first == 1 and this.streaming == 0:
                predicted = int(this.expected_tokens - this.expected_prompt)
                enter(ahead, sequence, instance, int(this.prompt_tokens), predicted, 0)
            sequence = int(this.next_joining)


@compiled
def any_below_floor(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: NDArray[np.int64],
    serving: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
    since_change_s: NDArray[np.float64],
    above: NDArray[np.float64],
    cooldown_s: NDArray[np.float64],
    now_s: float,
) -> bool:
    """Return whether `scaling.floor.floor_move` could move any endpoint; no false negatives.

    *serving* (ready or on the way), *least* and *most* (bounds) are by endpoint, the rest is as in `scaling.floor.Floor`.
    """
    for endpoint in range(serving.size):
        if serving[endpoint] < least[endpoint]:
            return True
        if serving[endpoint] >= most[endpoint]:
            continue
        ready = 0
        for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
            ready += fleet.accepting[endpoints.members[at]]
        if ready == 0:
            if serving[endpoint] == 0 or waiting[endpoint] > serving[endpoint]:
                return True
        elif since_change_s[endpoint] >= cooldown_s[endpoint] and (
            filled(fleet, endpoints, endpoint, waiting[endpoint], 0.0, now_s) * ready
            > above[endpoint] * serving[endpoint]
        ):
            return True
    return False


@compiled
def memory_held(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    engines: EngineArrays,
    mean: NDArray[np.float64],
    most: NDArray[np.float64],
) -> None:
    """Write the KV use of instances that accept work, by endpoint: over all of them, and of the fullest.

    As reported by vLLM: blocks taken, regardless of reservations or waiting requests. PreServe's reactive baseline (5.3)
    scales by it. The engines must be up to date (`loop.control`).
    """
    for endpoint in range(mean.size):
        mean[endpoint], most[endpoint] = 0.0, 0.0
        held_tokens, all_tokens = 0, 0
        for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
            instance = int(endpoints.members[at])
            if fleet.accepting[instance] == 0:
                continue
            engine: Any = engines.instances[instance]
            capacity = int(engine.kv_blocks * engine.block_size_tokens)
            held = capacity - int(engine.free_blocks * engine.block_size_tokens)
            if engine.phase == SEGMENT:  # whose blocks are taken when it ends
                held += int(engine.decoding * engine.counted)
            held = min(held, capacity)
            most[endpoint] = max(most[endpoint], held / capacity)
            held_tokens += held
            all_tokens += capacity
        if all_tokens > 0:
            mean[endpoint] = held_tokens / all_tokens


@compiled_internal
def _draw(
    engines: EngineArrays,
    instance: int,
    sequence: int,
    passed: int,
    ending: NDArray[np.int64],
    ending_tokens: NDArray[np.int64],
) -> None:
    """Add the lines of the list that starts with *sequence*: KV now and iterations left."""
    while sequence != NONE:
        this: Any = engines.sequences[sequence]
        if this.streaming != 0:
            produced = int(this.produced_tokens)
            if this.decoding != 0:
                produced = engines.instances[instance].iteration + passed + this.offset
            # Its first token came with the prefill, so its KV is the prompt and the tokens since.
            since = max(produced - 1, 0)
            expected = max(int(this.expected_tokens - this.prompt_tokens), 1)
            while expected <= since:
                expected += (expected + 4) // 5
            left = min(expected - since, ending.size - 1)
            ending[0] += 1
            ending_tokens[0] += this.prompt_tokens + since
            ending[left] -= 1
            ending_tokens[left] -= this.prompt_tokens + since
        sequence = int(this.next)


@compiled
def project_engine(
    engines: EngineArrays,
    instance: int,
    ending: NDArray[np.int64],
    ending_tokens: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    """Write the KV tokens of *instance* in this and the coming iterations into *tokens*.

    Counts requests whose prefill is complete. The engine must be up to date (`loop.control`). *ending* and *ending_tokens*
    are scratch, at least one element longer than *tokens*.
    """
    engine: Any = engines.instances[instance]
    ending[:] = 0
    ending_tokens[:] = 0
    passed = int(engine.counted) if engine.phase == SEGMENT else 0
    _draw(engines, instance, int(engine.first_running), passed, ending, ending_tokens)
    _draw(engines, instance, int(engine.first_waiting), passed, ending, ending_tokens)
    active, at_now = 0, 0
    for i in range(tokens.size):
        active += ending[i]
        at_now += ending_tokens[i]
        tokens[i] = at_now + active * i


@compiled
def endpoint_outlook(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    engines: EngineArrays,
    ending: NDArray[np.int64],
    ending_tokens: NDArray[np.int64],
    tokens: NDArray[np.int64],
    overloaded: NDArray[np.int64],
    peak_sum: NDArray[np.float64],
    peak_most: NDArray[np.float64],
) -> None:
    """Write, by endpoint, the instances potentially overloaded, and the sum and maximum of their peaks, as KV use.

    Capacity is the engines', regardless of the dispatcher's limits. The other arrays are scratch, as in `project_engine`.
    """
    for endpoint in range(overloaded.size):
        overloaded[endpoint], peak_sum[endpoint], peak_most[endpoint] = 0, 0.0, 0.0
        first, last = endpoints.first[endpoint], endpoints.first[endpoint + 1]
        accepting = 0
        for at in range(first, last):
            accepting += fleet.accepting[endpoints.members[at]]
        for at in range(first, last):
            instance = int(endpoints.members[at])
            if fleet.accepting[instance] == 0:
                continue
            coming = tokens[: int(fleet.look_ahead[instance, ITERATIONS])]
            project_engine(engines, instance, ending, ending_tokens, coming)
            is_over, peak = look(fleet, instance, coming, waiting_tokens(waiting, endpoint) / accepting)
            overloaded[endpoint] += is_over
            peak_sum[endpoint] += peak
            peak_most[endpoint] = max(peak_most[endpoint], peak)
