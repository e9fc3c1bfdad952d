"""Which of the requests that ran where an engine ended is refused: by ends, trials and answers, on a clock of the test."""

from types import SimpleNamespace

import pytest

from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.port import Submit
from controlplane.dispatch.suspects import CHECK_S, TRIAL_S, Suspects
from controlplane.fleet.lifecycle.states import InstanceState

KILLER, BESIDE = 7, 8


def asked(fingerprint: int, number: int = 0) -> Submit:
    return Submit(number, "r", "m", "east", 1, 0, None, 0.0, 0.0, 10, 10.0, None, 1, True, fingerprint=fingerprint)


class World:
    def __init__(self):
        self.now_s = 0.0
        self.notices, self.placed = [], []
        tuned = SimpleNamespace(QUARANTINE_S=300.0)
        topology = SimpleNamespace(tuned=tuned, notices=self.notices, doubt=lambda replica: None)
        self.suspects = Suspects(topology, lambda: self.now_s, self.placed.append)
        self.instances = {}

    def instance(self, name, since=0.0, requests=()):
        spec = SimpleNamespace(model="m", instance_id=name, state_changed_at=since, state=InstanceState.READY)
        return SimpleNamespace(name=name, spec=spec, requests=set(requests))

    def request(self, fingerprint):
        return Request(asked(fingerprint), 10, None)

    def refused(self, fingerprint) -> bool:
        return self.suspects.refusal(asked(fingerprint)) is not None


@pytest.fixture
def world() -> World:
    return World()


def test_the_one_on_trial_is_refused_and_those_that_ran_with_it_are_not(world):
    killer, beside = world.request(KILLER), world.request(BESIDE)
    world.suspects.died(world.instance("a"), [KILLER, BESIDE])
    assert not world.refused(KILLER)
    world.suspects.wait_for_trial(beside)
    world.suspects.wait_for_trial(killer)
    assert world.placed == [beside], "one by one"
    world.suspects.tried(beside, cleared=False)  # its first token came; it runs on
    assert world.placed == [beside, killer]
    b = world.instance("b")
    world.suspects.died(b, [KILLER, BESIDE])
    world.suspects.died(b, [BESIDE])  # which hears of the same end a moment later, by its own broken connection
    assert (world.refused(KILLER), world.refused(BESIDE)) == (True, False)
    assert world.notices[0].inputs["instances"] == ["a", "b"]
    world.now_s = 301.0
    assert not world.refused(KILLER)


def test_an_answer_clears(world):
    request = world.request(KILLER)
    world.suspects.died(world.instance("a"), [KILLER])
    world.suspects.wait_for_trial(request)
    world.suspects.tried(request, cleared=True)
    world.suspects.died(world.instance("b"), [KILLER])
    assert not world.refused(KILLER), "identical requests run everywhere, and any two machines may end"


def test_where_none_was_on_trial_several_with_two_ends_are_not_refused_before_the_third(world):
    for name, refused in (("a", False), ("b", False), ("c", True)):
        world.suspects.died(world.instance(name), [KILLER, BESIDE])
        assert world.refused(KILLER) is refused
    world.suspects.died(world.instance("d"), [9])
    world.suspects.died(world.instance("e"), [9])
    assert world.refused(9), "it alone was there both times"


def test_a_trial_lasts_no_longer_than_it_may(world):
    first, second = world.request(KILLER), world.request(BESIDE)
    world.suspects.died(world.instance("a"), [KILLER, BESIDE])
    world.suspects.wait_for_trial(first)
    world.suspects.wait_for_trial(second)
    world.now_s = TRIAL_S
    world.suspects.sweep()
    assert world.placed == [first, second]


def test_a_connection_that_broke_proves_nothing_by_itself(world):
    request = world.request(KILLER)
    a = world.instance("a", requests=[request])
    for _ in range(3):
        assert world.suspects.was_cut(request, a, again=True)
        world.suspects.looked(a, world.now_s - 1.0, ended=False)  # a look that had begun before
        assert not world.placed
        world.suspects.looked(a, world.now_s, ended=False)
        assert world.placed.pop() is request
    assert not world.suspects.is_suspect(request.asked)
    assert world.suspects.was_cut(request, a, again=True)
    world.suspects.looked(a, world.now_s, ended=True)
    assert world.placed.pop() is request
    assert world.suspects.is_suspect(request.asked)


def test_it_waits_for_that_look_no_longer_than_it_may(world):
    request = world.request(KILLER)
    world.suspects.was_cut(request, world.instance("a"), again=True)
    world.now_s = CHECK_S
    world.suspects.sweep()
    assert world.placed == [request]


def test_one_that_is_being_stopped_proves_nothing(world):
    a = world.instance("a")
    a.spec.state = InstanceState.DRAINING
    assert not world.suspects.was_cut(world.request(KILLER), a, again=True)
