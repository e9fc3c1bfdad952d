"""What of a stream's events the tenant gets: all but the usage that it did not ask for."""

import json
import re

from controlplane.gateway.upstream.answers import Said, what
from controlplane.gateway.upstream.failures import EngineFailed
from controlplane.gateway.upstream.sse import SentEvent

TEXT = re.compile(rb'(?:content|reasoning|arguments|text)":"([^"\\]*)"')
DATA = b"data: "
DONE = b"[DONE]"  # the last event of a stream
OPENING = frozenset({"response.created", "response.queued", "response.in_progress"})
"""What vLLM says of a response before it gives the request to its engine."""
DELTA = b".delta"  # how the names of events with a piece of a response end
ENDED = frozenset({"response.completed", "response.incomplete"})
LONGEST = 200  # characters of a fingerprint
END = b"\n\n\r\n"  # of an event, and of the HTTP chunk that it came in


def around_text(event: bytes) -> tuple[bytes, bytes]:
    """(prefix, suffix) around the text of *event*, a token and no more, the suffix to the end of its HTTP chunk.

    An event that begins and ends so, without a quote between, differs from it in its text alone. No bytes without a text.
    """
    text = TEXT.search(event)
    return (event[: text.start(1)], event[text.end(1) :] + END) if text is not None else (b"", b"")


class Withheld:
    """A stream less the usage that the tenant did not ask for: the closing event without choices, or what others bear.

    With the closing event vLLM moves the fingerprint of the server there, from the events that end the choices. The last of
    those is held back until the fingerprint is known, a moment; so the tenant gets what the server would have sent without
    us.
    """

    __slots__ = ("_held", "_left", "fingerprint")

    def __init__(self, choices: int, fingerprint: str) -> None:
        self._left = choices
        self._held: tuple[bytes, Said] | None = None
        self.fingerprint = fingerprint
        """As the server last sent it; empty while it is not known, or the server has none."""

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return self._held is not None

    def take(self, event: SentEvent, said: Said | None) -> bytes:
        """What the tenant gets now that *event* came, and *said* is what it says; None of the last event of all."""
        if said is None or (said.usage is None and not said.ends):
            return self.rest() + event.raw + b"\n\n" if self._held is not None else event.raw + b"\n\n"
        usage, fingerprint = isinstance(said.usage, dict), said.system_fingerprint
        if usage and not said.choices:
            self.fingerprint = fingerprint if isinstance(fingerprint, str) and len(fingerprint) <= LONGEST else ""
            return b""
        raw, passed = (_without_usage(event) if usage else event.raw), self.rest()
        if said.ends:
            self._left -= said.ends
            if self._left <= 0:
                self._held = raw, said
                return passed
            raw = self._stamped(raw, said)
        return passed + raw + b"\n\n"

    def rest(self) -> bytes:
        """What has been held back, for the tenant: the next event is here, or the stream ends."""
        held, self._held = self._held, None
        return self._stamped(*held) + b"\n\n" if held is not None else b""

    def _stamped(self, raw: bytes, said: Said) -> bytes:
        if not self.fingerprint or said.system_fingerprint is not None or not raw.endswith(b"}"):
            return raw
        return b'%b,"system_fingerprint":%b}' % (raw[:-1], json.dumps(self.fingerprint).encode())


def _without_usage(event: SentEvent) -> bytes:
    try:
        body = json.loads(event.data)
    except (ValueError, RecursionError):  # numbers of thousands of digits
        raise EngineFailed(what(event.data)) from None
    del body["usage"]
    return DATA + json.dumps(body, separators=(",", ":")).encode()
