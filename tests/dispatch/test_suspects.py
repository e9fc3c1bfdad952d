"""Which of the requests that ran where an engine ended is refused: by ends and answers, on a clock of the test."""

from types import SimpleNamespace

import pytest

from controlplane.dispatch.port import CUT, Asked, Left
from controlplane.dispatch.suspects import Suspects
from controlplane.fleet.lifecycle.states import InstanceState

KILLER, BESIDE = 7, 8
CUT_OFF = Left(0, again=True, failure=CUT)


def request(fingerprint: int) -> SimpleNamespace:
    submit = Asked(0, "r", "m", "east", 1, 0, None, 0.0, 0.0, 10, 10.0, None, 1, True, fingerprint=fingerprint)
    return SimpleNamespace(asked=submit)


class Instance(SimpleNamespace):
    __hash__ = object.__hash__


class World:
    def __init__(self, instances: str = "abcdef"):
        self.now_s, self.notices = 0.0, []
        self.replicas = {name: self._replica(name) for name in instances}
        topology = SimpleNamespace(
            tuned=SimpleNamespace(QUARANTINE_S=300.0), notices=self.notices, replicas=self.replicas,
            members=lambda endpoint: self.replicas.values(),
        )  # fmt: skip
        self.suspects = Suspects(topology, lambda: self.now_s)

    @staticmethod
    def _replica(name):
        spec = SimpleNamespace(model="m", instance_id=name, state_changed_at=0.0, state=InstanceState.READY)
        return Instance(name=name, spec=spec, requests=[], reachable=True, lost="", endpoint=None)

    def die(self, name: str, *fingerprints: int) -> None:
        replica = self.replicas[name]
        replica.lost, replica.requests = "its engine died", [request(each) for each in fingerprints]
        self.suspects.died(replica)

    def refused(self, fingerprint: int) -> bool:
        return self.suspects.refusal(request(fingerprint).asked) is not None


@pytest.mark.parametrize(
    ("instances", "ends", "refused"),
    [
        ("abcdef", {"a": [KILLER]}, set()),
        ("abcdef", {"a": [KILLER, BESIDE], "b": [KILLER, 9]}, {KILLER}),
        ("abcdef", {"a": [KILLER, BESIDE], "b": [KILLER, BESIDE]}, set()),
        ("abcdef", {"a": [KILLER, BESIDE], "b": [KILLER, BESIDE], "c": [KILLER, 9]}, {KILLER}),
        ("abcdef", {"a": [0], "b": [0], "c": [0]}, set()),
        ("abc", {"a": [KILLER], "b": [KILLER, BESIDE], "c": [KILLER, BESIDE]}, set()),
        ("ab", {"a": [KILLER], "b": [KILLER]}, set()),
    ],
    ids=[
        "one end", "it alone ran both times", "several ran both times", "the third tells", "no fingerprint",
        "all are down: an outage", "both are down",
    ],
)  # fmt: skip
def test_who_is_refused(instances, ends, refused):
    world = World(instances)
    for name, fingerprints in ends.items():
        world.die(name, *fingerprints)
    assert {each for each in (KILLER, BESIDE, 9) if world.refused(each)} == refused
    world.now_s = 301.0
    assert not world.refused(KILLER)


def test_the_only_instance_counts_once_for_each_of_its_starts():
    world = World("a")
    for _ in range(2):
        world.die("a", KILLER)
    assert not world.refused(KILLER), "one end, heard of twice"
    world.replicas["a"].spec.state_changed_at = 60.0
    world.die("a", KILLER)
    assert world.refused(KILLER)
    assert world.notices[0].inputs["instances"] == ["a", "a"]


def test_an_answer_clears():
    world = World()
    world.die("a", KILLER)
    world.suspects.ended(request(KILLER), 9)
    world.die("b", KILLER)
    assert not world.refused(KILLER), "identical requests run everywhere, and any two machines may end"


def test_a_connection_that_broke_proves_nothing_before_a_heartbeat_says_that_its_server_ended():
    world, cut = World(), request(KILLER)
    a = world.replicas["a"]
    for began_s, ended, suspected in ((0.0, False, False), (-1.0, False, False), (0.0, True, True)):
        world.suspects.failed(cut, a, CUT_OFF)
        world.suspects.checked(a, began_s, ended=ended)
        assert world.suspects.is_suspect(cut.asked) is suspected
    a.requests.append(cut)
    assert world.suspects.instances() == {a}


def test_what_ran_where_a_connection_broke_is_kept_apart_until_a_heartbeat_tells():
    """A server that is gone says nothing: its requests on one instance could end a second engine together."""
    world = World("abcd")
    a, b, c, _ = world.replicas.values()
    a.requests, b.requests, c.requests = [request(KILLER), request(BESIDE)], [request(KILLER)], [request(9)]
    world.suspects.failed(a.requests[0], a, CUT_OFF)
    retry = SimpleNamespace(avoid=[])
    assert world.suspects.again(request(BESIDE), retry) is None
    assert set(retry.avoid) == {a, b}
    world.suspects.checked(a, 0.0, ended=False)
    assert not world.suspects.instances()
    world.suspects.failed(a.requests[0], a, CUT_OFF)
    world.now_s = 31.0
    assert not world.suspects.instances(), "it was stopped, and no heartbeat comes"


def test_one_that_is_being_stopped_proves_nothing():
    world, cut = World(), request(KILLER)
    world.replicas["a"].spec.state = InstanceState.DRAINING
    world.suspects.failed(cut, world.replicas["a"], CUT_OFF)
    world.suspects.checked(world.replicas["a"], 0.0, ended=True)
    assert not world.suspects.is_suspect(cut.asked)
