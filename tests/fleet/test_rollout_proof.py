"""A new instance proves itself under real requests before the next old one is replaced, and a bad version goes back."""

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import redis
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.lifecycle.states import InstanceState as S
from controlplane.fleet.models import Deployment, Instance, InstanceCommand, Model, Node, Rollout, RolloutState
from controlplane.fleet.rollouts import services as rollouts
from tests.fleet.test_rollouts import World, states, world
from workers.tasks import rollouts as tasks

__all__ = ["world"]
pytestmark = pytest.mark.django_db
NEW, OLD = 7, 256
BAKE_S = 60


@pytest.fixture
def fleet(world: World, monkeypatch):
    """Outcomes of requests by instance, with each step those of a share of failed ones, and a probe's answer."""
    world.counts, world.shares, world.each, world.probe, world.probed = {}, {NEW: 0.0, OLD: 0.0}, 10, "ok", []

    def outcomes():
        if world.each is None:
            return None
        for row in Instance.objects.filter(state=S.READY):
            answered, failed = world.counts.get(row.name, (0, 0))
            bad = round(world.each * world.shares[row.max_num_seqs])
            world.counts[row.name] = (answered + world.each - bad, failed + bad)
        return dict(world.counts)

    async def probe(instance):
        world.probed.append(instance.name)
        return world.probe

    monkeypatch.setattr(tasks.waiting, "outcomes", outcomes)
    monkeypatch.setattr(tasks, "_probe", probe)
    return world


def begin(fleet, **values):
    fleet.changed(max_num_seqs=NEW)
    return rollouts.start(fleet.deployment, "ada", "fewer at once", bake_s=BAKE_S, **values)


def pass_s(seconds):
    """Let *seconds* of the bake pass, and the rest after a stop."""
    InstanceCommand.objects.update(finished_at=timezone.now() - timedelta(hours=1))
    for row in Rollout.objects.exclude(baking_since=None):
        Rollout.objects.filter(pk=row.pk).update(baking_since=row.baking_since - timedelta(seconds=seconds))


def until_it_bakes(fleet):
    for _ in range(20):
        fleet.step()
        if fleet.newest().baking_since or fleet.newest().ended_at:
            return fleet.newest()
    raise AssertionError(fleet.newest().message)


def run(fleet):
    for _ in range(60):
        fleet.step()
        pass_s(BAKE_S / 3)
        if fleet.newest().ended_at:
            return fleet.newest()
    raise AssertionError(fleet.newest().message)


@pytest.mark.parametrize("gpus", [8, 4], ids=["one more first", "in its place"])
def test_no_old_one_is_drained_before_the_new_one_has_served_for_its_time(fleet, gpus):
    Node.objects.update(gpu_count=gpus)
    begin(fleet)
    until_it_bakes(fleet)
    for _ in range(5):
        before = states(fleet)
        fleet.step()
        assert states(fleet) == before
    assert "more before the next" in fleet.newest().message
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.SUCCEEDED, [NEW, NEW])


@pytest.mark.parametrize(
    ("new", "old", "each", "values", "goes_on"),
    [
        (0.0, 0.0, 10, {}, True),
        (0.5, 0.0, 10, {}, False),
        (0.1, 0.0, 10, {}, False),  # after 20 requests
        (0.1, 0.1, 10, {}, True),  # the others do no better: tenants' own errors
        (0.5, 0.0, 2, {"min_requests": 1000}, False),  # few, yet three that failed
        (0.1, 0.0, 10, {"failure_budget": 0.2}, True),
        (0.5, 0.0, 10, {"failure_budget": 1.0}, True),
    ],
)
@pytest.mark.parametrize("gpus", [8, 4], ids=["one more first", "in its place"])
def test_what_is_bad_goes_back_and_costs_one_old_instance_at_most(fleet, gpus, new, old, each, values, goes_on):
    Node.objects.update(gpu_count=gpus)
    fleet.shares, fleet.each = {NEW: new, OLD: old}, each
    begin(fleet, **values)
    ended = run(fleet)
    starts = [name for call, name in fleet.launcher.calls if call == "start"][2:]
    if goes_on:
        assert (ended.state, fleet.seqs()) == (RolloutState.SUCCEEDED, [NEW, NEW])
        return
    assert (ended.state, fleet.seqs()) == (RolloutState.ROLLED_BACK, [OLD, OLD])
    assert Deployment.objects.get().max_num_seqs == OLD
    assert len(starts) == (1 if gpus == 8 else 2), "one with the new settings, and one in its place again"
    assert min(fleet.ready) == (2 if gpus == 8 else 1)
    assert "requests failed with the new settings" in ended.message
    event = Event.objects.get(kind="rollout.goes_back")
    assert (event.severity, event.before, event.after["max_num_seqs"]) == (
        Severity.CRITICAL,
        {"max_num_seqs": NEW},
        OLD,
    )
    assert event.reason == ended.cause
    assert Event.objects.filter(kind="rollout.rolled_back").exists()


