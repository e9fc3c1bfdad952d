"""Two models that share GPUs, on the dispatcher: one virtual queue, whose first group says which model is swapped to."""

import math
from functools import partial

import pytest
from msgspec.structs import replace

from controlplane.dispatch.live_fleet.inventory import (
    EndpointSpec,
    InstanceSpec,
    Inventory,
    ModelSpec,
    SwapGroupSpec,
    SwapMemberSpec,
)
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.tuning.selectors import Values
from scheduling.control.swaps import REFUSED_S, RETRY_S, Swaps
from scheduling.policy import live_policy
from tests.dispatch.test_reordering import Served

S = InstanceState
MODELS = {1: "a", 2: "b"}
"""By instance; each runs one request at a time."""
SWAP_S = 2.0


class Pair(Served):
    """*clock* is the dispatcher's, and the time of day too."""

    def __init__(self, ordering="qlm"):
        self.target, self.rows = None, {}
        self.states = {1: S.READY, 2: S.SLEEPING}
        self.since_s = {1: 0.0, 2: 0.0}
        super().__init__(ordering)
        self.dispatcher.fleet.wall_clock = lambda: self.now_s
        self.now_s = 100.0
        self.swaps = Swaps(self.dispatcher.fleet)

    def policy(self, tuned):
        policy = live_policy(partial(getattr, tuned))
        return replace(policy, ordering=self.ordering, queue_bound=1000, requests_ahead_limit=0)

    def apply(self, ordering="", *_):
        self.ordering, values = ordering or self.ordering, Values(self.rows)
        self.dispatcher.apply_inventory(
            Inventory(
                models={model: ModelSpec(model, 4096, 0) for model in MODELS.values()},
                endpoints=tuple(
                    EndpointSpec(model, "east", self.policy(values.of(model)), shares_gpus=True, tuned=values.of(model))
                    for model in MODELS.values()
                ),
                instances=tuple(
                    InstanceSpec(number, f"i{number}", f"http://127.0.0.1:1/{number}", self.states[number], 0.0,
                                 model, "east", "", 1, 4096, swap_group="pair")
                    for number, model in MODELS.items()
                ),
                values=values,
                swap_groups=(
                    SwapGroupSpec("pair", tuple(
                        SwapMemberSpec(number, f"i{number}", model, "east", self.states[number], self.since_s[number],
                                       SWAP_S, SWAP_S / 2, SWAP_S / 2)
                        for number, model in MODELS.items()
                    ), self.target),
                ),
            )
        )  # fmt: skip
        self.dispatcher.pump_all()

    def ask(self, model, due_s):
        self.model = model
        return super().ask(due_s)

    def state(self, target=None, **states):
        self.states |= {int(name[1:]): state for name, state in states.items()}
        self.since_s |= {int(name[1:]): self.now_s for name in states}
        self.target = target
        self.apply()

    def look(self, after_s=1.0):
        self.now_s += after_s
        self.dispatcher.sweep()
        return [(self.topology.by_slot[slot].spec.instance_id, why) for slot, why in self.swaps.wanted()]

    def order(self):
        arrays, models = self.dispatcher.queue.arrays.groups, []
        group = int(arrays.queues["first"][self.topology.replicas[1].slot])
        while group >= 0:
            models.append(MODELS[1 + int(arrays.groups["endpoint"][group])])
            group = int(arrays.groups["following"][group])
        return models


@pytest.fixture
def pair():
    return Pair()


def test_an_impossible_swap_does_not_block_the_awake_instance(pair):
    pair.ask("a", 600.0)
    pair.ask("b", 0.5)
    own = pair.ask("a", 600.0)
    assert pair.look()[0][0] == 2
    pair.finish()
    assert pair.order()[0] == "b", "it is given nothing more"
    assert pair.look(RETRY_S + 0.5) == []
    assert pair.placed[-1].number == own
    assert pair.look() == []
    assert pair.look(REFUSED_S)[0][0] == 2


@pytest.mark.parametrize("ordering", ["qlm", "fcfs"])
def test_a_swap_that_is_over_before_the_next_look_was_made(ordering):
    """The swap is neither refused nor waited for: the next one is requested as soon as it is needed."""
    pair = Pair(ordering)
    other = pair.ask("b", 600.0)
    assert pair.look()[0][0] == 2
    pair.state(i1=S.SLEEPING, i2=S.READY)
    assert pair.placed[-1].number == other
    pair.finish()
    waits = pair.ask("a", 600.0)
    assert pair.look()[0][0] == 1
    pair.state(i2=S.SLEEPING, i1=S.READY)
    assert pair.placed[-1].number == waits


@pytest.mark.parametrize("change", ["the order is another", "the floor is off", "swaps by queue are off", "it failed"])
def test_without_swaps_by_queue_each_has_its_own(pair, change):
    arrays = pair.dispatcher.queue.arrays.groups
    slots = [replica.slot for replica in pair.topology.replicas.values()]
    assert len(set(arrays.queue_of[slots].tolist())) == 1
    pair.ask("b", 60.0)
    match change:
        case "the order is another":
            pair.ordering = "fcfs"
        case "the floor is off":
            pair.rows = {"": {"FLOOR": False}}
        case "swaps by queue are off":
            pair.rows = {"b": {"SWAP_BY_QUEUE": False}}
        case _:
            pair.states[2] = S.FAILED
    pair.apply()
    arrays = pair.dispatcher.queue.arrays.groups
    assert arrays.queue_of.tolist() == list(range(arrays.queue_of.size))
    assert all(math.isinf(seconds) for seconds in arrays.swap_s)
    if change in ("the order is another", "swaps by queue are off"):
        assert pair.look()[0][0] == 2, "on demand"


def test_swaps_by_queue_are_switched_off_and_on_while_requests_wait(pair):
    pair.ask("a", 600.0)
    pair.ask("a", 600.0)
    pair.ask("b", 600.0)
    assert pair.order() == ["a", "b"]
    pair.rows = {"": {"SWAP_BY_QUEUE": False}}
    pair.apply()
    assert pair.order() == ["a"], "b has a queue of its own"
    pair.rows = {}
    pair.apply()
    assert pair.order() == ["a", "b"]
    pair.finish()
    pair.finish()
    assert not pair.placed
    assert pair.look()[0][0] == 2
