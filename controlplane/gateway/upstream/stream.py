"""What is read out of an answer while it is passed on: tokens, and the events of a stream."""

import re

import orjson

from controlplane.gateway.upstream.failures import ERROR_MARK

USAGE_MARK = b'"usage":{'
NO_CHOICES_MARK = b'"choices":[]'
FINISH_MARK = b'"finish_reason":"'
FINGERPRINT = re.compile(rb'"system_fingerprint":"(?:[^"\\]|\\.)*"')
TEXT = re.compile(rb'(?:content|reasoning|arguments|text)":"([^"\\]*)"')
DONE_MARK = b"data: [DONE]"  # the last event of a stream
END = b"\n\n\r\n"  # of an event, and of the HTTP chunk that it came in

# A Responses stream names its events. No line of text can look like one: JSON has no raw line ends.
OPENING_MARKS = (b"event: response.created\n", b"event: response.in_progress\n")
DELTA_MARK = b".delta\ndata: "
ENDED_MARK = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\n", re.MULTILINE)


class Usage:
    """Tokens of an answer, from its body or from the events of its stream."""

    __slots__ = ("output_tokens", "prompt_tokens", "whole")

    def __init__(self) -> None:
        self.whole = False  # a stream's last event was passed on
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None

    def read(self, body: bytes) -> None:
        """Take the usage out of a JSON body; leaves things as they are if there is none."""
        try:
            answer = orjson.loads(body)
            usage = answer.get("response", answer).get("usage")
        except (orjson.JSONDecodeError, AttributeError):
            return
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", self.prompt_tokens))
            self.output_tokens = usage.get("completion_tokens", usage.get("output_tokens", self.output_tokens))

    def read_events(self, events: bytes) -> None:
        """Take the last usage out of server-sent events."""
        at = events.rfind(USAGE_MARK)
        if at >= 0:
            start = events.rfind(b"data: ", 0, at) + 6
            end = events.find(b"\n\n", at)
            self.read(events[start : end if end >= 0 else None])


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of an unfinished one)."""
    if data.endswith(b"\n\n"):
        return data, b""
    cut = data.rfind(b"\n\n") + 2
    return (data[:cut], data[cut:]) if cut > 1 else (b"", data)


def only_opens(events: bytes) -> bool:
    """Whether *events* of a Responses stream are those that vLLM sends before it gives the request to its engine."""
    return sum(map(events.count, OPENING_MARKS)) == events.count(b"\n\n")


def around_text(event: bytes) -> tuple[bytes, bytes]:
    """(prefix, suffix) around the text of *event*, the suffix to the end of its HTTP chunk; no bytes if it says more.

    An event that begins and ends so, without a quote between, differs from it in its text alone.
    """
    text = TEXT.search(event)
    if text is None or any(mark in event for mark in (USAGE_MARK, FINISH_MARK, NO_CHOICES_MARK, ERROR_MARK)):
        return b"", b""
    return event[: text.start(1)], event[text.end(1) :] + END


class Withheld:
    """A stream less its closing usage event (`"choices":[]` with usage), which the tenant did not ask for.

    With that event vLLM moves the fingerprint of the server there, from the events that end the choices. The last of those
    is held back until the fingerprint is known, a moment; so the tenant gets what the server would have sent without us.
    """

    __slots__ = ("_held", "_left", "fingerprint")

    def __init__(self, choices: int, fingerprint: bytes) -> None:
        self._left = choices
        self._held = b""
        self.fingerprint = fingerprint
        """As the server last sent it, a name and a value of JSON; empty while it is not known, or the server has none."""

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def take(self, events: bytes) -> bytes:
        """What of *events*, whole ones, the tenant gets now."""
        if not self._held and FINISH_MARK not in events and NO_CHOICES_MARK not in events:
            return events
        passed = []
        for event in events.split(b"\n\n"):
            if not event:
                continue
            if NO_CHOICES_MARK in event and USAGE_MARK in event:
                stamp = FINGERPRINT.search(event)
                self.fingerprint = stamp[0] if stamp else b""
                continue
            passed.append(self.rest())
            if FINISH_MARK in event:
                self._left -= 1
                if not self._left:
                    self._held = event
                    continue
            passed.append((self._stamped(event) if FINISH_MARK in event else event) + b"\n\n")
        return b"".join(passed)

    def rest(self) -> bytes:
        """What has been held back, for the tenant: the next event is here, or the stream ends."""
        held, self._held = self._held, b""
        return self._stamped(held) + b"\n\n" if held else b""

    def _stamped(self, event: bytes) -> bytes:
        if not self.fingerprint or FINGERPRINT.search(event) or not event.endswith(b"}"):
            return event
        return event[:-1] + b"," + self.fingerprint + b"}"
