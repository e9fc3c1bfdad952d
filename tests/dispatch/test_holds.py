"""How long a request waits for an instance: its class, its model, its caller and a start decide."""

from dataclasses import replace

import pytest

from controlplane.dispatch import port
from tests.dispatch.test_leaving import World

MINUTE = 60.0


class Starting(World):
    """A model that no instance serves; one starts from the beginning and usually takes *start_s*."""

    def __init__(self, start_s=14 * MINUTE, **tuned):
        super().__init__()
        self.dispatcher.fleet.wall_clock = lambda: self.now_s
        endpoints = tuple(
            replace(one, tuned=one.tuned.model_copy(update=tuned if one.model == "m" else {}))
            for one in self.inventory.endpoints
        )
        loading = [
            replace(one, state="loading", start_s=start_s, start_began_at=self.now_s)
            for one in self.inventory.instances[:1]
        ]
        self.inventory = replace(
            self.inventory, endpoints=endpoints, instances=(*loading, *self.inventory.instances[2:3])
        )
        self.apply(self.inventory)
        self.began_s = self.now_s

    def at(self, seconds):
        while self.now_s < self.began_s + seconds:
            self.pass_time(min(5.0, self.began_s + seconds - self.now_s))

    def up(self):
        self.apply(
            replace(self.inventory, instances=(replace(self.inventory.instances[0], state="ready", start_s=None),))
        )

    def refused_at(self, number, within_s):
        while number in self.open and self.now_s < self.began_s + within_s:
            self.pass_time()
        return None if number in self.open else self.now_s - self.began_s


@pytest.mark.parametrize("fields", [{}, {"interactive": False, "priority": 1}], ids=["queued", "held"])
def test_what_waits_for_a_start_is_not_dropped_before_it_should_be_done(fields):
    world = Starting()
    early = [world.submit(**fields) for _ in range(3)]
    world.at(9 * MINUTE)
    late = world.submit(**fields)
    world.at(16 * MINUTE)  # it takes a little longer than usual
    assert not world.refused
    world.up()
    world.pass_time(120.0)
    for number in (*early, late):
        world.pass_time()
        assert number in world.placed
        world.send(port.Finished(number, 3))


@pytest.mark.parametrize(
    ("tuned", "fields", "start_s", "status", "code", "refused_s", "retry_s"),
    [
        ({}, {}, 100.0, 503, "hold_expired", 601, 30.0),  # after twice its usual time a start is given up
        ({"MAX_HOLD_S": 60.0}, {}, 40.0, 503, "hold_expired", 81, 30.0),
        ({}, {"deadline_s": 120.0}, 840.0, 503, "hold_expired", 121, 719.0),
        ({}, {"max_wait_s": 90.0}, 840.0, 504, "max_wait_expired", 91, 749.0),
        ({}, {"max_wait_s": 90.0, "interactive": False, "priority": 1}, 840.0, 504, "max_wait_expired", 91, 749.0),
        ({}, {"max_wait_s": 9000.0}, 100.0, 503, "hold_expired", 601, 30.0),
        ({"HOLD_FOR_STARTS": False}, {}, 840.0, 503, "hold_expired", 1, 839.0),
        ({"HOLD_FOR_STARTS": False, "MAX_HOLD_S": 60.0}, {}, 840.0, 503, "hold_expired", 1, 839.0),
        ({"HOLD_FOR_STARTS": False}, {}, 400.0, 503, "hold_expired", 546, 54.0),  # when it is overdue by too much
    ],
)
def test_a_hold_ends_by_class_model_caller_or_start(tuned, fields, start_s, status, code, refused_s, retry_s):
    world = Starting(start_s, **tuned)
    number = world.submit(**fields)
    assert world.refused_at(number, 3000.0) == pytest.approx(refused_s, abs=2.0)
    refusal = world.refusals[number]
    assert (refusal.status, refusal.code) == (status, code)
    assert refusal.retry_after_s == pytest.approx(retry_s, abs=20.0)
    assert refusal.retry_after_s >= 1.0


def test_where_instances_serve_each_model_holds_as_long_as_it_says():
    world = World()
    endpoints = tuple(
        replace(one, tuned=one.tuned.model_copy(update={"MAX_HOLD_S": 60.0})) if one.model == "m" else one
        for one in world.inventory.endpoints
    )
    world.apply(replace(world.inventory, endpoints=endpoints))
    world.fill()
    for _ in range(2):
        world.fillers.append(world.submit(model="f"))
    short, long = world.submit(), world.submit(model="f")
    world.pass_time(61.0)
    assert world.refused == {short: "hold_expired"}
    world.pass_time(540.0)
    assert world.refused == {short: "hold_expired", long: "hold_expired"}
