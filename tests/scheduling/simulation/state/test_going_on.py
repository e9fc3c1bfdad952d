"""A simulation that begins with the state of another goes on as that one does: every decision, and times to rounding.

What is in progress begins anew with the state, so that the end of its iterations is another sum of the same numbers.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Pause, Simulation
from tests.examples import at_night_but, costly
from tests.oracles.fleet import Command
from tests.oracles.simulation_state import coming_after, state_of
from tests.scheduling.simulation.cluster.drawn import LOADS, Drawn, scenarios
from tests.scheduling.simulation.small import cluster, instance

FEW = settings(deadline=None, max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(costly(40), suppress_health_check=list(HealthCheck), print_blob=True)
MANY_OF_EACH = settings(costly(8), suppress_health_check=list(HealthCheck), print_blob=True)
KINDS = [kind for kind, load in LOADS.items() if not load.prefixes]
POLICIES = {
    "fcfs": {"ordering": "fcfs"},
    "ssjf": {"ordering": "ssjf", "routing": "join_shortest_queue"},
    "preserve": {"ordering": "slack", "routing": "preserve"},
    "qlm": {"ordering": "qlm", "routing": "join_shortest_queue", "group_batches": 0.5},
}
CLOSE_S = 1e-9
TIMES = ("ttft_s", "e2e_s", "queue_s")
REST = ("instance", "endpoint", "preemptions", "attempts", "evictions", "state")


def command(simulation: Simulation, commands: tuple[Command, ...]) -> None:
    """Carry out what of *commands* makes sense."""
    for each in commands:
        if simulation.advance(each.time_s) == Pause.DONE:
            break
        try:
            getattr(simulation, each.name)(*each.arguments)
        except ValueError:
            continue


def finish(simulation: Simulation, commands: tuple[Command, ...]) -> str:
    """Run to the end; what stopped it."""
    command(simulation, commands)
    try:
        simulation.run()
    except RuntimeError as error:
        return str(error)
    return ""


def same_but_for_rounding(rows: np.ndarray, others: np.ndarray) -> None:
    """Rows of two logs are equal, `time_s` within `CLOSE_S`."""
    assert len(rows) == len(others)
    names = [name for name in rows.dtype.names if name != "time_s"]
    assert rows[names].tolist() == others[names].tolist()
    np.testing.assert_allclose(rows["time_s"], others["time_s"], rtol=0, atol=CLOSE_S)


def goes_on(drawn: Drawn, at_s: float) -> Counter[str]:
    """What *drawn* held at *at_s*, after a check that a simulation which begins there does what the whole one does."""
    before = tuple(each for each in drawn.commands if each.time_s < at_s)
    later = tuple(each for each in drawn.commands if each.time_s >= at_s)
    whole = Simulation(drawn.cluster, drawn.requests, seed=drawn.seed, decisions=True)
    command(whole, before)
    if whole.advance(max(at_s, whole.now_s)) == Pause.DONE:
        return Counter()
    state, coming = state_of(whole), coming_after(whole)
    decided, changed = int(whole.world.run_state[0].decisions), int(whole.world.run_state[0].changes)
    second = Simulation(drawn.cluster, coming, seed=drawn.seed, decisions=True, state=state)
    loads = ("running", "kv_tokens", "remaining_tokens", "queued_prompt_tokens", "accepting")
    for name in loads:
        np.testing.assert_array_equal(getattr(second.fleet, name), getattr(whole.fleet, name), err_msg=name)
    for name in ("serving", "largest_kv_tokens", "scaled_s", "batch_opened_s"):
        np.testing.assert_array_equal(second.world.policies[name], whole.world.policies[name], err_msg=name)
    for name in whole.world.lives.instances.dtype.names:
        np.testing.assert_array_equal(
            second.world.lives.instances[name], whole.world.lives.instances[name], err_msg=name
        )
    for name in ("target", "held_bytes"):
        np.testing.assert_array_equal(second.world.lives.groups[name], whole.world.lives.groups[name], err_msg=name)
    np.testing.assert_array_equal(second.world.events.time_s, whole.world.events.time_s)
    rows = np.arange(drawn.requests.count - coming.count, drawn.requests.count)
    held = np.flatnonzero(np.isin(whole.world.outcomes["state"][: rows[0] if rows.size else None], (0, 1)))
    held = held[held < drawn.requests.count - coming.count]
    rows = np.concatenate([held, rows])
    row = {int(request): at for at, request in enumerate(rows)}
    same = tuple(
        each._replace(arguments=(row[each.arguments[0]],)) if each.name == "evict" else each
        for each in later
        if each.name != "evict" or each.arguments[0] in row
    )
    assert finish(second, same).partition(" ")[2] == finish(whole, later).partition(" ")[2]
    one, other = whole.result(), second.result()
    for name in REST:
        np.testing.assert_array_equal(other.outcomes[name], one.outcomes[name][rows], err_msg=name)
    for name in TIMES:
        np.testing.assert_allclose(other.outcomes[name], one.outcomes[name][rows], rtol=0, atol=CLOSE_S, err_msg=name)
    assert one.decisions is not None
    assert other.decisions is not None
    log = other.decisions.copy()
    log["request"] = rows[log["request"]]
    same_but_for_rounding(log, one.decisions[decided:])
    same_but_for_rounding(other.changes, one.changes[changed:])
    assert not second.fleet.kv_tokens.any() or not (other.outcomes["state"] == Outcome.DONE).all()
    kinds = Counter(each.where for instance in state.instances for each in instance.requests)
    kinds["decoding"] = sum(each.decoding for instance in state.instances for each in instance.requests)
    kinds["held"] = len(state.waiting)
    kinds["groups"] = len(state.groups.groups) if state.groups else 0
    kinds["travelling"] = len(state.travelling)
    kinds["changing"] = sum(State(each.state) not in (State.READY, State.SPOT, State.EMPTY) for each in state.instances)
    return kinds


def every_one_goes_on(kind: str, how: settings, policies: dict[str, object] | None = None) -> Counter[str]:
    seen: Counter[str] = Counter()

    @how
    @given(scenarios(kind), st.floats(0.05, 1.0))
    def of_kind(drawn: Drawn, share: float) -> None:
        if policies:
            drawn = replace(drawn, cluster=replace(drawn.cluster, **policies, reactive=drawn.cluster.reactive))
        seen.update(goes_on(drawn, share * float(drawn.requests.arrival_s[-1])))

    of_kind()
    return seen


@pytest.mark.parametrize("kind", at_night_but(("evictions", "lives"), KINDS))
def test_goes_on_as_the_whole_does(kind):
    seen = every_one_goes_on(kind, FEW)
    assert seen["decoding"]
    if kind in ("lives", "scaling"):
        assert seen["changing"]


@pytest.mark.parametrize("policies", at_night_but(("qlm",), POLICIES))
def test_goes_on_under_each_policy(policies):
    seen = every_one_goes_on("overload", FEW, POLICIES[policies])
    assert seen["held"]
    assert seen["decoding"]
    if policies == "qlm":
        assert seen["groups"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_go_on(kind):
    every_one_goes_on(kind, MANY)


@pytest.mark.nightly
@pytest.mark.parametrize("policies", POLICIES)
def test_many_more_go_on_under_each_policy(policies):
    for kind in KINDS:
        every_one_goes_on(kind, MANY_OF_EACH, POLICIES[policies])


def test_a_state_of_another_fleet_is_refused():
    from scheduling.simulation.workload.requests import make_requests

    requests = make_requests([0.0, 1.0], [10, 10], [5, 5])
    simulation = Simulation(cluster(instance()), requests)
    simulation.advance(0.5)
    state = state_of(simulation)
    with pytest.raises(ValueError, match="not one of a fleet of 2"):
        Simulation(cluster(instance(), instance()), coming_after(simulation), state=state)
