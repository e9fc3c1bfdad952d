"""One process owns a role at a time: a row with an epoch, taken and renewed by conditional updates.

A role is a shard of models, whose owner decides about their requests, or work that one process of all does, such as
answering batches. The owner of the first shard does what is the whole fleet's: limits, figures, alerts.

Where regions have zones, a shard has an owner in each (`shard 1 in eu`): a process that stands there, or another for as long
as none does. FIRST, without a zone, is there whatever zones there are.

A row is taken over when it was given up, when it ran out by the database's clock, or when its owner was a process of this
machine that is dead. The owner counts the same time by its own clock, from before it asked, and acts no longer when that is
over: one that was frozen finds so when it comes back. Nothing else can make an owner, whatever happens to Redis.

While no process stands by, the right is given for longer (`ALONE_S`), so that an owner serves through as long an absence of
the database as known keys do.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from channels.db import DatabaseSyncToAsync
from django.db import connections
from django.db.models import F, Q, Value
from django.db.models.functions import Now

from controlplane.background import spawn
from controlplane.dispatch.port import FIRST
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Owner
from controlplane.fleet.shards import is_shard, models_by_role, zone_of
from controlplane.jobs.record import Job

logger = logging.getLogger(__name__)
LEASE_S = 2.5
ALONE_S = 60.0
"""As `DATABASE_DOWN_GRACE_S` of the keys, `controlplane.gateway.admission.keys`."""
RENEW_S = 0.5
ANSWER_S = 3.0
"""Longest wait for the database: the row may run out meanwhile."""
SPREAD_S = 1.0
"""Time for which a process leaves a free shard to others, for each that it has."""
AFAR_S = 3.0
"""Time for which a process leaves a free shard to others that stand in its zone."""
SHARDS_S = 5.0
"""Period of looking for shards that models were dealt to."""
MOVED_S = 10.0
"""Time for which a process takes no shard that it has left to another one."""
BATCHES = "batches"


T = TypeVar("T")


class NotOwner(ActionError):
    """A write of a process that has lost its role."""


class State(NamedTuple):
    """A row as one look left it. *lease_s*: for how long it is this process's; 0: it is another's, or nobody's."""

    name: str
    epoch: int
    address: str
    lease_s: float = 0.0


