"""The queue manager in the dispatcher: what it holds, releases, gives up, and says."""

import math

import pytest

from controlplane.dispatch import port
from controlplane.dispatch.queues.held import HeldView
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held_work import LOOK_S
from scheduling.queueing.release_rule import AT_ONCE, ReleaseRule
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from tests.clocks.both import fleet_of
from tests.clocks.fleet import Course, VirtualFleet

PROFILE = Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5)
HOUR_S = 3600.0


class Fleet(VirtualFleet):
    """Instances of ten sequences, whose dispatcher's records are kept."""

    def __init__(self, *arguments):
        self.held, self.moves, self.placed = [], [], {}
        super().__init__(*arguments)

    def hear(self, record):
        super().hear(record)
        match record:
            case port.Held():
                self.held.append(record)
            case port.Queued():
                self.moves.append(record)
            case port.Placed():
                self.placed[record.number] = record

    def submit(self, *, interactive=False, deadline_s=24 * HOUR_S, region="east", **more):
        number = len(self.courses)
        asked = port.Asked(
            number, f"r{number}", "m", region, tenant_id=1, priority=0 if interactive else 1, due_s=None,
            arrived_at=self.now_s, arrived_s=self.now_s, prompt_tokens=8, predicted_tokens=8, max_tokens=None,
            sequences=1, streamed=True, deadline_s=None if interactive else deadline_s,
            end_s=None if interactive else deadline_s, slo_class="c", interactive=interactive, **more,
        )  # fmt: skip
        self.arrive(Course(asked, 8))
        return number

    def look(self, at_s=None):
        self.now_s = self.now_s + LOOK_S if at_s is None else at_s
        self.dispatcher.holding.release_due()
        return {record.number: record for record in self.moves if record.released}


def fleet_with(by="slack", regions=("east", "west"), slowdown=100.0):
    """Return one model in *regions*, an instance in each."""
    engine = EngineConfig(10, 64, 4, 100, "priority", 120, PROFILE)
    policy = EndpointPolicy(ordering="priority", niw=ReleaseRule(by=by, slowdown=slowdown))
    specs = [simulated.InstanceSpec("m", region, engine) for region in regions]
    return fleet_of(simulated.Cluster(specs, policies=policy, max_hold_s=600.0), fleet=Fleet)


def test_interactive_requests_are_not_held_and_others_go_where_use_is_lowest():
    fleet = fleet_with()
    busy = [fleet.submit(interactive=True) for _ in range(7)]
    numbers = [fleet.submit() for _ in range(3)]
    assert [one.number for one in fleet.held] == numbers
    assert set(fleet.placed) == set(busy)
    moved = fleet.look()
    assert {moved[number].region for number in numbers} == {"west"}
    assert fleet.placed[numbers[0]].priority == 1
    assert moved[numbers[0]].released == {"why": "trough", "use": 0.0, "held_s": LOOK_S, "priority": 1}


def test_a_busy_fleet_says_why_and_lets_go_what_is_due_with_priority():
    fleet = fleet_with(regions=("east",))
    for _ in range(8):
        fleet.submit(interactive=True)
    number = fleet.submit(deadline_s=100.0)
    assert fleet.held[0].why == "Held: use 80%, releases below 60%"
    assert fleet.look(30.0) == {}
    (row,) = fleet.dispatcher.held_now(10)
    assert (row.position, row.reason) == (1, "Held: use 80%, releases below 60%")
    assert row.wait_s == row.most_s == 10.0
    assert fleet.look(40.0)[number].released["why"] == "slack"
    assert fleet.placed[number].priority == 0


def test_nothing_is_held_where_the_rule_is_at_once():
    fleet = fleet_with(AT_ONCE)
    number = fleet.submit()
    assert number in fleet.placed
    assert not fleet.held


def test_held_work_is_published_by_model_with_its_age():
    fleet = fleet_with(regions=("east",))
    for _ in range(8):
        fleet.submit(interactive=True)
    for age_h in (0, 2, 5, 11):
        fleet.submit(age_s=age_h * HOUR_S)
    fleet.submit(opportunistic=True, deadline_s=100.0)
    fleet.dispatcher.take(port.Backlog("m", ((HOUR_S, 40),)))
    fleet.look()
    seen = HeldView(fleet.dispatcher.holding)()
    (row,) = [dict(zip(seen, values, strict=True)) for values in zip(*seen.values(), strict=True)]
    assert {name: row[name] for name in ("count", "announced", "opportunistic")} == {
        "count": 5, "announced": 40, "opportunistic": 1,
    }  # fmt: skip
    assert row["slack_s"] == pytest.approx(24 * HOUR_S - 60.0, abs=1.0)
    assert row["oldest_s"] == pytest.approx(11 * HOUR_S, abs=1.0)
    assert row["due_s"] == pytest.approx(24 * HOUR_S, abs=1.0)
    assert row["last"] is None
    fleet.dispatcher.holding.work.scaled("m", "east", fleet.now_s)
    for number in range(8):
        fleet.dispatcher.take(port.Finished(number, 8))
    fleet.look()
    assert not fleet.dispatcher.holding.control.released
    fleet.look(fleet.now_s + 15.0)
    seen = HeldView(fleet.dispatcher.holding)()
    released = [one for _, one in fleet.dispatcher.holding.control.released]
    assert sorted(one.priority for one in released) == [0, 1, 1, 1, 1]
    assert {one.why for one in released} == {"trough"}
    assert not seen["model"] or seen["count"] == [0]
    assert math.isclose(max(one.held_s for one in released), 11 * HOUR_S + fleet.now_s, abs_tol=0.1)


def test_what_waits_is_published_with_the_rate_that_its_deadlines_need():
    """Each request is of 16 tokens; those that are queued are interactive, or released."""
    fleet = fleet_with(regions=("east",))
    for _ in range(13):
        fleet.submit(interactive=True)
    first = {"requests": 3, "tokens": 0.0, "tokens_per_s": 0.0, "queued_tokens": 3 * 16.0}
    assert fleet.dispatcher.holding.waiting_work() == {"m": first}
    for deadline_s in (HOUR_S, 24 * HOUR_S):
        for _ in range(5):
            fleet.submit(deadline_s=deadline_s)
    fleet.submit(opportunistic=True)
    requests, tokens, rate, queued = fleet.dispatcher.holding.waiting_work()["m"].values()
    assert (requests, tokens, queued) == (3 + 10, 160.0, 48.0)
    assert rate == pytest.approx(80.0 / HOUR_S, rel=0.02), "deadlines are counted by the minute"
