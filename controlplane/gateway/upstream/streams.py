"""A stream from an instance to the tenant: inspected, and written in the call that read it from the socket."""

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any

import orjson

from controlplane.gateway.admission.validation import SPEECH, TYPED, Kind
from controlplane.gateway.progress import Progress
from controlplane.gateway.serving.http import SSE_TYPE, Responder
from controlplane.gateway.upstream.answers import (
    MAX_TOKENS,
    EngineFailed,
    InstanceMessage,
    Usage,
    describe_payload,
    error_of,
    ids_of,
    read,
)
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection
from controlplane.gateway.upstream.sse import Events, SentEvent

TOKEN_ID = re.compile(rb'"token_ids":\[(\d+)\]')
NO_TEXT = re.compile(rb'"(?:content|text)":""')
GOES_ON = b'"finish_reason":null'
DATA = b"data: "
DONE = b"[DONE]"  # the last event of a stream
OPENING = frozenset({"response.created", "response.queued", "response.in_progress", "message_start", "ping"})
"""Events without output that come first; vLLM sends those of a response before its engine has the request."""
ENDED = frozenset({"response.completed", "response.incomplete", "message_stop"})


def tokens_of(piece: bytes) -> int:
    """Return the number of events in *piece* if each is a token of an open choice and nothing else; otherwise 0.

    The patterns cannot be in a text: inside a JSON string every quote is escaped.
    """
    events = piece.count(GOES_ON)
    plain = (
        events
        and piece.startswith(DATA)
        and piece.endswith(b"\n\n")
        and piece.count(b"\n") == 2 * events
        and piece.find(b'"usage":{') < 0
        and piece.find(b'"error"') < 0
    )
    return events if plain else 0


def _without_usage(event: SentEvent) -> bytes:
    """Return *event* without the usage that its tenant did not ask for. Raises EngineFailed."""
    try:
        body = json.loads(event.data)
    except (ValueError, RecursionError):  # numbers of thousands of digits
        raise EngineFailed(describe_payload(event.data)) from None
    del body["usage"]
    return DATA + json.dumps(body, separators=(",", ":")).encode()


MAX_OPENING_BYTES = 2**22


class Stream:
    """One stream. *began* is called at the first byte."""

    __slots__ = (
        "_began",
        "_connection",
        "_events",
        "_has_begun",
        "_opening",
        "_progress",
        "_responder",
        "_typed_events",
        "_unfinished",
        "_usage",
    )

    def __init__(
        self,
        progress: Progress,
        responder: Responder,
        usage: Usage,
        began: Callable[[Progress], None],
    ) -> None:
        self._progress, self._responder, self._usage, self._began = progress, responder, usage, began
        self._connection: Connection | None = None  # once it passes its answer here
        self._events = Events()
        self._has_begun = False
        self._opening = b""  # sent before the engine began: written with the first token
        # Choices that have not finished. Each half minute of a sound finishes: only the last event ends it.
        self._unfinished: float = math.inf if progress.call.kind in SPEECH else progress.call.sequences
        self._typed_events = progress.call.kind in TYPED

    async def carry(self, connection: Connection, begun_until_s: float) -> None:
        """Pass the answer of *connection* on to its end. Raises EngineFailed, Refusal, OSError.

        Raises TimeoutError if no token has come by *begun_until_s* of the event loop's clock, whatever else was sent.
        """
        responder = self._responder
        self._connection = connection
        connection.pass_to(self._take)
        while True:
            await connection.wait(responder.ping_in_s)
            if connection.complete and not self._events.between:
                self._take(b"\n\n")  # some leave out the last empty line
            if responder.held:
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
                await responder.drain()
            if not self._usage.whole:  # else the tenant has everything, and may have left
                connection.check()
                await responder.ping_if_silent()
            if not self._has_begun and asyncio.get_running_loop().time() > begun_until_s:
                raise TimeoutError("no token")
            if connection.complete or connection.failed:
                break
            connection.resume()
        if not self._has_begun:
            raise AnswerCutOff("the stream ended before it began")
        if not (self._usage.whole or self._unfinished <= 0):
            raise AnswerCutOff("the stream ended before its last event")
        responder.completed(self._usage)
        await responder.finish()

    def _take(self, piece: bytes) -> bool:
        """Pass on the events that end with *piece*; False if the tenant has to read first."""
        passed: list[bytes] = []
        failure: Exception | None = None
        try:
            if self._events.between and (whole := self._unread(piece)):
                passed.append(whole)
            else:
                for event in self._events.feed(piece):
                    passed.append(self._unread(event.raw + b"\n\n") or self._event(event))  # noqa: PERF401 (it raises)
        except Exception as error:  # earlier events are passed on
            failure = error
        chunk = passed[0] if len(passed) == 1 else b"".join(passed)
        complete = self._connection is not None and self._connection.complete and self._usage.whole
        if self._usage.whole:
            self._responder.completed(self._usage)
        if complete and failure is None and not self._responder.held:
            self._responder.last += chunk
            taken = True
        else:
            taken = self._responder.write_now(chunk) if chunk else True
        if failure is not None:
            raise failure
        return taken

    def _unread(self, piece: bytes) -> bytes:
        """Return the bytes for the tenant of *piece*, and count its tokens, if it need not be read; else empty bytes."""
        if not self._has_begun or self._typed_events:
            return b""
        tokens = tokens_of(piece)
        self._progress.output_tokens += tokens
        return piece if tokens else b""

    def _event(self, event: SentEvent) -> bytes:
        """Return the bytes for the tenant after *event*. Raises EngineFailed, Refusal."""
        typed = self._typed_events
        if event.data == DONE:
            if not self._has_begun:
                raise EngineFailed("an empty stream")
            self._usage.whole = self._usage.whole or not typed  # which has another last event
            return event.raw + b"\n\n"
        said = self._read(event)
        if typed:
            return self._typed(event, said)
        progress, ends = self._progress, said.ends
        if not self._has_begun:
            self._begin()
            if self._progress.call.kind is Kind.CHAT:
                # Each choice begins with an event for its role alone.
                progress.output_tokens -= self._progress.call.sequences
        progress.output_tokens += bool(said.choices)
        self._unfinished -= ends
        return self._less_usage(event, said)

    def _read(self, event: SentEvent) -> InstanceMessage:
        """Read *event* and take its usage."""
        said = read(event.data)
        if said.choices is None or said.error is not None or said.object == "error" or event.name:
            error = error_of(said, event.name)
            if error is not None:
                raise error
        if not self._typed_events:
            if said.choices is None:
                raise EngineFailed("an event without choices")
            if said.ends and said.broken_off:
                raise EngineFailed("an answer that was given up")
        usage = said.raw_usage
        if usage is not None:
            self._usage.update(usage)
        return said

    def _begin(self) -> None:
        self._has_begun = True
        self._began(self._progress)

    def _typed(self, event: SentEvent, said: InstanceMessage) -> bytes:
        """`_event` for the Responses and the Messages API."""
        if not isinstance(said.type, str):
            raise EngineFailed("an event without a type")
        number = said.sequence_number
        if type(number) is int and 0 <= number < MAX_TOKENS:
            self._responder.sequence_number = number + 1
        if said.type == "message_delta" and not (isinstance(said.delta, dict) and said.delta.get("stop_reason")):
            raise EngineFailed("an answer that was given up")
        if not self._has_begun and said.type in OPENING:
            self._opening += event.raw + b"\n\n"
            if len(self._opening) > MAX_OPENING_BYTES:
                raise EngineFailed("one opening event after the other")
            return b""
        opening, self._opening = self._opening, b""
        if not self._has_begun:
            self._begin()
        self._progress.output_tokens += said.type.endswith((".delta", "block_delta"))
        self._usage.whole = self._usage.whole or said.type in ENDED
        return opening + event.raw + b"\n\n"

    def _less_usage(self, event: SentEvent, said: InstanceMessage) -> bytes:
        """Return the bytes for the tenant: without its usage, where that was not asked for."""
        if self._progress.call.include_usage or not isinstance(said.usage, dict):
            return event.raw + b"\n\n"
        return _without_usage(event) + b"\n\n" if said.choices else b""


