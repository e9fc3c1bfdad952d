"""A stream from an instance to the tenant: inspected, and written in the call that read it from the socket."""

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from controlplane.gateway.admission.validation import SPEECH, TYPED, Kind
from controlplane.gateway.serving.http import SSE_TYPE, Responder
from controlplane.gateway.serving.open_requests import Ticket
from controlplane.gateway.upstream.answers import MOST_TOKENS, EngineFailed, Said, Usage, error_of, ids_of, read, what
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection
from controlplane.gateway.upstream.sse import Events, SentEvent

TEXT = re.compile(rb'(?:content|reasoning|arguments|text)":"([^"\\]*)"')
TOKEN_ID = re.compile(rb'"token_ids":\[(\d+)\]')
DATA = b"data: "
DONE = b"[DONE]"  # the last event of a stream
OPENING = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})
"""Events without output that come first; vLLM sends those of a response before its engine has the request."""
ENDED = frozenset({"response.completed", "response.incomplete", "message_stop"})
LONGEST = 200  # characters of a fingerprint
END = b"\n\n\r\n"  # of an event, and of the HTTP chunk that it came in


def after_events(piece: bytes, events: int) -> int:
    """Return where the first *events* of *piece* end; its length if it has fewer."""
    at = 0
    for _ in range(events):
        at = piece.find(b"\n\n", at) + 2
        if at < 2:
            return len(piece)
    return at


def around_text(event: bytes) -> tuple[bytes, bytes]:
    """Return (prefix, suffix) around the text of *event*, one token; the suffix extends to the end of its HTTP chunk.

    Another event with the same ends and no quote between differs from it in its text alone. Empty bytes without a text.
    """
    text = TEXT.search(event)
    return (event[: text.start(1)], event[text.end(1) :] + END) if text is not None else (b"", b"")


class Withheld:
    """A stream without the usage that the tenant did not ask for: the closing event without choices, or a field of others.

    With a closing event, vLLM puts the server's fingerprint there instead of in the events that end the choices. The last of
    those is held back briefly until the fingerprint is known, so the tenant gets what the server alone would have sent.
    """

    __slots__ = ("_held", "_left", "fingerprint")

    def __init__(self, choices: int, fingerprint: str) -> None:
        self._left = choices
        self._held: tuple[bytes, Said] | None = None
        self.fingerprint = fingerprint
        """The server's last fingerprint; empty while unknown, or if the server has none."""

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return self._held is not None

    def take(self, event: SentEvent, said: Said | None) -> bytes:
        """Return the bytes for the tenant after *event*, parsed as *said*; None for the last event of all."""
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
        """Return the held bytes for the tenant: the next event has arrived, or the stream ends."""
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


MOST_SHAPES = 16
"""Shapes learned per stream at most: with log probabilities hardly any event repeats one."""

MOST_OPENING_BYTES = 2**22

OPENING_EVENTS = 3
"""Events of a piece that are read before the others are compared to them: a role, and two tokens."""


class Shape(NamedTuple):
    """Bytes around the text of a token."""

    prefix: bytes
    suffix: bytes
    end: bytes
    """The suffix, as far as it is of the event."""
    between: bytes
    """What two of its tokens that come together have between their texts."""

    @classmethod
    def of(cls, prefix: bytes, suffix: bytes) -> "Shape":
        end = suffix[: 2 - len(END)]
        return cls(prefix, suffix, end, end + prefix)

    def run(self, piece: bytes) -> tuple[int, int]:
        """Return (bytes, tokens) that *piece* begins with, of events that differ only in their texts."""
        begin = len(self.prefix)
        stop = piece.rfind(self.end, begin) if piece.startswith(self.prefix) else -1
        if stop < 0:
            return 0, 0
        texts = piece[begin:stop].split(self.between)
        text = b"".join(texts)
        if b'"' in text or b"\n" in text:
            return 0, 0
        return stop + len(self.end), len(texts)


