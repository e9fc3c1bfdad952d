"""What an instance that fails takes with it: its engine is emptied, and its requests are handed back."""

from typing import Any

import numpy as np

from scheduling.lookahead.maps import leave
from scheduling.routing.routers import prefilled, release
from scheduling.simulation.cluster.event_queue import reset_time
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.prefix_cache import clear_cache
from scheduling.simulation.engine.state import FREE_SEQUENCES, IDLE, LEAVING, NONE, SEGMENT


def _recall(world: World, instance: int) -> int:
    """Take those on their way to *instance* off it; the first of a list of them, NONE for none."""
    endpoint, sequences = int(world.fleet.endpoint[instance]), world.engines.sequences
    at = int(world.sent[0, endpoint])
    kept: list[int] = []
    mine: list[int] = []
    while at != NONE:
        (mine if sequences[at]["instance"] == instance else kept).append(at)
        at = int(sequences[at]["next"])
    for each in (kept, mine):
        for one, following in zip(each, [*each[1:], NONE], strict=False):  # none of none
            sequences[one]["next"] = following
    if mine:
        world.sent[:, endpoint] = (kept[0], kept[-1]) if kept else NONE
        node = 2 * world.fleet.endpoint.size + world.link.shape[1] + world.sent.shape[1] + endpoint
        reset_time(world.events, node, float(sequences[kept[0]]["reaches_s"]) if kept else np.inf)
    return mine[0] if mine else NONE


def take_out(world: World, instance: int) -> list[tuple[int, int]]:
    """Empty *instance*; its requests, and how many tokens of each came out of it, in order of admission, then of queue key.

    Last those that are on their way there.

    The fleet arrays must be up to the moment.
    """
    engines = world.engines
    engine: Any = engines.instances[instance]
    iteration = int(engine.iteration + (engine.counted if engine.phase == SEGMENT else 0))
    lost: list[tuple[int, int]] = []
    for first in (int(engine.first_running), int(engine.first_waiting), _recall(world, instance)):
        at = first
        while at != NONE:
            this: Any = engines.sequences[at]
            produced = iteration + int(this.offset) if this.decoding else int(this.produced_tokens)
            lost.append((int(this.request), produced if this.streaming else 0))
            counted = int(this.prompt_tokens) + produced if this.streaming else 0
            release(world.fleet, instance, int(this.expected_tokens), counted)
            if not this.streaming:
                prefilled(world.fleet, instance, int(this.expected_prompt))
            if engines.ahead.clock.size > 0:
                leave(engines.ahead, at)
            engines.free_sequences[engines.counters[FREE_SEQUENCES]] = at
            engines.counters[FREE_SEQUENCES] += 1
            at = int(this.next)
    engines.counters[LEAVING] -= engine.leaving
    engine.leaving = 0
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
