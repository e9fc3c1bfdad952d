"""A stream that may be evicted: as `passage.Stream`, but each event is read, the ids of its tokens kept and taken out.

Where an earlier instance began, the events of this one are made to look as if that one had gone on: one id, one event with
the role, chunks of a chat though a completion goes on with it, and one usage.
"""

from collections.abc import Callable
from typing import Any

import orjson

from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.serving.continuation import Kept
from controlplane.gateway.serving.responder import SSE_TYPE, Responder
from controlplane.gateway.serving.ticket import Ticket
from controlplane.gateway.upstream.connections import AnswerCutOff, Connection
from controlplane.gateway.upstream.failures import ERROR_MARK, engine_failure
from controlplane.gateway.upstream.stream import DONE_MARK, Usage, Withheld, split_events

BEGIN = b"data: "
EVENT_KIND = {Kind.CHAT: "chat.completion.chunk", Kind.COMPLETION: "text_completion"}


class KeptStream:
    """*fingerprint*: `Withheld.fingerprint`, as the server last sent it. *began* is called at its first byte."""

    def __init__(
        self,
        ticket: Ticket,
        kept: Kept,
        responder: Responder,
        usage: Usage,
        fingerprint: bytes,
        began: Callable[[Ticket], None],
    ) -> None:
        self.fingerprint = fingerprint
        self._ticket, self._kept, self._responder, self._usage, self._began = ticket, kept, responder, usage, began
        self._withheld = None if ticket.call.include_usage else Withheld(1, fingerprint)
        self._unfinished = b""
        self._has_begun = False
        self._continued = kept.opened
        self._kept_before = len(kept.ids)

    async def carry(self, connection: Connection) -> None:
        """Pass the answer of *connection* on to its end. Raises Evicted, EngineFailed, OSError."""
        responder = self._responder
        connection.pass_to(self._take)
        while True:
            await connection.wait()
            if responder.held:
                if not responder.started:
                    await responder.start(200, SSE_TYPE, stream=True)
                await responder.drain()
            if not self._usage.whole:  # else the tenant has everything, and may have gone
                connection.check()
            if connection.complete or connection.failed:
                break
            connection.resume()
        if not self._usage.whole:
            raise AnswerCutOff("the stream ended before its last event")
        rest = b""
        if self._withheld is not None:
            self.fingerprint = self._withheld.fingerprint
            rest = self._withheld.rest()
        await responder.finish(rest)

    def _take(self, chunk: bytes) -> bool:
        """Pass on what of *chunk* are whole events; False if the tenant has to read first."""
        chunk, self._unfinished = split_events(self._unfinished + chunk)
        if not chunk:
            return True
        failure = engine_failure(chunk) if ERROR_MARK in chunk else None
        if failure is not None:
            raise failure
        if not self._has_begun:
            self._has_begun = True
            self._began(self._ticket)
        passed = b"".join(filter(None, map(self._event, chunk.split(b"\n\n"))))
        self._ticket.course.output_tokens = len(self._kept.ids)
        if self._withheld is not None and passed:
            passed = self._withheld.take(passed)
        if DONE_MARK in chunk:
            self._usage.whole = True
        return self._responder.write_now(passed) if passed else True

    def _event(self, event: bytes) -> bytes:
        """What of *event* the tenant gets; empty for nothing."""
        if not event.startswith(BEGIN + b"{") or event.startswith(ERROR_MARK):
            return event + b"\n\n" if event else b""
        read: dict[str, Any] = orjson.loads(event[len(BEGIN) :])
        kept, choices = self._kept, read.get("choices") or []
        if not choices:
            self._count(read)
        for choice in choices:
            if not self._keep(read, choice):
                return b""
        if kept.head:
            read |= kept.head
        else:
            kept.head = {name: read[name] for name in ("id", "created") if name in read}
        return BEGIN + orjson.dumps(read) + b"\n\n"

    def _keep(self, read: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Keep the tokens of *choice*, and make it one of what was asked for; False if it says nothing new."""
        kept, chat = self._kept, self._ticket.call.kind is Kind.CHAT
        prompt_ids = choice.get("prompt_token_ids") or read.get("prompt_token_ids")
        if prompt_ids and kept.prompt_ids is None:
            kept.prompt_ids = prompt_ids
        for where in (choice, read):
            if "prompt_token_ids" in where:
                where["prompt_token_ids"] = None
        if choice.get("delta", {}).get("role"):
            kept.opened = True
            return True
        ids = choice.get("token_ids") or []
        text = choice.get("text") if "text" in choice else choice.get("delta", {}).get("content")
        choice["token_ids"] = None
        kept.opened = True
        kept.ids += ids
        kept.whole = bool(choice.get("finish_reason"))
        if text is None or (text and not ids):
            kept.lost_track = True
        if text:
            kept.shown = len(kept.ids)
        if self._continued and chat:
            read["object"] = EVENT_KIND[Kind.CHAT]
            ends = {"stop_reason": choice.get("stop_reason")} if kept.whole else {}
            said = {"delta": {"content": text}, "logprobs": None, "finish_reason": choice.get("finish_reason")}
            read["choices"] = [{"index": 0, **said, **ends, "token_ids": None}]
        return True

    def _count(self, read: dict[str, Any]) -> None:
        """The usage of all instances together: the prompt of the first, and every token once."""
        usage = read.get("usage")
        if isinstance(usage, dict) and "prompt_tokens" in usage:
            before = self._kept_before
            usage["prompt_tokens"] -= before
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + before
            if self._continued:
                read["object"] = EVENT_KIND[self._ticket.call.kind]
            self._usage.prompt_tokens, self._usage.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
