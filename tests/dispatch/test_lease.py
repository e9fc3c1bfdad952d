"""The row that makes a process own the regions: never two at a time, by the owners' own clocks and the database's."""

import os
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from channels.db import database_sync_to_async
from django.db import transaction

from controlplane.dispatch import lease as module
from controlplane.dispatch.lease import ALONE_S, LEASE_S, Lease, NotOwner, State, is_dead, process_id
from controlplane.dispatch.port import FIRST
from controlplane.events.models import Event
from controlplane.events.services import guard, record
from controlplane.fleet.models import Owner
from controlplane.jobs.record import Job


class Clock:
    """The machine's and the database's; a look at the latter takes a while."""

    def __init__(self, seed=None):
        self.now_s, self.random = 1000.0, random.Random(seed) if seed is not None else None

    def __call__(self):
        return self.now_s

    def database(self):
        if self.random is not None:
            self.now_s += self.random.choice((0.0, 0.0, 0.01, 1.0))
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now_s)


@pytest.fixture
def clock(transactional_db, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "Now", clock.database)
    return clock


@pytest.fixture
async def leases(clock):
    made = [Lease(Job("renew-lease", "gateway", 1.0), clock) for _ in range(3)]
    yield made
    for one in made:
        await one.stop()


async def test_who_stands_by_takes_over_what_runs_out(clock, leases):
    first, second, _ = leases
    await first._look()
    await second._look()
    await first._look()  # somebody stands by
    assert (first.held, second.held, second.first.name, second.first.epoch) == (True, False, first.owner, 1)
    clock.now_s += LEASE_S - 0.1
    await second._look()
    assert (first.held, second.held) == (True, False)
    clock.now_s += 0.2
    assert not first.held, "before anybody asks the database"
    await second._look()
    assert (first.held, second.held, second.first.epoch) == (False, True, 2)
    await first._look()
    assert (first.held, first.first.epoch, first.first.name) == (False, 2, second.owner)


async def test_what_is_given_up_is_free_at_once_and_is_not_taken_back(leases):
    first, second, _ = leases
    await first._look()
    await second._look()
    await first.give_up()
    assert not first.held
    await first._look()
    await second._look()
    assert (first.held, second.held) == (False, True)


@pytest.mark.parametrize(("stands_by", "serves_s"), [(False, ALONE_S), (True, LEASE_S)])
async def test_without_the_database_it_owns_for_as_long_as_it_asked_for(
    clock, leases, monkeypatch, stands_by, serves_s
):
    first, second, _ = leases
    await first._look()
    if stands_by:
        await second._look()
        await first._look()

    def away():
        raise OSError

    monkeypatch.setattr(first, "_renew_or_take", away)
    for passed_s, held in ((serves_s - 0.1, True), (0.2, False)):
        clock.now_s += passed_s
        with pytest.raises(OSError):
            await first._look()
        assert first.held is held


async def test_one_that_died_on_this_machine_is_not_waited_for(leases):
    first, second, _ = leases
    await first._look()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
        token = f"{process_id(process.pid)} of-a-test"
        await database_sync_to_async(Owner.objects.update)(token=token)
        await second._look()
        assert (is_dead(token), second.held) == (False, False)
        process.kill()
    await second._look()
    assert (is_dead(token), second.held) == (True, True)


@pytest.mark.parametrize("token", ["", "x", "another-machine pid:[1] 1 1 x", "itself"])
def test_what_is_not_known_to_be_dead_is_not(token):
    assert not is_dead(f"{process_id(os.getpid())} x" if token == "itself" else token)


WEST = "shard 1 in eu"


@pytest.fixture
async def zones(leases):
    """The leases, of which the second stands in another zone."""
    leases[1].zone = "eu"
    await database_sync_to_async(Owner.objects.create)(role=WEST)
    return leases


