"""Records between processes: many in a frame of msgpack, over ZeroMQ, as vLLM's API servers talk to their engine cores.

Frames are numbered within a session. ZeroMQ delivers them in order and may lose some where a connection breaks: a gap ends
the session, and the relay begins another with everything that it has open, so nothing rests on a single frame. Between
machines frames are encrypted and both ends know each other, by CURVE keys that are made from the secret key of the
installation (`SECRET_KEY`).
"""

import hashlib
import logging
import socket
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import zmq
from django.conf import settings
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from controlplane.dispatch.port import Bye, FromDispatcher, FromGateway, Hello, Record, Welcome

logger = logging.getLogger(__name__)
TICK_S: Final = 0.25
"""Longest silence of an end: an empty frame says that it lives."""
SILENT_S: Final = 4.0
"""Silence after which the other end is given up."""
LINGER_MS: Final = 500
MAX_RECORDS: Final = 1_000
"""Of a frame."""
MAX_MESSAGES: Final = 100
"""Read at once, before other work of the event loop."""
Out = TypeVar("Out")
LeftOut = Callable[[Any], object]


class Frame(msgspec.Struct, Generic[Out], array_like=True, gc=False):
    session: int
    number: int
    """In its session and direction, from 0."""
    records: list[Out]


ToDispatcher = Hello | Bye | FromGateway
ToRelay = Welcome | Bye | FromDispatcher
_encoder = msgspec.msgpack.Encoder()


class Decoder:
    """Decoder of frames of *records*, a union. A record of another release that is none of them is left out alone."""

    def __init__(self, records: Any) -> None:
        self._frames = msgspec.msgpack.Decoder(Frame[records])
        self._raw, self._record = msgspec.msgpack.Decoder(Frame[msgspec.Raw]), msgspec.msgpack.Decoder(records)

    def decode(self, message: bytes) -> Frame[Any]:
        """Raises msgspec.ValidationError and msgspec.DecodeError for what is no frame."""
        try:
            return self._frames.decode(message)
        except msgspec.ValidationError:
            frame, records = self._raw.decode(message), list[Any]()
            for raw in frame.records:
                try:
                    records.append(self._record.decode(raw))
                except msgspec.ValidationError as error:
                    logger.warning("transport: a record of another release is left out: %s", error)
            return Frame(frame.session, frame.number, records)


of_relay = Decoder(ToDispatcher)
of_dispatcher = Decoder(ToRelay)


def encoded(session: int, number: int, records: Sequence[Record], left_out: LeftOut | None = None) -> bytes:
    """Return a frame of *records*. *left_out* gets those that msgpack cannot hold, as text with half a character in it."""
    try:
        return _encoder.encode((session, number, records))
    except (TypeError, ValueError, OverflowError):
        return _encoder.encode((session, number, [each for each in records if _is_encodable(each, left_out)]))


def _is_encodable(record: Record, left_out: LeftOut | None) -> bool:
    try:
        _encoder.encode(record)
    except (TypeError, ValueError, OverflowError):
        logger.exception("transport: a record cannot be sent: %s", type(record).__name__)
        if left_out is not None:
            left_out(record)
        return False
    return True


def machine() -> str:
    """Return an id of this machine, whose monotonic clock no other has; random where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{time.time()}"


def keys(who: str) -> tuple[bytes, bytes]:
    """Return the public and secret CURVE key of *who*, "relay" or "dispatcher", of this installation."""
    secret = z85.encode(hashlib.sha256(f"pilothouse {who} {settings.SECRET_KEY}".encode()).digest())
    return zmq.curve_public(secret), secret


def is_local(address: str) -> bool:
    return address.startswith(("ipc://", "inproc://"))


class KnownRelays:
    """Whose keys are taken, for ZeroMQ's authentication."""

    def callback(self, domain: str, key: bytes) -> bool:
        return key == keys("relay")[0]


class Socket:
    """A ZeroMQ socket on the event loop: *receive* gets the parts of each message.

    Its descriptor says only once that there is something, so everything is read each time.
    """

    context: zmq.Context[Any] | None = None
    authenticator: ThreadAuthenticator | None = None

    def __init__(self, loop: AbstractEventLoop, kind: int, receive: Callable[[list[bytes]], None]) -> None:
        if Socket.context is None:
            Socket.context = zmq.Context()
        self.loop, self.receive = loop, receive
        self._socket = Socket.context.socket(kind)
        self._socket.linger = LINGER_MS
        self._socket.set_hwm(0)
        self._descriptor = cast(int, self._socket.get(zmq.FD))

    def bind(self, address: str) -> str:
        """Listen on *address*; return it with its port. Raises zmq.ZMQError."""
        if not is_local(address):
            if Socket.authenticator is None:
                assert Socket.context is not None
                Socket.authenticator = ThreadAuthenticator(Socket.context)
                Socket.authenticator.start()
                Socket.authenticator.configure_curve_callback("*", KnownRelays())
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys("dispatcher")
        self._socket.bind(address)
        self._listen()
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        if not is_local(address):
            self._socket.curve_publickey, self._socket.curve_secretkey = keys("relay")
            self._socket.curve_serverkey = keys("dispatcher")[0]
        self._socket.connect(address)
        self._listen()

    def _listen(self) -> None:
        self.loop.add_reader(self._descriptor, self.read)
        self.loop.call_soon(self.read)

    def send(self, *parts: bytes) -> None:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # its peer has gone: the session ends by silence
            logger.debug("transport: not sent: %s", error)
        # Sending may take away the descriptor's notice of what has come meanwhile.
        if not self._socket.closed and cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self.loop.call_soon(self.read)

    def read(self) -> None:
        for _ in range(MAX_MESSAGES):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                logger.warning("transport: cannot be read: %s", error)
                return
            try:
                self.receive(parts)
            except Exception:
                logger.exception("transport: a message could not be taken")
        self.loop.call_soon(self.read)

    def close(self) -> None:
        if not self._socket.closed:
            self.loop.remove_reader(self._descriptor)
            self._socket.close()


class Outbox:
    """Records that leave together, after one iteration of the event loop, as numbered frames of a session."""

    left_out: LeftOut | None = None

    def __init__(self, loop: AbstractEventLoop, send: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self.loop, self._send, self.clock = loop, send, clock
        self.session = 0
        self.sent_s = clock()
        self._number = 0
        self._records: list[Record] = []

    def begin(self, session: int) -> None:
        """Begin *session*; what has not left is dropped."""
        self.session, self._number = session, 0
        self._records = []

    def add(self, record: Record) -> None:
        if not self._records:
            self.loop.call_soon(self.flush)
        self._records.append(record)

    def flush(self, *, empty: bool = False) -> None:
        records = self._records
        if not records and not empty:
            return
        self._records = []
        for at in range(0, len(records) or 1, MAX_RECORDS):
            self._send(encoded(self.session, self._number, records[at : at + MAX_RECORDS], self.left_out))
            self._number += 1
        self.sent_s = self.clock()


def advertised(address: str) -> str:
    """Return where other machines reach what listens on *address*: a wildcard stands for this host's name."""
    for wildcard in ("//*:", "//0.0.0.0:", "//[::]:"):
        address = address.replace(wildcard, f"//{socket.gethostname()}:")
    return address