def process_id(pid: int | str) -> str:
    """Return what names process *pid* of this machine and no other, ever; "" if it is dead, or the system does not say."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        names = os.readlink("/proc/self/ns/pid")  # another container's processes have the same numbers
    except OSError:
        return ""
    return "" if state in "ZX" else f"{machine} {names} {pid} {fields[18]}"  # the time of its start


def is_dead(token: str) -> bool:
    """Whether *token* is of a process of this machine that has ended. Unknown is not dead."""
    ours, theirs = process_id("self").split(), token.split()
    if len(theirs) != 5 or theirs[:2] != ours[:2] or (now := process_id(theirs[2]).split()) == theirs[:4]:
        return False
    try:
        os.kill(int(theirs[2]), 0)
    except PermissionError:  # another user's, which the system may hide
        return bool(now)
    except OSError:
        pass
    return True


def _owners(roles: Mapping[str, State]) -> list[tuple[str, int, str, bool]]:
    return [(*state[:3], state.lease_s > 0) for state in roles.values()]


class Lease:
    """The roles of this process. *wants*: those that it takes, each after it was free for so many seconds, which for shards
    is that of the first times the number of shards it has already, so that they spread, and more for those of another *zone*
    than its own, which it gives back to a process of theirs; *address*: where relays reach it;
    *clock* is that of the machine, in seconds: it runs while the process is frozen.
    """

    def __init__(
        self,
        job: Job,
        clock: Callable[[], float] = time.monotonic,
        *,
        wants: Mapping[str, float] | None = None,
        address: str = "",
        zone: str = "",
    ) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"
        """By which commands and relays know an owner: containers may have host name and process number in common."""
        self.roles: dict[str, State] = {}
        """Every role as of the last look."""
        self.job, self.clock, self.address, self.zone = job, clock, address, zone
        self.wants = dict({FIRST: 0.0} if wants is None else wants)
        self.changed: Callable[[], object] = lambda: None
        """Called when another process owns a role, or this one a different set."""
        self._token = f"{process_id(os.getpid())} {secrets.token_hex(8)}"
        self._until_s: dict[str, float] = {}
        self._free_s: dict[str, float] = {}
        """Since when roles that this process wants have been free."""
        self._left_s: dict[str, float] = {}
        """When this process left roles that an operator has moved."""
        self._shards_until_s = self._shards_s = -1.0
        self._given_up = False
        self._thread = ThreadPoolExecutor(1, "lease")  # others' long reads are no reason to lose it
        self._task: asyncio.Task[None] | None = None

    def holds(self, role: str) -> bool:
        """Whether *role* is this process's at this moment."""
        return self.clock() < self._until_s.get(role, -1.0)

    @property
    def held(self) -> bool:
        """Whether the first shard is this process's."""
        return self.clock() < self._until_s.get(FIRST, -1.0)

    @property
    def shards(self) -> list[str]:
        """Return the roles that are shards of models."""
        return [role for role in self.roles if is_shard(role)] or [FIRST]

    @property
    def owned(self) -> dict[str, int]:
        """Return the epoch of each shard that was this process's as of the last look."""
        return {role: state.epoch for role, state in self.roles.items() if state.lease_s and is_shard(role)}

    @property
    def holds_shards(self) -> bool:
        """Whether every shard of `owned` is this process's at this moment."""
        return self.clock() < self._shards_until_s

    @property
    def first(self) -> State:
        return self.roles.get(FIRST, State("", 0, ""))

    def check(self) -> None:
        """Raise NotOwner unless the shards are this process's by the database, in the transaction of the caller.

        An owner that was frozen between a decision and its write finds out here.
        """
        shards = set(self.owned)
        if not shards or Owner.objects.filter(role__in=shards, token=self._token).count() != len(shards):
            raise NotOwner(f"{self.owner} is not the owner of {' and '.join(sorted(shards)) or FIRST} any longer")

    async def start(self) -> None:
        with self.job:
            await self._look()
        self._task = spawn(self._run(), "lease")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with self.job:
                await self._look()

    async def _look(self) -> None:
        """Renew the rows, or try to take them. Raises what the database raises, and TimeoutError; nothing changes then."""
        began_s, before = self.clock(), self.roles
        async with asyncio.timeout(ANSWER_S):
            roles = await self._in_thread(self._renew_or_take)
        if self._given_up:  # meanwhile, or the rows do not say so yet
            roles = {role: state._replace(lease_s=0.0) for role, state in roles.items()}
        held = {role for role in before if self.holds(role)}
        self.roles = roles
        self._until_s = {role: began_s + state.lease_s for role, state in roles.items() if state.lease_s}
        self._shards_until_s = min((self._until_s.get(role, -1.0) for role in self.owned), default=-1.0)
        for role, state in roles.items():
            if (role in held) != self.holds(role):
                no_longer = " no longer" if role in held else ""
                logger.warning("gateway: %s owns %s%s, epoch %d", self.owner, role, no_longer, state.epoch)
        if _owners(before) != _owners(roles):
            self.changed()

    def _renew_or_take(self) -> dict[str, State]:
        owners, now = Owner.objects, Now()
        rows = {row.role: row for row in owners.judged(now)}
        for role in self.wants.keys() - rows.keys():
            owners.get_or_create(role=role)
            rows[role] = owners.judged(now).get(role=role)
        wants = self._wants(rows)
        lease_s = {role: LEASE_S if row.contested else ALONE_S for role, row in rows.items()}
        mine = [role for role, row in rows.items() if row.token == self._token]
        if self._given_up and mine:  # the database did not answer then
            owners.filter(token=self._token).update(token="")
            mine = []
        for role in [role for role in mine if rows[role].moves and rows[role].contested]:
            self._left_s[role] = self.clock()
            owners.filter(role=role, token=self._token).update(token="", moves=False)
            mine.remove(role)
            wants.pop(role, None)
        for seconds in {lease_s[role] for role in mine}:
            renewed = owners.filter(role__in=[role for role in mine if lease_s[role] == seconds], token=self._token)
            renewed.update(expires_at=now + timedelta(seconds=seconds))
        if not self._given_up:
            for role in wants.keys() - mine:
                if not self._take(rows[role], lease_s[role], wants[role]):
                    is_afar = is_shard(role) and zone_of(role) == self.zone != rows[role].zone
                    owners.filter(role=role).update(wanted_at=now, moves=Value(True) if is_afar else F("moves"))
        return {
            row.role: State(row.name, row.epoch, row.address, lease_s.get(row.role, 0.0) * (row.token == self._token))
            for row in owners.order_by("pk")
        }

    def _wants(self, rows: Mapping[str, Owner]) -> dict[str, float]:
        """Return the roles that this process takes now, each after it was free for so many seconds."""
        wants = dict(self.wants)
        if FIRST in wants:
            if self.clock() >= self._shards_s:
                self._shards_s = self.clock() + SHARDS_S
                for role in models_by_role():
                    Owner.objects.get_or_create(role=role)
            has = sum(is_shard(role) and row.token == self._token for role, row in rows.items())
            after_s = wants[FIRST] + has * SPREAD_S
            wants |= {role: after_s + AFAR_S * (zone_of(role) != self.zone) for role in rows if is_shard(role)}
        return {
            role: after_s for role, after_s in wants.items() if self.clock() - self._left_s.get(role, -60) > MOVED_S
        }

    def _take(self, row: Owner, lease_s: float, wait_s: float) -> bool:
        """Take *row* if it is free, and was for *wait_s*."""
        now, others = Now(), Owner.objects.filter(pk=row.pk)
        free = Q(token="") | Q(expires_at__lte=now)
        if is_dead(row.token):
            free |= Q(token=row.token)
        if wait_s:
            if not others.filter(free).exists():
                self._free_s.pop(row.role, None)
                return False
            if self.clock() < self._free_s.setdefault(row.role, self.clock()) + wait_s:
                return False
        taken = {
            "token": self._token,
            "name": self.owner,
            "address": self.address,
            "zone": self.zone,
            "epoch": F("epoch") + 1,
            "moves": False,
        }
        until = now + timedelta(seconds=lease_s)
        return bool(others.filter(free).update(**taken, expires_at=until, wanted_at=None))

    async def give_up(self) -> None:
        """Stop being the owner, at once here, and in the rows as soon as the database answers."""
        self._until_s, self._shards_until_s, self._given_up = {}, -1.0, True
        self.roles = {role: state._replace(lease_s=0.0) for role, state in self.roles.items()}
        self.changed()
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                await self._in_thread(lambda: Owner.objects.filter(token=self._token).update(token=""))

    async def stop(self) -> None:
        await self.give_up()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                await self._in_thread(connections.close_all)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await DatabaseSyncToAsync(work, thread_sensitive=False, executor=self._thread)()
