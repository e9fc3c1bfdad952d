"""Anthropic's Messages API as vLLM 0.32 has it: a message becomes a chat, and its answer becomes a message."""

import asyncio
from typing import Annotated, Any

import orjson
from pydantic import Field

from workers.emulator.answers import PlainAnswer, Sequence, StreamAnswer, framed
from workers.emulator.bodies import MAX_STOP_STRINGS, ApiError, ChatBody, PlainBody, validated
from workers.emulator.generation import Generation

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(PlainBody):
    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class MessageBody(CountBody):
    max_tokens: Annotated[int, Field(gt=0)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    tool_choice: dict[str, Any] | None = None
    top_k: int | None = None
    top_p: float | None = None


def chat_of(body: CountBody) -> ChatBody:
    """Return *body* as a chat. Raises ApiError if it is none."""
    messages = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        messages += _chat_messages(message)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        tools = [{"name": tool.get("name"), "parameters": tool.get("input_schema")} for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if isinstance(body, MessageBody):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        fields |= {"stop": body.stop_sequences, "stream_options": {"include_usage": True} if body.stream else None}
        if body.tools:
            choice = body.tool_choice or {"type": "auto"}
            named = {"type": "function", "function": {"name": choice.get("name")}}
            fields["tool_choice"] = TOOL_CHOICES.get(str(choice.get("type")), named)
    return validated(ChatBody, fields)


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message of Anthropic's as messages of a chat: each result of a tool is one."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results = [part for part in content if part.get("type") == "tool_result"]
    calls = [part for part in content if part.get("type") == "tool_use"]
    converted = [{"role": "tool", "content": _text(part.get("content"))} for part in results]
    said = _text([part for part in content if part.get("type") == "text"])
    if said or calls or not converted:
        chat: dict[str, Any] = {"role": message.get("role"), "content": said}
        if calls:
            chat["tool_calls"] = [{"id": part.get("id"), "name": part.get("name")} for part in calls]
        converted.append(chat)
    return converted


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part.get("text") or "" for part in parts if isinstance(part, dict))


def error_body(error: ApiError) -> bytes:
    return orjson.dumps({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def _stop(sequence: Sequence) -> tuple[str | None, str | None]:
    """Return Anthropic's reason for the end of *sequence*, and the stop string that ended it."""
    if sequence.finish_reason == "abort":
        return None, None
    if isinstance(sequence.stop_reason, str):
        return "stop_sequence", sequence.stop_reason
    return ("tool_use" if sequence.tool else STOP_REASONS[sequence.finish_reason]), None


def _usage(answer: PlainAnswer | StreamAnswer, output_tokens: int | None = None) -> dict[str, int]:
    tokens = answer.usage(output_tokens)
    usage = {"input_tokens": tokens["prompt_tokens"], "output_tokens": tokens["completion_tokens"]}
    if answer.says_cached and output_tokens is None:
        usage["cache_read_input_tokens"] = answer.cached_tokens
        usage["input_tokens"] -= answer.cached_tokens
    return usage


class PlainMessage(PlainAnswer):
    """A message that is sent as one body."""

    def body(self) -> bytes:
        (sequence,) = self.sequences
        said, (reason, stopped) = sequence.written(), _stop(sequence)
        content: list[dict[str, Any]] = [{"type": "text", "text": said}] if said else []
        if sequence.tool:
            called = {"id": sequence.call_id, "name": sequence.tool, "input": orjson.loads(said or "{}")}
            content = [{"type": "tool_use", **called}]
        answer: dict[str, Any] = {"id": self.request_id, "type": "message", "role": "assistant", "content": content}
        answer |= {"model": self.model, "stop_reason": reason, "stop_sequence": stopped, "usage": _usage(self)}
        return orjson.dumps({name: value for name, value in answer.items() if value is not None})


class StreamMessage(StreamAnswer):
    """A message that is sent event by event."""

    def __init__(
        self, generation: Generation, request_id: str, model: str, created_s: int, transport: asyncio.Transport
    ) -> None:
        super().__init__(generation, request_id, model, created_s, transport)
        self._begun = self._block = False

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the single sequence; the first event comes with its first token."""
        self.sequences, self.unfinished = sequences, len(sequences)

    def token(self, sequence: Sequence) -> None:
        piece = sequence.piece(sequence.produced)
        sequence.produced += 1
        events = self._start() + (self._delta(sequence, piece) if piece else b"")
        if sequence.produced == sequence.output_tokens:
            events += self._close()
        if events:
            self._write(framed(events))

    def aborted(self, sequence: Sequence) -> None:
        self._write(framed(self._start() + self._close()))

    def closed(self) -> None:
        (sequence,) = self.sequences
        reason, stopped = _stop(sequence)
        delta = {"stop_reason": reason, "stop_sequence": stopped}
        self._write(
            framed(_event("message_delta", {"delta": delta, "usage": _usage(self)}) + _event("message_stop", {}))
        )
        self.finish()

    def _start(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message: dict[str, Any] = {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.model,
        }
        message |= {"stop_reason": None, "stop_sequence": None, "usage": _usage(self, 0)}
        return _event("message_start", {"message": message})

    def _delta(self, sequence: Sequence, piece: str) -> bytes:
        events, tool = b"", sequence.tool
        if not self._block:
            self._block = True
            block: dict[str, Any] = {"type": "text", "text": ""}
            if tool:
                block = {"type": "tool_use", "id": sequence.call_id, "name": tool, "input": {}}
            events = _event("content_block_start", {"index": 0, "content_block": block})
        delta = {"type": "input_json_delta", "partial_json": piece} if tool else {"type": "text_delta", "text": piece}
        return events + _event("content_block_delta", {"index": 0, "delta": delta})

    def _close(self) -> bytes:
        return _event("content_block_stop", {"index": 0}) if self._block else b""


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind} | fields))
