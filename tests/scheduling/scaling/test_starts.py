"""Starts that nobody needs any longer are cancelled: by one rule, under both clocks."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.scaling import Reactive, make_strategy
from scheduling.scaling.starts import AGAIN_S, AIM, cancelled, needed
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.strategies import Bounds
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.scaling.running import run_strategy
from tests.scheduling.scaling.views import advice, view, views

LIVE = sorted({"reactive", "lt_i", "lt_u", "lt_ua", "proactive", "hybrid", "preserve", "pilothouse", "floor"})
PATIENCE_S = Reactive(patience_s=60.0).patience_s
START_S = 900.0
GPUS = 8
ENGINE = EngineConfig(16, 2048, 16, 4000, "fcfs", 2000, Profile(0.01, 0.0, 1e-4, 0.0, 0.02, 1e-3, 1e-6))


def over(seconds: int, memory: dict, **changes) -> list[int]:
    """Return what is cancelled at looks every 15 s at one view with *changes*."""
    return [cancelled(view(**changes), 15.0 * at, memory, PATIENCE_S)[0] for at in range(seconds // 15 + 1)]


# When


@given(views, st.integers(0, 12), st.floats(0, 1e5))
def test_only_if_the_rest_serves_the_demand(seen, kept, since_s):
    seen = seen._replace(since_change_s=inf)
    memory: dict[str, float] = {}
    for now_s in (since_s, since_s + 30.0, since_s + PATIENCE_S):
        spare, why = cancelled(seen, now_s, memory, PATIENCE_S, kept=kept)
    rest = seen.instances + spare
    assert -seen.coming <= spare <= 0
    assert bool(spare) == bool(why)
    if spare:
        assert rest >= max(seen.min_instances, kept, 1)
        assert (
            seen.use * seen.ready <= AIM * rest + 1e-6 if seen.ready else seen.waiting <= rest * seen.requests_at_once
        )
        assert not (seen.waiting and seen.short_instances)
        assert needed(seen._replace(coming=seen.coming + spare), kept) <= rest  # what is left is needed, or is ready


def test_after_patience_and_not_at_once():
    assert over(60, {}, ready=1, min_instances=1, coming=5, use=0.05) == [0, 0, 0, 0, -5]


def test_the_fewest_that_were_spare_meanwhile():
    memory: dict[str, float] = {}
    uses = [0.05, 0.05, 1.4, 0.05, 0.05]
    made = [
        cancelled(view(ready=1, min_instances=1, coming=5, use=use), 15.0 * at, memory, PATIENCE_S)[0]
        for at, use in enumerate(uses)
    ]
    assert made == [0, 0, 0, 0, -3]


@pytest.mark.parametrize(
    "changes",
    [
        {"use": 1.5},  # the rest would be full
        {"waiting": 3, "short_instances": 2},  # no order of what waits is in time
        {"ready": 0, "use": inf, "waiting": 9},  # what waits may fill them all
        {"min_instances": 6},
        {"since_change_s": 30.0},
        {"coming": 0},
    ],
)
def test_what_is_kept(changes):
    assert not any(over(300, {}, **{"ready": 1, "min_instances": 1, "coming": 2, "use": 0.05, **changes}))


def test_what_a_plan_wants_is_kept():
    seen = view(ready=1, min_instances=1, coming=3, use=0.05)
    for wanted, made in ((4, 0), (2, -2)):
        memory: dict[str, float] = {}
        assert [cancelled(seen, 60.0 * at, memory, PATIENCE_S, kept=wanted)[0] for at in range(2)] == [0, made]


def test_what_is_asked_for_again_is_left_to_finish():
    memory: dict[str, float] = {}
    seen = view(ready=1, min_instances=1, coming=5, use=0.05)
    assert over(60, memory, ready=1, min_instances=1, coming=5, use=0.05)[-1] == -5
    again = [cancelled(seen._replace(changed_delta=1), 60.0 + 15.0 * at, memory, PATIENCE_S)[0] for at in range(200)]
    first = next(at for at, made in enumerate(again) if made)
    assert 15.0 * first >= AGAIN_S  # by then the instances of the second burst are ready, or nobody wants them


# In the scene of a burst that is over while its instances start


def burst(seconds: float, rate: float, idle_rate: float, until_s: float):
    random = np.random.default_rng(5)
    calm = np.cumsum(random.exponential(1 / idle_rate, int(until_s * idle_rate)))
    busy = 60.0 + np.cumsum(random.exponential(1 / rate, int(seconds * rate)))
    arrival_s = np.sort(np.concatenate([calm, busy]))
    return make_requests(arrival_s, np.full(arrival_s.size, 300), np.full(arrival_s.size, 150))


def fleet(places: int = 6) -> Cluster:
    specs = [InstanceSpec("m", "r", ENGINE, state=State.READY if not at else State.EMPTY) for at in range(places)]
    return Cluster(specs, delays=Delays(start_s=60.0, local_weights_s=START_S - 60.0, remote_weights_s=START_S - 60.0))


def gpu_minutes(result) -> float:
    spent = result.state_s.sum(axis=0)
    return (
        GPUS / 60 * float(sum(spent[state] for state in (State.STARTING, State.LOADING, State.READY, State.DRAINING)))
    )


@pytest.mark.parametrize("name", LIVE)
def test_a_burst_of_four_minutes_and_a_start_of_fifteen(name):
    requests = burst(240.0, 4.0, 0.2, 3600.0)

    class Plan:
        def advise(self, now_s, seen):
            return [advice(1, until=1e9) for _ in seen]

    strategy = make_strategy(name)
    result = run_strategy(
        fleet(), requests, strategy, bounds=Bounds(1, 6), advisor=Plan() if strategy.uses_advice else None
    )
    asked = sum(move.done for move in result.moves if move.done > 0)
    ends = [move for move in result.moves if move.done < 0]
    assert asked == 5
    assert sum(move.done for move in ends) == -asked, "once each"
    assert all("cancelled while starting" in move.reason for move in ends)
    served_s = float((requests.arrival_s + result.outcomes["e2e_s"])[requests.arrival_s < 300.0].max())
    assert max(move.time_s for move in ends) <= served_s + 4 * PATIENCE_S
    assert result.state_s[1:, State.READY].sum() == 0.0
    assert gpu_minutes(result) < GPUS * (60.0 + asked * START_S / 60.0) / 1.3