EVENT_KIND = {Kind.CHAT: "chat.completion.chunk", Kind.COMPLETION: "text_completion"}


class KeptStream(Stream):
    """A stream that may be evicted: the token ids of each event are kept and removed.

    Of a stream that no other began, events with one token and nothing else are not parsed.

    Where an earlier instance began, the events of this one are made to look like its continuation: one id, one event with
    the role, chunks of a chat though a completion continues it, and one usage.
    """

    __slots__ = ("_before", "_continued", "_kept")

    def __init__(
        self, progress: Progress, responder: Responder, usage: Usage, began: Callable[[Progress], None]
    ) -> None:
        super().__init__(progress, responder, usage, began)
        assert progress.kept is not None
        self._kept = progress.kept
        self._continued, self._before = self._kept.opened, len(self._kept.ids)

    def _unread(self, piece: bytes) -> bytes:
        kept = self._kept
        ids = TOKEN_ID.findall(piece)
        if self._continued or not kept.ids or not ids or len(ids) != tokens_of(piece):
            return b""
        for number, event in zip(ids, piece.split(b"\n\n"), strict=False):
            kept.ids.append(int(number))
            if NO_TEXT.search(event) is None:
                kept.shown = len(kept.ids)
        self._progress.output_tokens = len(kept.ids)
        return TOKEN_ID.sub(b'"token_ids":null', piece)

    def _event(self, event: SentEvent) -> bytes:
        """Return the bytes of *event* for the tenant; its token ids are kept."""
        if event.data == DONE:
            return super()._event(event)
        said, kept = self._read(event), self._kept
        try:
            body: dict[str, Any] = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            raise EngineFailed(describe_payload(event.data)) from None
        if not self._has_begun:
            self._begin()
        if isinstance(body.get("usage"), dict):
            self._count(body["usage"])
        if not said.choices and self._continued:
            body["object"] = EVENT_KIND[self._progress.call.kind]
        for choice in body["choices"]:
            self._keep(body, choice)
        self._unfinished -= said.ends
        self._progress.output_tokens = len(kept.ids)
        if kept.head:
            body |= kept.head
        else:
            kept.head = {name: body[name] for name in ("id", "created") if name in body}
        data = orjson.dumps(body)
        return self._less_usage(SentEvent(DATA + data, b"", data), said)

    def _keep(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep the tokens of *choice*, and convert it to the kind that was requested."""
        kept, chat = self._kept, self._progress.call.kind is Kind.CHAT
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
        here.update(usage)
        if here.prompt_tokens is not None:
            usage["prompt_tokens"] = self._usage.prompt_tokens = max(0, here.prompt_tokens - before)
        if here.output_tokens is not None:
            usage["completion_tokens"] = self._usage.output_tokens = here.output_tokens + before