class Stream:
    """One stream. *fingerprint*: the server's last one, as in `Withheld`. *began* is called at the first byte."""

    __slots__ = (
        "_began",
        "_connection",
        "_events",
        "_has_begun",
        "_open",
        "_opening",
        "_responder",
        "_shapes",
        "_shapes_left",
        "_ticket",
        "_unfinished",
        "_usage",
        "_withheld",
        "fingerprint",
    )

    def __init__(
        self,
        ticket: Ticket,
        responder: Responder,
        usage: Usage,
        fingerprint: str,
        began: Callable[[Ticket], None],
    ) -> None:
        self.fingerprint = fingerprint
        self._ticket, self._responder, self._usage, self._began = ticket, responder, usage, began
        kept_back = not ticket.call.include_usage
        self._withheld = Withheld(ticket.call.sequences, fingerprint) if kept_back else None
        self._connection: Connection | None = None  # once it passes its answer here
        self._events = Events()
        self._has_begun = False
        self._opening = b""  # sent before the engine began: written with the first token
        # Choices that have not finished. Each half minute of a sound finishes: only the last event ends it.
        self._unfinished: float = math.inf if ticket.call.kind in SPEECH else ticket.call.sequences
        self._open = False  # it has begun, and nothing of it is held back
        self._shapes: tuple[Shape, ...] = ()  # of events that were only a token, the latest first
        self._shapes_left = 0 if ticket.call.kind in TYPED else MOST_SHAPES

    async def carry(self, connection: Connection, begun_until_s: float) -> None:
        """Pass the answer of *connection* on to its end. Raises EngineFailed, Refusal, OSError.

        Raises TimeoutError if no token has come by *begun_until_s* of the event loop's clock, whatever else was sent.
        """
        responder = self._responder
        self._pass(connection)
        while True:
            await connection.wait(responder.look_in_s)
            if connection.complete and not self._events.between:
                self._take(b"\n\n")  # some leave out the last empty line
            if responder.held:
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
                await responder.drain()
            if not self._usage.whole:  # else the tenant has everything, and may have left
                connection.check()
                await responder.look()
            if not self._has_begun and asyncio.get_running_loop().time() > begun_until_s:
                raise TimeoutError("no token")
            if connection.complete or connection.failed:
                break
            connection.resume()
        if not self._has_begun:
            raise AnswerCutOff("the stream ended before it began")
        if not (self._usage.whole or self._unfinished <= 0):
            raise AnswerCutOff("the stream ended before its last event")
        rest = b""
        if self._withheld is not None:
            self.fingerprint = self._withheld.fingerprint
            rest = self._withheld.rest()
        await responder.finish(rest)

    def _pass(self, connection: Connection) -> None:
        self._connection = connection
        connection.pass_to(self._take, self._take_chunk)

    def _take(self, piece: bytes) -> bool:
        """Pass on the events that end with *piece*; False if the tenant has to read first."""
        passed: list[bytes] = []
        failure: Exception | None = None
        try:
            opening = len(piece) if self._shapes or not self._shapes_left else after_events(piece, OPENING_EVENTS)
            if not self._shapes:
                self._read_events(piece[:opening], passed)
                piece = piece[opening:]
            if piece:
                tokens = self._tokens(piece, passed)
                self._read_events(piece[tokens:] if tokens else piece, passed)
        except Exception as error:  # earlier events are passed on
            failure = error
        chunk = passed[0] if len(passed) == 1 else b"".join(passed)
        complete = self._connection is not None and self._connection.complete and self._usage.whole
        if complete and failure is None and not self._responder.held:
            self._responder.last += chunk
            taken = True
        else:
            taken = self._responder.write_now(chunk) if chunk else True
        if failure is not None:
            raise failure
        self._open = (
            taken and self._has_begun and self._events.between and not (self._withheld and self._withheld.holds)
        )
        return taken

    def _read_events(self, piece: bytes, passed: list[bytes]) -> None:
        """Add to *passed* the bytes for the tenant after the events that end with *piece*."""
        for event in self._events.feed(piece):
            unread = self._token(event) if self._shapes else None
            passed.append(self._event(event) if unread is None else unread)

    def _tokens(self, piece: bytes, passed: list[bytes]) -> int:
        """Pass on, unread, the tokens of one shape that *piece* begins with; return their bytes."""
        if not self._has_begun or not self._events.between or (self._withheld is not None and self._withheld.holds):
            return 0
        for shape in self._shapes:
            size, count = shape.run(piece)
            if count:
                self._ticket.output_tokens += count
                passed.append(piece if size == len(piece) else piece[:size])
                return size
        return 0

    def _shape_of(self, event: bytes) -> Shape | None:
        """Return the shape of *event* if it differs from an earlier token only in its text."""
        for shape in self._shapes:
            prefix, suffix = shape.prefix, shape.suffix
            end = len(event) - len(suffix) + len(END)
            if (
                event.startswith(prefix)
                and event.endswith(suffix[: -len(END)])
                and len(prefix) <= end
                and event.find(b'"', len(prefix), end) < 0
            ):
                return shape
        return None

    def _token(self, event: SentEvent) -> bytes | None:
        """Return the bytes for the tenant of *event*, unread, if it differs from an earlier token only in its text."""
        if event.name or (self._withheld is not None and self._withheld.holds):
            return None
        shape = self._shape_of(event.raw)
        if shape is None:
            return None
        self._ticket.output_tokens += 1
        return event.raw + b"\n\n"

    def _event(self, event: SentEvent) -> bytes:
        """Return the bytes for the tenant after *event*. Raises EngineFailed, Refusal."""
        typed = self._ticket.call.kind in TYPED
        if event.data == DONE:
            if not self._has_begun:
                raise EngineFailed("an empty stream")
            self._usage.whole = self._usage.whole or not typed  # which has another last event
            return self._less_usage(event, None)
        said = self._read(event)
        if typed:
            return self._typed(event, said)
        ticket, ends = self._ticket, said.ends
        if not self._has_begun:
            self._begin()
            if self._ticket.call.kind is Kind.CHAT:
                # Each choice begins with an event for its role alone.
                ticket.output_tokens -= self._ticket.call.sequences
        ticket.output_tokens += bool(said.choices)
        self._unfinished -= ends
        passed = self._less_usage(event, said)
        if self._shapes_left and not ends and said.choices and said.usage is None and not event.name:
            self._learn(event)
        return passed

    def _learn(self, event: SentEvent) -> None:
        """Remember the shape of *event*, a token."""
        self._shapes_left -= 1
        prefix, suffix = around_text(event.raw)
        if suffix:
            self._shapes = (Shape.of(prefix, suffix), *self._shapes)

    def _read(self, event: SentEvent) -> Said:
        """Read *event* and take its usage."""
        said = read(event.data)
        if said.choices is None or said.error is not None or said.object == "error" or event.name:
            error = error_of(said, event.name)
            if error is not None:
                raise error
        if self._ticket.call.kind not in TYPED:
            if said.choices is None:
                raise EngineFailed("an event without choices")
            if said.ends and said.broken_off:
                raise EngineFailed("an answer that was given up")
        usage = said.usage_said
        if usage is not None:
            self._usage.take(usage)
        return said

    def _begin(self) -> None:
        self._has_begun = True
        self._began(self._ticket)

    def _typed(self, event: SentEvent, said: Said) -> bytes:
        """`_event` for the Responses and the Messages API."""
        if not isinstance(said.type, str):
            raise EngineFailed("an event without a type")
        number = said.sequence_number
        if type(number) is int and 0 <= number < MOST_TOKENS:
            self._responder.sequence_number = number + 1
        if said.type == "message_delta" and not (isinstance(said.delta, dict) and said.delta.get("stop_reason")):
            raise EngineFailed("an answer that was given up")
        if not self._has_begun and said.type in OPENING:
            self._opening += event.raw + b"\n\n"
            if len(self._opening) > MOST_OPENING_BYTES:
                raise EngineFailed("one opening event after the other")
            return b""
        opening, self._opening = self._opening, b""
        if not self._has_begun:
            self._begin()
        self._ticket.output_tokens += said.type.endswith((".delta", "block_delta"))
        self._usage.whole = self._usage.whole or said.type in ENDED
        return opening + event.raw + b"\n\n"

    def _less_usage(self, event: SentEvent, said: Said | None) -> bytes:
        return event.raw + b"\n\n" if self._withheld is None else self._withheld.take(event, said)

    def _take_chunk(self, chunk: bytes, begin: int) -> bool:
        """Pass on an HTTP *chunk* unchanged if it is one event that differs from an earlier token only in its text."""
        if not self._open:
            return False
        for prefix, suffix, _, _ in self._shapes:
            if (
                chunk.endswith(suffix)
                and chunk.startswith(prefix, begin)
                and chunk.find(b'"', begin + len(prefix), -len(suffix)) < 0
            ):
                if not self._responder.write_chunk(chunk):
                    return False
                self._ticket.output_tokens += 1
                return True
        return False


