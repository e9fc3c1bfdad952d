"""One gateway process owns the regions at a time: a row with an epoch, taken and renewed by conditional updates.

A process without it stands by: it answers `/v1` with 503 and takes the row over when that was given up, when it ran out by
the database's clock, or when its owner was a process of this machine that is dead. The owner counts the same time by its own
clock, from before it asked, and acts no longer when that is over: one that was frozen finds so when it comes back. Nothing
else can make an owner, whatever happens to Redis.

While no process stands by, the right is given for longer (`ALONE_S`), so that an owner serves through as long an absence of
the database as known keys do.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from channels.db import DatabaseSyncToAsync
from django.db import connections
from django.db.models import F, Q
from django.db.models.functions import Now

from controlplane.background import spawn
from controlplane.fleet.models import Owner
from controlplane.jobs.record import Job

logger = logging.getLogger(__name__)
LEASE_S = 6.0
ALONE_S = 60.0
"""As `DATABASE_DOWN_GRACE_S` of the keys, `controlplane.gateway.admission.keys`."""
WANTED_S = 10.0
"""Time after which a process that no longer asks for the row is not waited for."""
RENEW_S = 1.0
ANSWER_S = 3.0
"""Longest wait for the database: the row may run out meanwhile."""
ROW = 1
"""Its primary key. One for each shard of models, once there are several."""


T = TypeVar("T")


class State(NamedTuple):
    """The row as one look left it. *lease_s*: for how long it is this process's; 0: it is another's."""

    name: str
    epoch: int
    lease_s: float


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
    return len(theirs) == 5 and theirs[:2] == ours[:2] and process_id(theirs[2]).split() != theirs[:4]


class Lease:
    """*clock* is that of the machine, in seconds: it runs while the process is frozen."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.holder = ""
        """Name of the owner; empty: not known."""
        self.epoch = 0
        self.job, self.clock = job, clock
        self._token = f"{process_id(os.getpid())} {secrets.token_hex(8)}"
        self._until_s = -1.0
        self._given_up = False
        self._thread = ThreadPoolExecutor(1, "lease")  # others' long reads are no reason to lose it
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        return self.clock() < self._until_s

    async def start(self) -> None:
        with self.job:
            await self._look()
        self._task = spawn(self._run(), "lease")

    async def _run(self) -> None:
        while not self._given_up:
            await asyncio.sleep(RENEW_S)
            with self.job:
                await self._look()

    async def _look(self) -> None:
        """Renew the row, or try to take it. Raises what the database raises, and TimeoutError; nothing changes then."""
        began_s, held = self.clock(), self.held
        async with asyncio.timeout(ANSWER_S):
            state = await self._in_thread(self._renew_or_take)
        if self._given_up:
            return
        self._until_s = began_s + state.lease_s if state.lease_s else -1.0
        self.holder, self.epoch = state.name, state.epoch
        if held != self.held:
            what = (
                f"owns the regions, epoch {self.epoch}" if self.held else f"stands by; {self.holder} owns the regions"
            )
            logger.warning("gateway: %s %s", self.owner, what)

    def _renew_or_take(self) -> State:
        if self._given_up:
            return State("", self.epoch, 0.0)
        rows = Owner.objects.filter(pk=ROW)
        wanted = rows.filter(token=self._token, wanted_at__gt=Now() - timedelta(seconds=WANTED_S)).exists()
        lease_s = LEASE_S if wanted else ALONE_S
        until = Now() + timedelta(seconds=lease_s)
        renewed = rows.filter(token=self._token).update(expires_at=until)
        if not renewed:
            before = rows.first() or Owner.objects.get_or_create(pk=ROW)[0]
            free = Q(token="") | Q(expires_at__lte=Now())
            if is_dead(before.token):
                free |= Q(token=before.token)
            renewed = rows.filter(free).update(
                token=self._token, name=self.owner, epoch=F("epoch") + 1, expires_at=until, wanted_at=None
            )
        if not renewed:
            rows.update(wanted_at=Now())
        row = rows.get()
        return State(row.name, row.epoch, lease_s if row.token == self._token else 0.0)

    async def give_up(self) -> None:
        """Stop being the owner, at once here, and in the row as soon as the database answers."""
        self._until_s, self._given_up = -1.0, True
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                await self._in_thread(lambda: Owner.objects.filter(pk=ROW, token=self._token).update(token=""))

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
