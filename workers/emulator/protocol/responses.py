"""Answers of the Responses API: one JSON body, or a stream of named events. Field order and empty fields are vLLM 0.32's."""

import asyncio
import uuid
from typing import Any

import orjson

from workers.emulator.protocol.answers import PlainAnswer, Sequence, StreamAnswer, framed
from workers.emulator.protocol.generation import Generation

NO_LOGPROBS: list[object] = []


class PlainResponse(PlainAnswer):
    """A response that is sent whole."""

    def body(self) -> bytes:
        (sequence,) = self.sequences
        said = sequence.written()
        output = _item(sequence, _item_id(sequence), said, "completed")
        return orjson.dumps(_response(self, [output], _status(sequence)))


class StreamResponse(StreamAnswer):
    """A response that is sent event by event."""

    def __init__(
        self, generation: Generation, request_id: str, model: str, created_s: int, transport: asyncio.Transport
    ) -> None:
        super().__init__(generation, request_id, model, created_s, transport)
        self._number = 0
        self._item_id = ""  # of the output item that is open
        self._said: list[str] = []
        self._output: list[dict[str, Any]] = []

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the one sequence. What vLLM says before its engine has begun goes out at once."""
        self.sequences, self.unfinished = sequences, len(sequences)
        response = _response(self, [], "in_progress", usage=False)
        self._write(
            framed(
                self._named("response.created", {"response": response})
                + self._named("response.in_progress", {"response": response})
            )
        )

    def token(self, sequence: Sequence) -> None:
        piece = sequence.piece(sequence.produced)
        sequence.produced += 1
        events = self._delta(sequence, piece) if piece else b""
        if sequence.produced == sequence.output_tokens:
            events += self._close(sequence)
        if events:
            self._write(framed(events))

    def aborted(self, sequence: Sequence) -> None:
        self._write(framed(self._close(sequence)))

    def closed(self) -> None:
        (sequence,) = self.sequences
        response = _response(self, self._output, _status(sequence))
        self._write(framed(self._named("response.completed", {"response": response})))
        self.finish()

    def _named(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))

    def _delta(self, sequence: Sequence, piece: str) -> bytes:
        events = b"" if self._item_id else self._open(sequence)
        self._said.append(piece)
        place = {"item_id": self._item_id, "output_index": 0}
        if sequence.tool:
            return events + self._named("response.function_call_arguments.delta", {"delta": piece, **place})
        fields = {"content_index": 0, "delta": piece, "logprobs": NO_LOGPROBS, **place}
        return events + self._named("response.output_text.delta", fields)

    def _open(self, sequence: Sequence) -> bytes:
        self._item_id = _item_id(sequence)
        item = _item(sequence, self._item_id, "", "in_progress")
        events = self._named("response.output_item.added", {"item": item, "output_index": 0})
        if not sequence.tool:
            part = {"content_index": 0, "item_id": self._item_id, "output_index": 0, "part": _part("", NO_LOGPROBS)}
            events += self._named("response.content_part.added", part)
        return events

    def _close(self, sequence: Sequence) -> bytes:
        if not self._item_id:
            return b""
        said, place = "".join(self._said), {"item_id": self._item_id, "output_index": 0}
        if sequence.tool:
            fields = {"arguments": said, **place, "name": sequence.tool}
            events = self._named("response.function_call_arguments.done", fields)
        else:
            at = {"content_index": 0, **place}
            events = self._named("response.output_text.done", {**at, "logprobs": NO_LOGPROBS, "text": said})
            events += self._named("response.content_part.done", {**at, "part": _part(said, None)})
        item = _item(sequence, self._item_id, said, "completed")
        self._output.append(item)
        return events + self._named("response.output_item.done", {"item": item, "output_index": 0})


def _item_id(sequence: Sequence) -> str:
    return f"{'fc' if sequence.tool else 'msg'}_{uuid.uuid4().hex}"


def _part(said: str, logprobs: list[object] | None) -> dict[str, Any]:
    return {"annotations": [], "text": said, "type": "output_text", "logprobs": logprobs}


def _item(sequence: Sequence, item_id: str, said: str, status: str) -> dict[str, Any]:
    """A message, or the call of a tool."""
    if sequence.tool:
        call = {"arguments": said, "call_id": sequence.call_id, "name": sequence.tool, "type": "function_call"}
        return {**call, "id": item_id, "async": None, "caller": None, "namespace": None, "status": status}
    content = [_part(said, None)] if said else []
    message = {"id": item_id, "content": content, "role": "assistant", "status": status}
    return {**message, "type": "message", "phase": None}


def _status(sequence: Sequence) -> str:
    """vLLM's: whatever did not run out of tokens is complete."""
    return "incomplete" if sequence.finish_reason == "length" else "completed"


def _response(
    answer: PlainAnswer | StreamAnswer, output: list[dict[str, Any]], status: str, *, usage: bool = True
) -> dict[str, Any]:
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    asked = answer.generation.asked
    return {
        "id": answer.request_id,
        "created_at": answer.created_s,
        "incomplete_details": incomplete,
        "instructions": asked["instructions"],
        "metadata": asked["metadata"],
        "model": answer.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": asked["parallel_tool_calls"],
        "temperature": asked["temperature"],
        "tool_choice": asked["tool_choice"],
        "tools": asked["tools"],
        "top_p": asked["top_p"],
        "background": False,
        "max_output_tokens": answer.generation.max_tokens[0],
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": asked["service_tier"],
        "status": status,
        "text": asked["text"],
        "top_logprobs": None,
        "truncation": asked["truncation"],
        "usage": _usage(answer) if usage else None,
        "user": asked["user"],
        "presence_penalty": asked["presence_penalty"],
        "frequency_penalty": asked["frequency_penalty"],
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _usage(answer: PlainAnswer | StreamAnswer) -> dict[str, Any]:
    tokens = answer.usage()
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": tokens["total_tokens"],
    }