EVENT_KIND = {Kind.CHAT: "chat.completion.chunk", Kind.COMPLETION: "text_completion"}


class KeptShape(NamedTuple):
    """Bytes around the text and the id of a token, and around its text in what the tenant gets."""

    prefix: bytes
    middle: bytes
    suffix: bytes
    shown: tuple[bytes, bytes]

    @classmethod
    def of(cls, event: bytes, passed: bytes) -> "KeptShape | None":
        """Return the shape of *event*, of which the tenant got *passed*; None if it was more than one token."""
        text = TEXT.search(event)
        ids = TOKEN_ID.search(event, text.end(1)) if text is not None else None
        if text is None or ids is None:
            return None
        around = event[: text.start(1)], event[text.end(1) : ids.start(1)], event[ids.end(1) :]
        shown = TEXT.search(passed)
        if shown is None or shown[1] != text[1] or passed.count(b"\n\n") != 1:
            return None
        return cls(*around, (passed[: shown.start(1)], passed[shown.end(1) :]))

    def token(self, event: bytes) -> tuple[bytes, int] | None:
        """Return text and id of *event* if it differs from the one learned in these alone."""
        if not (event.startswith(self.prefix) and event.endswith(self.suffix)):
            return None
        end = event.find(b'"', len(self.prefix))
        if end < 0 or not event.startswith(self.middle, end):
            return None
        number = event[end + len(self.middle) : len(event) - len(self.suffix)]
        return (event[len(self.prefix) : end], int(number)) if number.isdigit() else None


