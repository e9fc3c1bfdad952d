"""A stream that may be evicted: a `passage.Stream` of which each event is read, the ids of its tokens kept and taken out.

Where an earlier instance began, the events of this one are made to look as if that one had gone on: one id, one event with
the role, chunks of a chat though a completion goes on with it, and one usage.
"""

from collections.abc import Callable
from typing import Any

import orjson

from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.serving.continuation import Kept
from controlplane.gateway.serving.responder import Responder
from controlplane.gateway.serving.ticket import Ticket
from controlplane.gateway.upstream.answers import Usage, ids_of, what
from controlplane.gateway.upstream.connections import Connection
from controlplane.gateway.upstream.failures import EngineFailed
from controlplane.gateway.upstream.passage import Stream
from controlplane.gateway.upstream.sse import SentEvent
from controlplane.gateway.upstream.stream import DATA, DONE

EVENT_KIND = {Kind.CHAT: "chat.completion.chunk", Kind.COMPLETION: "text_completion"}


class KeptStream(Stream):
    __slots__ = ("_continued", "_kept", "_kept_before")

    def __init__(
        self,
        ticket: Ticket,
        kept: Kept,
        responder: Responder,
        usage: Usage,
        fingerprint: str,
        began: Callable[[Ticket], None],
    ) -> None:
        super().__init__(ticket, responder, usage, fingerprint, began)
        self._kept = kept
        self._continued = kept.opened
        self._kept_before = len(kept.ids)

    def _pass(self, connection: Connection) -> None:
        connection.pass_to(self._take)

    def _event(self, event: SentEvent) -> bytes:
        """What the tenant gets of *event*, the ids of its tokens kept."""
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
        self._ticket.course.output_tokens = len(kept.ids)
        if kept.head:
            body |= kept.head
        else:
            kept.head = {name: body[name] for name in ("id", "created") if name in body}
        data = orjson.dumps(body)
        return self._less_usage(SentEvent(DATA + data, b"", data), said)

    def _keep(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Keep the tokens of *choice*, and make it one of what was asked for."""
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
        """Make of *usage* that of all instances together: the prompt of the first, and every token once."""
        here, before = Usage(), self._kept_before
        here.take(usage)
        if here.prompt_tokens is not None:
            usage["prompt_tokens"] = self._usage.prompt_tokens = max(0, here.prompt_tokens - before)
        if here.output_tokens is not None:
            usage["completion_tokens"] = self._usage.output_tokens = here.output_tokens + before