@pytest.mark.parametrize("seed", range(6))
async def test_never_two(zones, clock, seed):
    """In whichever order they ask, are frozen and give up, and however late the database answers."""
    clock.random = random.Random(seed)
    epochs = {FIRST: [], WEST: []}
    for _ in range(90):
        one = clock.random.choice(zones)
        await one._look()
        for role, known in epochs.items():
            owners = [each for each in zones if each.holds(role)]
            assert len(owners) <= 1
            known += [each.roles[role].epoch for each in owners]
        clock.now_s += clock.random.choice((0.1, 0.5, 1.0, 2.0, 5.0, 10.0))  # where it is long, they were frozen
        if clock.random.random() < 0.05:
            await one.give_up()
            one._given_up = False  # as another process
    for known in epochs.values():
        assert known == sorted(known)
        assert len(set(known)) > 2


async def test_what_another_zone_has_is_taken_later_and_given_back(zones, clock):
    home, eu, _ = zones
    await home._look()
    clock.now_s += module.AFAR_S
    await home._look()
    assert home.owned == {FIRST: 1}, "it has one already"
    clock.now_s += module.SPREAD_S
    await home._look()
    assert home.owned == {FIRST: 1, WEST: 1}
    for each in (eu, home, eu):
        await each._look()
    assert (home.owned, eu.owned) == ({FIRST: 1}, {WEST: 2})
    for each in (home, eu) * 3:
        clock.now_s += 1.0
        await each._look()
    assert (home.owned, eu.owned) == ({FIRST: 1}, {WEST: 2}), "each has what is of its zone"


async def test_a_decision_of_an_earlier_owner_is_not_written(leases, clock):
    """As of one that was frozen between its decision and its write."""
    first, second, _ = leases

    def decide():
        guard.set(first.check)
        with transaction.atomic():
            Owner.objects.update(address="of the first")
            record("a.decision", actor="gateway")

    await first._look()
    await database_sync_to_async(decide)()
    await first.give_up()
    await second._look()
    with pytest.raises(NotOwner, match="not the owner of shard 1"):
        await database_sync_to_async(decide)()
    rows = await database_sync_to_async(lambda: (list(Owner.objects.values_list("address")), Event.objects.count()))()
    assert rows == ([("",)], 1)


async def test_it_hears_of_a_role_that_it_left_before_another_has_it(leases):
    first, second, _ = leases
    changes = []
    first.changed = lambda: changes.append(first.owned)
    await first._look()
    await second._look()
    await first._look()
    assert changes == [{FIRST: 1}]
    await database_sync_to_async(Owner.objects.update)(moves=True)
    await first._look()
    assert changes == [{FIRST: 1}, {}]


async def test_what_is_given_up_while_the_database_is_away_is_free_once_it_answers(leases, monkeypatch):
    first, second, _ = leases
    await first._look()

    async def away(work):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(first, "_in_thread", away)
        await first.give_up()
    renew_or_take = first._renew_or_take
    monkeypatch.setattr(first, "_renew_or_take", lambda: first.roles | {FIRST: State(first.owner, 1, "", LEASE_S)})
    await first._look()  # read before it gave up
    assert (first.owned, first.held) == ({}, False)
    monkeypatch.setattr(first, "_renew_or_take", renew_or_take)
    await first._look()
    await second._look()
    assert (first.owned, second.held) == ({}, True)


@pytest.mark.parametrize(("error", "dead"), [(PermissionError, False), (ProcessLookupError, True)])
def test_a_process_of_another_user_that_the_system_hides_is_not_dead(monkeypatch, error, dead):
    token = f"{process_id(os.getpid())} x"
    monkeypatch.setattr(module, "process_id", lambda pid, known=module.process_id: known(pid) if pid == "self" else "")

    def kill(pid, signal):
        raise error

    monkeypatch.setattr(os, "kill", kill)
    assert is_dead(token) is dead


def test_processes_of_containers_with_the_same_host_name_and_number_have_different_names():
    one, other = (Lease(Job("renew-lease", "gateway", 1.0)) for _ in range(2))
    assert one.owner != other.owner
