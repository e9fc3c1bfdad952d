"""The relay's end of its link: records go to the owner of the queues, in this process or another.

Whatever happens to owners, requests are open here until they have ended. While there is no owner they wait; the next one
gets all of them, in their order (`OpenRequests.opened`), and streams go on meanwhile.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import zmq
from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.lease import FIRST, Lease
from controlplane.dispatch.link import SILENT_S, TICK_S, Outbox, Socket, machine, of_dispatcher

logger = logging.getLogger(__name__)
HELLO_S: Final = 0.5
"""Period of asking an owner that has not answered."""
MAX_KEPT: Final = 20_000
"""Records that are kept for the next owner."""
OF_OPEN = port.Asked | port.Open | port.Advanced | port.Prefix | port.Finished | port.Left
"""Records that say something of open requests, which are registered with the next owner anyway."""


class Session:
    """A session with the owner at *address*, whose epoch is at least *epoch*."""

    def __init__(self, dispatchers: "Dispatchers", address: str, epoch: int) -> None:
        self.dispatchers, self.address, self.epoch = dispatchers, address, epoch
        loop, clock = asyncio.get_running_loop(), dispatchers.clock
        self.welcomed = False
        self.heard_s = self.asked_s = clock()
        self.shift_s = 0.0
        """Of the owner's clock, over ours."""
        self._expected = 0
        self._socket = Socket(loop, zmq.DEALER, self._receive)
        self._outbox = Outbox(loop, self._socket.send, clock)
        self._socket.connect(address)
        self.begin()

    def begin(self) -> None:
        """Ask for a session."""
        self.welcomed, self._expected = False, 0
        self.asked_s = now_s = self.dispatchers.clock()
        self._outbox.begin(time.time_ns())
        self._outbox.add(port.Hello(self.dispatchers.number, self._outbox.session, self.dispatchers.machine, now_s))
        self._outbox.flush()

    def tick(self) -> None:
        now_s = self.dispatchers.clock()
        if self.welcomed and now_s - self.heard_s > SILENT_S:
            logger.warning("relay: the owner at %s is silent", self.address)
            self.begin()
        elif not self.welcomed and now_s - self.asked_s >= HELLO_S:
            self.begin()
        elif self.welcomed and now_s - self._outbox.sent_s >= TICK_S:
            self._outbox.flush(empty=True)

    def send(self, record: port.FromGateway) -> None:
        if self.shift_s:
            if isinstance(record, port.Asked):
                record = replace(record, arrived_s=record.arrived_s + self.shift_s)
            elif isinstance(record, port.Open):
                placed = record.placed
                if placed is not None:
                    placed = replace(placed, placed_s=placed.placed_s + self.shift_s)
                asked = replace(record.asked, arrived_s=record.asked.arrived_s + self.shift_s)
                record = replace(record, asked=asked, placed=placed)
        self._outbox.add(record)

    def _receive(self, parts: list[bytes]) -> None:
        frame = of_dispatcher.decode(parts[-1])
        if frame.session != self._outbox.session:
            return
        first = frame.records[0] if frame.records else None
        if isinstance(first, port.Bye):
            self.begin() if self.welcomed else None
            return
        if frame.number != self._expected:
            logger.warning("relay: frames of the owner at %s were lost", self.address)
            self.begin()
            return
        self._expected += 1
        self.heard_s = self.dispatchers.clock()
        for record in frame.records:
            match record:
                case port.Bye():
                    self.begin()
                    return
                case port.Welcome():
                    self._welcome(record)
                case port.Hello():
                    pass
                case _:
                    self.dispatchers.received(self, record)

    def _welcome(self, welcome: port.Welcome) -> None:
        if welcome.owns.get(FIRST, 0) < self.epoch:
            return  # of before it lost the queues
        self.epoch = welcome.owns[FIRST]
        there_s = (self.asked_s + self.heard_s) / 2
        self.shift_s = 0.0 if welcome.machine == self.dispatchers.machine else welcome.clock_s - there_s
        self.welcomed = True
        self.dispatchers.open_all(self.send)

    def close(self) -> None:
        if self.welcomed:
            self._outbox.add(port.Bye(self._outbox.session))
            self._outbox.flush()
        self._socket.close()


class Dispatchers:
    """*local* takes records where this process owns the queues (None: it never does); *opened* lists what is open, and
    *receive* gets the owner's records. *number* is this relay's.
    """

    def __init__(
        self,
        lease: Lease,
        local: port.Send | None,
        *,
        number: int,
        receive: port.Deliver,
        opened: Callable[[], Iterable[port.FromGateway]],
        clock: Callable[[], float],
    ) -> None:
        self.lease, self.local, self.number = lease, local, number
        self.receive, self.opened, self.clock = receive, opened, clock
        self.machine = machine()
        self.session: Session | None = None
        self.epoch = 0
        """The highest that is known of an owner: placements of an earlier one are refused."""
        self._kept: deque[port.FromGateway] = deque(maxlen=MAX_KEPT)
        """What does not belong to open requests and has no owner to go to yet."""
        self._local_epoch = 0
        """Of this process as the owner, where that was told what is open."""

    @property
    def reachable(self) -> bool:
        """Whether requests may wait for an owner: there is one, or the last one could be reached by another process."""
        return self.lease.held or (self.session is not None) or bool(self.lease.first.address)

    @property
    def connected(self) -> bool:
        """Whether an owner takes records at this moment."""
        return bool(self.lease.first.lease_s) if self.session is None else self.session.welcomed

    def may_send(self) -> bool:
        """Whether an instance may be given a request that was placed there.

        Not once this process was frozen until its right ran out: the next owner has given the room to others.
        """
        return self.session is not None or self.lease.held

    def send(self, record: port.FromGateway) -> None:
        if self.session is not None:
            if self.session.welcomed:
                self.session.send(record)
                return
        elif (
            self.local is not None and self.lease.first.lease_s
        ):  # even while that is not renewed: it places nothing then
            self.local(record)
            return
        if not isinstance(record, OF_OPEN):
            self._kept.append(record)

    def open_all(self, send: port.Send) -> None:
        """Register what is open here with a new owner."""
        for record in self.opened():
            send(record)
        while self._kept:
            send(self._kept.popleft())

    def received(self, session: Session, record: port.FromDispatcher) -> None:
        """Take *record* of an owner, unless that is one no longer."""
        if isinstance(record, port.Placed):
            if record.epoch < self.epoch:
                return  # it is registered with the next owner
            if session.shift_s:
                record = replace(record, placed_s=record.placed_s - session.shift_s)
        self.receive(record)

    async def run(self) -> None:
        while True:
            self.follow()
            await asyncio.sleep(TICK_S)

    def follow(self) -> None:
        """Have a session with the present owner of the queues."""
        owner = self.lease.first
        self.epoch = max(self.epoch, owner.epoch)
        session = self.session
        if owner.lease_s:
            if session is not None:
                session.close()
                self.session = None
            if self.local is not None and self._local_epoch != owner.epoch:
                self._local_epoch = owner.epoch
                self.open_all(self.local)
        elif (
            owner.address
            and owner.name != self.lease.owner
            and (session is None or session.address != owner.address or session.epoch < owner.epoch)
        ):
            if session is not None:
                session.close()
            self.session = Session(self, owner.address, owner.epoch)
        if self.session is not None:
            self.session.tick()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
