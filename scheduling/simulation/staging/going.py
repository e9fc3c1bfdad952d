"""What the engines of a forked fleet are at: each goes on with the iteration that it was in."""

from collections.abc import Container, Mapping
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.staging.iterations import Prompt, replay
from scheduling.simulation.state.records import InstanceState, Running, Where


def set_going(
    instance: InstanceState,
    engine: EngineConfig,
    row: Mapping[str, Any],
    prompt_tokens: NDArray[np.int32],
    trip_s: float,
    random: np.random.Generator,
    guessed: Container[int] = (),
) -> None:
    """Note when the *engine* of *instance*, *row* of a fork, began its iteration, and how much of prompts it has computed.

    It began as the last one ended, if anybody saw that; else it is drawn by what it has and what takes how long.
    *prompt_tokens* are those of the requests that it has, *trip_s* is a dispatch round trip. Of
    the requests *guessed* nobody knows how many tokens they have.
    """
    running = [one for one in instance.requests if one.where is Where.RUNNING]
    pending = [one for one in instance.requests if one.where is Where.WAITING]
    if not running and not pending:
        return
    pending.sort(key=lambda one: _key(engine, one))
    begun, come = (tuple(_prompt(one, prompt_tokens) for one in each) for each in (running, pending))
    computed: tuple[int, ...] = (0,) * len(come)
    context = sum(one.tokens + one.produced for one in begun)
    ended_s = row.get("iteration_s")
    if ended_s is not None or not running:
        gone = tuple(
            Prompt(prompt, at_s + trip_s, output, end_s) for at_s, end_s, prompt, output in row.get("ended", ())
        )
        seen_s, unknown = -inf if ended_s is None else float(ended_s), any(one.request in guessed for one in running)
        begins_s, computed = replay(engine, begun, come, gone, seen_s, unknown)
    else:
        decode_s = engine.profile.step_time_s(0, len(running), context)
        first_s = min((one.reaches_s for one in come), default=None)
        begins_s = -float(random.uniform(0.0, 1.0)) * decode_s if first_s is None else first_s + decode_s / 2
    for one, tokens in zip(pending, computed, strict=True):
        if tokens:
            one.where, one.prefilling, one.computed_tokens = Where.RUNNING, True, tokens
    # Those that run come first, and of them the one that is half prefilled last, for it was admitted last.
    instance.requests.sort(key=lambda one: (one.where is not Where.RUNNING, one.where is Where.SENT, one.prefilling))
    # It is not over: who is late by more than an iteration takes ends it at once.
    left = sum(one.tokens - tokens for one, tokens in zip(come, computed, strict=True) if one.reaches_s <= begins_s)
    step_s = engine.profile.step_time_s(min(left, engine.max_num_batched_tokens - len(running)), len(running), context)
    instance.begins_s = float(np.clip(begins_s, -0.999 * step_s, -1e-6))


def _prompt(one: Running, prompt_tokens: NDArray[np.int32]) -> Prompt:
    return Prompt(int(prompt_tokens[one.request]), one.reaches_s, one.produced_tokens)


def _key(engine: EngineConfig, one: Running) -> tuple[float, float, int]:
    """What the engine's own queue orders *one* by."""
    return one.priority if engine.policy == "priority" else 0, one.reaches_s, one.number
