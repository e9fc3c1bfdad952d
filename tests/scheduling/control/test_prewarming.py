"""Which adapters are brought where, which ranks and models change with it, and what is counted; over a fleet of arrays."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.applications.demand_graph import ServiceRate
from scheduling.applications.prewarming import AGAIN_S, HERMES, OPEN_S, LikelyCall, Warmable
from scheduling.applications.standings import RunCall
from scheduling.control.prewarming import Prewarming
from scheduling.control.runs import Runs
from scheduling.control.system_prompts import PromptPrewarming
from scheduling.policy import EndpointPolicy
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, in_order
from scheduling.routing.adapters import IN_MEMORY, NOT_LOADED, ON_GPU, tier_of, use_adapter
from tests.scheduling.routing.test_adapters import fleet_of


class Fleet(SimpleNamespace):
    """Instances of one endpoint, and a queue in which requests for *adapters* wait."""

    def __init__(self, count, on_gpu, in_memory, *adapters, ordering="hermes"):
        instances, members = fleet_of(count, on_gpu, in_memory)
        super().__init__(instances=instances, members=members, now_s=0.0, asleep={}, any_cold=False, warmed=[])
        self.endpoints, self.standings = [SimpleNamespace(policy=EndpointPolicy(ordering=ordering))] * 2, {}
        self.wait(*adapters)

    def wait(self, *adapters, runs=()):
        self.waiting = allocate_waiting(2, 16)
        for at, (adapter, run) in enumerate(zip(adapters, runs or (-1,) * len(adapters), strict=True)):
            enqueue(self.waiting, 0, float(at), float(at), np.inf, 0, 10, 10, -1, -1, run, adapter)

    def warm(self, instance, target, leaves, *, again):
        self.warmed.append((instance, target.name, leaves, again))

    def sleeping(self):
        return self.asleep

    def row_at(self, slot):
        return slot

    def produced(self, rows=None):
        return lambda row: 0

    def record_standing(self, rows, standing):
        self.standings |= dict.fromkeys(rows, standing)


def prewarming_of(fleet, *likely, by=HERMES):
    """Return the prewarming of *fleet*, with *likely* calls of a run."""
    control = Prewarming(fleet, Runs(fleet, {}), by)
    control.runs.standings.by_number[0] = SimpleNamespace(number=-1, reports=0)
    control._likely[0] = 0, list(likely)
    return control


def warmed(control):
    """Return what is brought onto GPUs now."""
    control.fleet.warmed = []
    control._warm_adapters()
    return control.fleet.warmed


def test_what_waits_and_what_is_likely_soon_is_brought_onto_the_gpu():
    fleet = Fleet(1, 2, 4, 1, -1, 2, 1)
    soon, later = (LikelyCall(Warmable("adapter", number, 0), start_s) for number, start_s in ((3, 0.5), (4, 30.0)))
    assert [adapter for _, adapter, *_ in warmed(prewarming_of(fleet, soon, later))] == [3, 2, 1]
    assert [tier_of(fleet.instances, 0, adapter) for adapter in (1, 2, 3)] == [ON_GPU, ON_GPU, IN_MEMORY]


def test_it_goes_where_it_is_nearest_then_where_the_fewest_run():
    fleet = Fleet(3, 1, 2, 7)
    instances, control = fleet.instances, prewarming_of(fleet)
    instances.running[:] = 5, 1, 2
    assert warmed(control) == [(1, 7, -1, False)]
    assert warmed(control) == []  # it is there
    use_adapter(instances, 1, 8, 0)
    assert tier_of(instances, 1, 7) == IN_MEMORY
    assert warmed(control) == [(1, 7, -1, True)]
    instances.accepting[1] = 0
    assert [instance for instance, *_ in warmed(control)] == [2]


def test_used_and_wasted_adapters_are_counted():
    fleet = Fleet(1, 1, 2, 1, 2)
    control = prewarming_of(fleet)
    control._warm_adapters()
    for _ in range(2):
        control.placed(0, 1, None)
    for waits in ((3, 4), ()):
        fleet.wait(*waits)
        control._warm_adapters()
    assert dict(control.counts["adapter"]) == {"warmed": 4, "used": 1, "wasted": 1}


def test_adapters_in_use_are_not_pushed_out():
    fleet = Fleet(1, 2, 2, 3)
    for adapter in (1, 2):
        use_adapter(fleet.instances, 0, adapter, 1)
    assert warmed(prewarming_of(fleet)) == []
    assert tier_of(fleet.instances, 0, 3) == NOT_LOADED


def test_only_hermes_warms_for_likely_calls():
    fleet = Fleet(1, 2, 4, 1)
    prewarming_of(fleet, LikelyCall(Warmable("adapter", 3, 0), 0.0), by="epwq").act()
    assert [adapter for _, adapter, *_ in fleet.warmed] == [1]


@pytest.mark.parametrize(
    ("asked_s", "asleep_again", "now_s", "fate"),
    [(5.0, False, 9.0, "used"), (0.0, True, 9.0, "wasted"), (0.0, False, OPEN_S + 1.0, "wasted")],
)
def test_a_model_is_woken_once_for_likely_calls_until_one_has_used_it(asked_s, asleep_again, now_s, fate):
    fleet = Fleet(1, 1, 2)
    fleet.asleep, likely = {0: 5.0}, LikelyCall(Warmable("model", "m", 0), 0.0)
    control = prewarming_of(fleet, likely)
    control.sleeping = fleet.asleep
    assert control.wakes(0) is likely
    control.woken(0)
    fleet.asleep, fleet.now_s = {}, 2.0
    control.act()
    assert dict(control.counts["model"]) == {"warmed": 1, "used": 0, "wasted": 0}
    fleet.members.asked_at_s[0], fleet.now_s, fleet.asleep = asked_s, now_s, {0: 5.0} if asleep_again else {}
    control.act()
    assert dict(control.counts["model"]) == {"warmed": 1, "used": 0, "wasted": 0} | {fate: 1}
    control._likely[0] = 0, [likely]
    assert control.wakes(0) is (likely if now_s >= AGAIN_S else None)


def test_the_rank_of_a_run_changes_the_keys_of_what_waits_of_it_alone():
    fleet = Fleet(1, 1, 2)
    runs, rate = Runs(fleet, {}), ServiceRate(0.0, 0.0, 1.0)
    for number, row in enumerate((8, 9)):
        runs.arrive(RunCall(row, "a", number, "write", 0, 5, rate), 0.0)
    fleet.wait(-1, -1, -1, runs=(0, 1, 0))
    before = fleet.waiting.key[:3].tolist()
    assert runs.rank(runs.standings.by_number[0])
    after = fleet.waiting.key[:3].tolist()
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False, True]
    assert in_order(fleet.waiting, 0).tolist() == [1, 0, 2]
    assert set(fleet.standings) == {0, 2, 8, 9}
    assert not runs.rank(runs.standings.by_number[0]), "nothing has changed"


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), max_size=60))
def test_prompts_take_no_more_than_their_share_of_an_instance(asked):
    fleet = Fleet(3, 1, 2)
    fleet.instances.running[:] = 1, 1, 0
    prompts, spent_s = PromptPrewarming(fleet), 0.0
    for after_s, takes_s in asked:
        fleet.now_s += after_s
        if prompts._spend(0, takes_s, 0.05):
            assert spent_s < 0.05 * (30.0 + fleet.now_s) + 1e-6
            spent_s += takes_s
    assert prompts._spend(1, 1.5, 0.05), "another instance has its whole share"
    assert not prompts._spend(1, 0.1, 0.05)
    assert all(prompts._spend(2, 1.5, 0.05) for _ in range(3)), "an idle instance loses nothing"
    assert not PromptPrewarming(fleet)._spend(0, 0.1, 0.0)
