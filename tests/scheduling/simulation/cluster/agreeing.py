"""One scenario, both engines: what they must agree on."""

import numpy as np

from scheduling.simulation.engine.reference import _Sequence
from scheduling.simulation.result import Result
from scheduling.simulation.simulator import Pause, Simulation
from tests.oracles.fleet import ReferenceFleet
from tests.scheduling.simulation.cluster.drawn import Drawn
from tests.scheduling.simulation.engine.engines import idle_contents

CLOSE_S = 1e-6


def reference(drawn: Drawn) -> tuple[ReferenceFleet, str]:
    """Return the reference after its run, and the error that stopped it."""
    fleet = ReferenceFleet(drawn.cluster, drawn.requests, drawn.seed)
    try:
        fleet.run(drawn.commands)
    except RuntimeError as error:
        return fleet, str(error)
    return fleet, ""


def compiled(drawn: Drawn) -> tuple[Simulation, Result, list[int], str]:
    """Return the simulation, its result, the commands it refused, and the error that stopped it."""
    simulation = Simulation(drawn.cluster, drawn.requests, seed=drawn.seed, decisions=True)
    refused = []
    for number, command in enumerate(drawn.commands):
        if simulation.advance(command.time_s) == Pause.DONE:
            break
        try:
            getattr(simulation, command.name)(*command.arguments)
        except ValueError:
            refused.append(number)
    stopped = ""
    try:
        simulation.run()
    except RuntimeError as error:
        stopped = str(error).partition(":")[0]
    return simulation, simulation.result(), refused, stopped


def cached_in_order(simulation: Simulation, instance: int) -> list[int | None]:
    """Return the hashes of its idle cached blocks in order of reuse; None for those that only one request could find."""
    engines = simulation.world.engines
    cache, at = engines.cache, int(engines.instances[instance]["oldest_idle"])
    cached: list[int | None] = []
    while at != -1:
        block = cache.blocks[instance, at]
        assert block["holders"] <= 0
        cached += (
            [int(block["number"])] if block["holders"] == 0 and block["owner"] == -1 else [None] * int(block["count"])
        )
        at = int(block["newer"])
    assert len(cached) == engines.instances[instance]["idle_blocks"]
    return cached


def agree(drawn: Drawn) -> tuple[ReferenceFleet, Result]:
    """Run *drawn* on both; AssertionError where they differ."""
    fleet, why = reference(drawn)
    simulation, result, refused, stopped = compiled(drawn)
    assert stopped == why, (stopped, why)
    assert refused == fleet.refused, (refused, fleet.refused)
    expected = fleet.outcomes
    for name in ("ttft_s", "e2e_s", "queue_s"):
        np.testing.assert_allclose(result.outcomes[name], expected[name], rtol=0, atol=CLOSE_S, err_msg=name)
    for name in ("instance", "endpoint", "preemptions", "attempts", "evictions", "state", "cached_tokens"):
        np.testing.assert_array_equal(result.outcomes[name], expected[name], err_msg=name)
    decided = [(request, endpoint, instance) for _, request, endpoint, instance in fleet.decisions]
    assert [tuple(row) for row in result.decisions[["request", "endpoint", "instance"]].tolist()] == decided
    for name in ("prefix_queried_tokens", "prefix_hit_tokens"):
        assert result.counters[name] == fleet.lives.total(name), name
    assert [tuple(row)[1:] for row in result.changes.tolist()] == [change[1:] for change in fleet.lives.changes]
    np.testing.assert_allclose(
        [row["time_s"] for row in result.changes], [change[0] for change in fleet.lives.changes], rtol=0, atol=CLOSE_S
    )
    if not stopped:
        # Whatever was placed was released.
        loads = simulation.fleet
        for left in (loads.running, loads.kv_tokens, loads.remaining_tokens, loads.queued_prompt_tokens):
            assert not left.any()
        assert not simulation.world.engines.ahead.active.any()
        engines = simulation.world.engines
        np.testing.assert_array_equal(engines.instances["free_blocks"], engines.instances["kv_blocks"])
    for server in fleet.lives.servers:
        idle = idle_contents(server.engine._pool)
        shared = [None if isinstance(each, tuple) and isinstance(each[0], _Sequence) else each for each in idle]
        assert cached_in_order(simulation, server.number) == shared
    return fleet, result
