"""The dispatcher's end of the transport: each record for a request goes to the relay that carries it.

The relay of this process gets its records by direct calls, others over ZeroMQ (`controlplane.dispatch.transport`). A relay
that says nothing for `SILENT_S` has gone, and so have its requests.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import zmq

from controlplane.dispatch import port
from controlplane.dispatch.port import relay_of
from controlplane.dispatch.transport import SILENT_S, TICK_S, Outbox, Socket, machine, of_relay
from controlplane.jobs.record import Job

logger = logging.getLogger(__name__)
GONE_S: Final = SILENT_S + 2.0
"""Silence after which a relay's requests end: it tries again before that."""
MAX_PREFIXES: Final = 10_000
INTERNAL_ERROR = "The request could not be queued because of an internal error."


class Peer:
    """A relay of another process, in a session."""

    def __init__(self, identity: bytes, hello: port.Hello, outbox: Outbox, now_s: float) -> None:
        self.identity, self.relay, self.session = identity, hello.relay, hello.session
        self.outbox = outbox
        self.expected = 1
        """Number of its next frame."""
        self.heard_s = now_s


class Relays:
    """*take* gets what relays send; *local* is the relay of this process, with its number; *left* is called with one that
    has gone. *owns*: the epoch of each role of this process, while it is their owner.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        number: int,
        local: port.Deliver,
        take: Callable[[port.FromGateway], None],
        left: Callable[[int], None],
        owns: Callable[[], dict[str, int]],
    ) -> None:
        self.clock, self.number, self.local = clock, number, local
        self._take, self._left, self._owns = take, left, owns
        self.peers: dict[int, Peer] = {}
        """By number of the relay."""
        self._by_identity: dict[bytes, Peer] = {}
        self._socket: Socket | None = None
        self._models: port.ServedModels | None = None
        self._prefixes: dict[int, int] = {}
        """The relay that has the text of a system prompt, by its hash."""
        self._machine = machine()

    def listen(self, address: str) -> str:
        """Listen for relays on *address*; return it with its port. Raises zmq.ZMQError."""
        self._socket = Socket(asyncio.get_running_loop(), zmq.ROUTER, self._receive)
        return self._socket.bind(address)

    def close(self) -> None:
        self.announce()
        if self._socket is not None:
            self._socket.close()

    async def run(self, job: Job) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                self.tick()

    def tick(self) -> None:
        """Say to every relay that this process lives, and give up those that say nothing."""
        now_s = self.clock()
        for peer in list(self.peers.values()):
            if now_s - peer.heard_s > GONE_S:
                logger.warning("dispatcher: relay %d has gone", peer.relay)
                self._end(peer)
            elif now_s - peer.outbox.sent_s >= TICK_S:
                peer.outbox.flush(empty=True)

    def announce(self) -> None:
        """Say what this process owns now; where that is nothing, end all sessions."""
        owns = self._owns()
        for peer in list(self.peers.values()):
            peer.outbox.add(self._welcome(peer.session, owns) if owns else port.Bye(peer.session))
            peer.outbox.flush()
            if not owns:
                self._forget(peer)

    def _welcome(self, session: int, owns: dict[str, int]) -> port.Welcome:
        return port.Welcome(session, self._machine, self.clock(), owns, tuple(self.peers))

    # To relays

    def deliver(self, record: port.FromDispatcher) -> None:
        match record:
            case port.ServedModels() | port.Room() | port.Spent():
                if isinstance(record, port.ServedModels):
                    self._models = record
                self.local(record)
                for peer in self.peers.values():
                    peer.outbox.add(record)
            case port.WarmPrefix():
                relay = self._prefixes.get(record.prefix, self.number)
                self._send(relay if relay in self.peers else self.number, record)
            case port.Warm():
                self.local(record)
            case _:
                self._send(relay_of(record.number), record)

    def _send(self, relay: int, record: port.FromDispatcher) -> None:
        if relay == self.number:
            self.local(record)
        elif (peer := self.peers.get(relay)) is not None:
            peer.outbox.add(record)

    # From relays

    def _receive(self, parts: list[bytes]) -> None:
        identity, message = parts
        frame = of_relay.decode(message)
        peer = self._by_identity.get(identity)
        first = frame.records[0] if frame.records else None
        if isinstance(first, port.Hello):
            self._begin(identity, first)
        elif peer is None or peer.session != frame.session or peer.expected != frame.number:
            if peer is not None and frame.session < peer.session:
                return  # of before it began again
            outbox = self._outbox(identity)
            outbox.begin(frame.session)
            outbox.add(port.Bye(frame.session))
            outbox.flush()
        else:
            peer.heard_s = self.clock()
            peer.expected += 1
            for record in frame.records:
                if isinstance(record, port.Bye):
                    self._end(peer)
                    return
                if not isinstance(record, port.Hello):
                    self._take_of(peer, record)

    def _take_of(self, peer: Peer, record: port.FromGateway) -> None:
        try:
            if isinstance(record, port.Asked) and record.system_blocks:
                if len(self._prefixes) > MAX_PREFIXES:
                    self._prefixes.clear()
                self._prefixes[record.prefix_hashes[record.system_blocks - 1]] = peer.relay
            self._take(record)
        except Exception:
            logger.exception(
                "dispatcher: a record of relay %d could not be taken: %s", peer.relay, type(record).__name__
            )
            if isinstance(record, port.Asked | port.Open):
                self.deliver(port.Refused(record.number, 500, "internal_error", INTERNAL_ERROR, retry_after_s=5))

    def _begin(self, identity: bytes, hello: port.Hello) -> None:
        """Begin a session with a relay, whose requests of an earlier one are void."""
        owns = self._owns()
        if not owns:
            return  # it asks again, or finds the owner
        if (before := self.peers.get(hello.relay)) is not None:
            if (before.session, before.identity) == (hello.session, identity):  # a gap shows where the answer was lost
                return
            self._end(before)
        outbox = self._outbox(identity)
        peer = Peer(identity, hello, outbox, self.clock())
        outbox.begin(hello.session)
        self.peers[hello.relay] = self._by_identity[identity] = peer
        if self._models is not None:  # before it is asked for any
            outbox.add(self._models)
        self.announce()

    def _outbox(self, identity: bytes) -> Outbox:
        def send(frame: bytes) -> None:
            if self._socket is not None:
                self._socket.send(identity, frame)

        return Outbox(asyncio.get_running_loop(), send, self.clock)

    def _end(self, peer: Peer) -> None:
        self._forget(peer)
        self._left(peer.relay)
        self.announce()

    def _forget(self, peer: Peer) -> None:
        self.peers.pop(peer.relay, None)
        self._by_identity.pop(peer.identity, None)
