"""What an instance that fails takes with it: its engine is emptied, and its requests are handed back."""

from typing import Any

import numpy as np

from scheduling.lookahead import leave
from scheduling.routing import prefilled, release
from scheduling.simulation.events import reset_time
from scheduling.simulation.prefixes import clear_cache
from scheduling.simulation.state import FREE_SEQUENCES, IDLE, NONE, SEGMENT
from scheduling.simulation.world import World


def take_out(world: World, instance: int) -> list[tuple[int, bool]]:
    """Empty *instance*; its requests, and whether a token of each had come out, in order of admission, then of turn.

    The fleet arrays must be up to the moment.
    """
    engines = world.engines
    engine: Any = engines.instances[instance]
    iteration = int(engine.iteration + (engine.counted if engine.phase == SEGMENT else 0))
    lost = []
    for first in (int(engine.first_running), int(engine.first_waiting)):
        at = first
        while at != NONE:
            this: Any = engines.sequences[at]
            lost.append((int(this.request), bool(this.streaming)))
            produced = iteration + int(this.offset) if this.decoding else int(this.produced_tokens)
            told = int(this.prompt_tokens) + produced if this.streaming else 0
            release(world.fleet, instance, int(this.expected_tokens), told)
            if not this.streaming:
                prefilled(world.fleet, instance, int(this.expected_prompt))
            if engines.ahead.clock.size > 0:
                leave(engines.ahead, at)
            engines.free_sequences[engines.counters[FREE_SEQUENCES]] = at
            engines.counters[FREE_SEQUENCES] += 1
            at = int(this.next)
    engine.phase = IDLE
    engine.next_s = np.inf
    engines.exceeding[instance] = 0
    for name in ("running", "waiting", "decoding", "within", "context_tokens"):
        engine[name] = 0
    for name in ("partial", "joining", "first_running", "last_running", "first_waiting", "last_waiting"):
        engine[name] = NONE
    engine.free_blocks = engine.kv_blocks
    engines.residues[instance] = 0
    clear_cache(engines, instance)
    reset_time(world.events, instance, np.inf)
    return lost