@pytest.mark.parametrize("left", [S.DRAINING, S.DONATED])
@pytest.mark.parametrize("gpus", [8, 4], ids=["one more first", "in its place"])
def test_on_its_way_back_it_starts_none_for_those_that_scaling_takes(fleet, gpus, left):
    """It would undo the strategy's decision, and without room wait for ever."""
    Node.objects.update(gpu_count=gpus)
    fleet.shares[NEW] = 0.5
    begin(fleet)
    until_it_bakes(fleet)
    while not fleet.newest().going_back:
        fleet.step()
    other = next(row for row in Instance.objects.filter(state=S.READY) if row.max_num_seqs == OLD)
    services.drain(other, "strategy", "less demand")
    wanted = Instance.objects.filter(state=S.READY).count()
    if left == S.DONATED:
        services.move(other, S.DONATED, actor="planner", reason="less demand")
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.ROLLED_BACK, [OLD] * wanted)
    assert Instance.objects.get(pk=other.pk).state == left


@pytest.mark.parametrize("when", ["at its start", "while it proves itself"])
@pytest.mark.parametrize("gpus", [8, 4], ids=["one more first", "in its place"])
def test_one_that_fails_goes_back_too(fleet, gpus, when):
    Node.objects.update(gpu_count=gpus)
    fleet.broken = lambda spec: spec.max_num_seqs == NEW and when == "at its start"
    begin(fleet)
    if when != "at its start":
        until_it_bakes(fleet)
        services.move(fleet.newest().starting, S.FAILED, actor="gateway", reason="engine died")
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.ROLLED_BACK, [OLD, OLD])
    assert ("out of memory" if when == "at its start" else "engine died") in ended.cause


@pytest.mark.parametrize(("probe", "state"), [("ok", "succeeded"), ("answered 500", "rolled_back")])
def test_without_requests_a_probe_decides_after_the_time(fleet, probe, state):
    fleet.each, fleet.probe = 0, probe
    begin(fleet)
    until_it_bakes(fleet)
    pass_s(BAKE_S / 2)
    fleet.step()
    assert not fleet.probed
    pass_s(BAKE_S)
    fleet.step()
    assert "had 0 requests in 60 s, too few to judge it: it is probed" in fleet.newest().message
    ended = run(fleet)
    assert ended.state == state
    assert len(fleet.probed) == (2 if probe == "ok" else 1)


@pytest.mark.parametrize(
    ("summary", "known"),
    [
        (None, None),
        (redis.ConnectionError(), None),
        (b'{"work": {}}', None),
        (b'{"outcomes": {}}', {}),
        (b'{"outcomes": {"a": [3, 1]}}', {"a": (3, 1)}),
    ],
)
def test_outcomes_are_unknown_without_a_recent_summary(monkeypatch, summary, known):
    def get(key):
        if isinstance(summary, Exception):
            raise summary
        return summary

    monkeypatch.setattr(redis.Redis, "from_url", lambda *_, **__: nullcontext(SimpleNamespace(get=get)))
    assert tasks.waiting.outcomes() == known


def test_while_the_outcomes_are_not_known_nothing_is_replaced(fleet):
    begin(fleet)
    until_it_bakes(fleet)
    fleet.each = None
    pass_s(BAKE_S)
    fleet.step()
    assert "is not known" in fleet.newest().message
    assert fleet.seqs() == [NEW, OLD, OLD]
    fleet.each = 10
    fleet.step()
    assert fleet.newest().baking_since > timezone.now() - timedelta(seconds=BAKE_S / 2), "its time begins again"


def test_counts_that_begin_again_begin_its_time_again(fleet):
    begin(fleet)
    until_it_bakes(fleet)
    for _ in range(3):
        fleet.step()
    pass_s(BAKE_S)
    fleet.counts.clear()  # the gateway was started again
    fleet.step()
    assert "more before the next" in fleet.newest().message


def test_without_the_way_back_it_fails_and_goes_back_on_a_click(fleet):
    fleet.shares[NEW] = 0.5
    begin(fleet, auto_back=False)
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.FAILED, [NEW, OLD, OLD])
    assert "requests failed" in ended.message
    for _ in range(3):
        fleet.step()
    assert fleet.seqs() == [NEW, OLD, OLD]
    rollouts.go_back(fleet.deployment, "ada", "better so")
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.ROLLED_BACK, [OLD, OLD])
    assert "Asked by ada: better so" in ended.cause
    with pytest.raises(ActionError, match="No rollout"):
        rollouts.go_back(fleet.deployment, "ada", "again")


def test_what_is_not_kept_is_not_gone_back_to_and_it_says_so(fleet):
    """The model's settings are those of all its deployments, and of secrets only digests are kept."""
    fleet.shares[NEW] = 0.5
    Model.objects.update(context_tokens=4096)
    begin(fleet)
    ended = run(fleet)
    assert (ended.state, fleet.seqs()) == (RolloutState.FAILED, [NEW, OLD, OLD])
    assert "not set back (context_tokens)" in ended.message
    assert Deployment.objects.get().max_num_seqs == NEW


def test_one_in_progress_goes_back_on_a_click(fleet):
    begin(fleet)
    until_it_bakes(fleet)
    rollouts.go_back(fleet.deployment, "ada", "too slow")
    assert (run(fleet).state, fleet.seqs()) == (RolloutState.ROLLED_BACK, [OLD, OLD])
