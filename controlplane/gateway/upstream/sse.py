"""Server-sent events by the standard (HTML, section 9.2), assembled from pieces split anywhere."""

from typing import NamedTuple

from controlplane.gateway.upstream.answers import EngineFailed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT_BYTES = 2**26
"""Longest event, since an incomplete one is held in memory."""


class SentEvent(NamedTuple):
    """One event as passed on: lines end with LF, without comments and unused fields."""

    raw: bytes
    """The event without its terminating empty line."""
    name: bytes
    data: bytes


class Events:
    """The events of one stream."""

    __slots__ = ("_after_cr", "_begun", "_held", "_held_bytes")

    def __init__(self) -> None:
        self._held: list[bytes] = []  # the beginning of an event
        self._held_bytes = 0
        self._begun = False  # a byte order mark is allowed only before the first event
        self._after_cr = False  # the line ended with CR: a following LF belongs to it

    @property
    def between(self) -> bool:
        """Whether the next byte begins an event."""
        return not self._held and not self._after_cr

    def feed(self, piece: bytes) -> list[SentEvent]:
        """Return the events that end with *piece*. Raises EngineFailed for one that does not end."""
        last = len(piece) - 2
        if (  # a single event, as most are
            piece.find(b"\n") == last
            and self._begun
            and not self._held
            and not self._after_cr
            and piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and b"\r" not in piece
        ):
            return [SentEvent(piece[:last], b"", piece[6:last])]
        if not self._begun:
            piece = b"".join(self._held) + piece
            self._held = [piece] if len(piece) < 3 and BYTE_ORDER_MARK.startswith(piece) and piece else []
            if self._held or not piece:
                return []
            self._begun, piece = True, piece.removeprefix(BYTE_ORDER_MARK)
        if self._after_cr and piece:
            self._after_cr, piece = False, piece.removeprefix(b"\n")
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not self._held:
            piece = piece.lstrip(b"\n")
        elif b"\n\n" in self._held[-1][-1:] + piece:
            piece, self._held, self._held_bytes = b"".join(self._held) + piece, [], 0
        *blocks, rest = piece.split(b"\n\n")
        if blocks:
            rest = rest.lstrip(b"\n")
        if rest:
            self._held.append(rest)
            self._held_bytes += len(rest)
            if self._held_bytes > MAX_EVENT_BYTES:
                raise EngineFailed(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> SentEvent | None:
    """Return the event in the lines of *block*; None without data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return SentEvent(block, b"", block[6:])
    name, data = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    if not data:
        return None
    lines = [b"data: " + line for line in data]
    return SentEvent(b"\n".join([b"event: " + name, *lines] if name else lines), name, b"\n".join(data))