class KeptStream(Stream):
    """A stream that may be evicted: the token ids of each event are kept and removed.

    Events that differ from an earlier one in text and id alone are not parsed.

    Where an earlier instance began, the events of this one are made to look like its continuation: one id, one event with
    the role, chunks of a chat though a completion continues it, and one usage.
    """

    __slots__ = ("_before", "_continued", "_kept", "_shape")

    def __init__(
        self, ticket: Ticket, responder: Responder, usage: Usage, fingerprint: str, began: Callable[[Ticket], None]
    ) -> None:
        super().__init__(ticket, responder, usage, fingerprint, began)
        assert ticket.kept is not None
        self._kept = ticket.kept
        self._continued, self._before = self._kept.opened, len(self._kept.ids)
        self._shape: KeptShape | None = None

    def _pass(self, connection: Connection) -> None:
        self._connection = connection
        connection.pass_to(self._take)

    def _take(self, piece: bytes) -> bool:
        shape = self._shape
        if not self._open or shape is None or not piece.endswith(b"\n\n"):
            return super()._take(piece)
        events = piece[:-2].split(b"\n\n")
        tokens = [token for event in events if (token := shape.token(event)) is not None]
        if len(tokens) < len(events):
            return super()._take(piece)
        kept = self._kept
        for text, number in tokens:
            kept.ids.append(number)
            if text:
                kept.shown = len(kept.ids)
        self._ticket.output_tokens = len(kept.ids)
        before, after = shape.shown
        self._open = self._responder.write_now(b"".join([before + text + after for text, _ in tokens]))
        return self._open

    def _event(self, event: SentEvent) -> bytes:
        """Return the bytes of *event* for the tenant; its token ids are kept."""
        if event.data == DONE:
            return super()._event(event)
        said, kept = self._read(event), self._kept
        try:
            body: dict[str, Any] = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            raise EngineFailed(what(event.data)) from None
        if not self._has_begun:
            self._begin()
        if isinstance(body.get("usage"), dict):
            self._count(body["usage"])
        if not said.choices and self._continued:
            body["object"] = EVENT_KIND[self._ticket.call.kind]
        for choice in body["choices"]:
            self._keep(body, choice)
        self._unfinished -= said.ends
        self._ticket.output_tokens = len(kept.ids)
        if kept.head:
            body |= kept.head
        else:
            kept.head = {name: body[name] for name in ("id", "created") if name in body}
        data = orjson.dumps(body)
        passed = self._less_usage(SentEvent(DATA + data, b"", data), said)
        if self._shapes_left and said.choices and not said.ends and said.usage is None and not kept.lost_track:
            self._shapes_left -= 1  # the first token has the ids of the prompt besides
            self._shape = KeptShape.of(event.raw, passed) or self._shape
        return passed

    def _keep(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep the tokens of *choice*, and convert it to the kind that was requested."""
        kept, chat = self._kept, self._ticket.call.kind is Kind.CHAT
        if kept.prompt_ids is None:
            kept.prompt_ids = ids_of(choice.get("prompt_token_ids") or body.get("prompt_token_ids")) or None
        for where in (choice, body):
            if "prompt_token_ids" in where:
                where["prompt_token_ids"] = None
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        kept.opened = True
        if delta.get("role"):
            return
        ids = ids_of(choice.get("token_ids"))
        text = choice.get("text") if "text" in choice else delta.get("content")
        choice["token_ids"] = None
        kept.ids += ids
        kept.whole = bool(choice.get("finish_reason"))
        if not isinstance(text, str) or (text and not ids):
            kept.lost_track = True
        if text:
            kept.shown = len(kept.ids)
        if self._continued and chat:
            body["object"] = EVENT_KIND[Kind.CHAT]
            ends = {"stop_reason": choice.get("stop_reason")} if kept.whole else {}
            said = {"delta": {"content": text}, "logprobs": None, "finish_reason": choice.get("finish_reason")}
            body["choices"] = [{"index": 0, **said, **ends, "token_ids": None}]

    def _count(self, usage: dict[str, Any]) -> None:
        """Change *usage* to that of all instances together: the first prompt, and every token once."""
        here, before = Usage(), self._before
        here.take(usage)
        if here.prompt_tokens is not None:
            usage["prompt_tokens"] = self._usage.prompt_tokens = max(0, here.prompt_tokens - before)
        if here.output_tokens is not None:
            usage["completion_tokens"] = self._usage.output_tokens = here.output_tokens + before
