"""From tokens to bytes: the sequences of a request, and its answer as one JSON body or as a stream of events.

A fleet of emulated servers emits tens of thousands of tokens a second in one process, so a streamed token costs one
concatenation and one write: everything in an event but the word is built once per sequence, HTTP's chunk framing
included, and the event goes straight to the connection. Field order and empty fields are those of vLLM 0.32.
"""

import asyncio
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import orjson

from workers.emulator.bodies import ResponseBody
from workers.emulator.generation import Generation, Prompt
from workers.emulator.text import END_ID, LENGTHS, PIECES, WORDS, token_id

FINGERPRINT = "vllm-0.32.0-emulated"
_COUNT = len(PIECES)
# HTTP/1.1 chunk heads by length; longer chunks (the first one, the last one) are framed when they are made.
_HEADS = tuple(b"%x\r\n" % length for length in range(2048))
_MARK = "\0"


class CutError(Exception):
    """The server of this request died; its connection is closed without another byte."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence being generated: `output_tokens` words of the prose from `offset` on.

    Times are seconds of the event loop's clock.
    """

    engine_id: str
    answer: "RequestAnswer[Any]"
    index: int
    prompt: Prompt
    max_tokens: int
    output_tokens: int
    offset: int
    finish_reason: str  # what it will be: "stop" or "length"; "abort" when it is stopped from outside
    stop_reason: str | None
    pieces: list[str] | None  # the text token by token when it is not prose, or a stop string cuts it, else None
    arrival_s: float
    tool: str = ""  # the function that is called: its arguments are the text
    call_id: str = ""
    produced: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    admitted_s: float | None = None  # first time that the engine ran it
    preemptions: int = 0
    cached_tokens: int = 0  # of its prompt, in the prefix cache when it was admitted first
    # For a stream: an event is prefix + word + suffix, and framed so long without the word.
    prefix: bytes = b""
    suffix: bytes = b""
    frame_bytes: int = 0
    goes_on: bool = False  # its prompt ends with an answer begun, and no first word begins this one

    def piece(self, number: int) -> str:
        """Return the text of token *number* (from 0)."""
        if self.pieces is not None:
            return self.pieces[number]
        if number == self.output_tokens - 1 and self.finish_reason == "stop":
            return ""  # the end-of-sequence token counts and has no text
        word = WORDS[(self.offset + number) % _COUNT]
        return " " + word if number or self.goes_on else word

    def token_ids(self, begin: int, end: int) -> list[int]:
        """Return the ids of the tokens from *begin* to *end*."""
        ids = [token_id(self.offset + number) for number in range(begin, end)]
        if end == self.output_tokens and self.finish_reason == "stop" and self.stop_reason is None:
            ids[-1:] = [END_ID]
        return ids

    def written(self) -> str:
        """Return the text of all tokens so far."""
        return "".join(self.piece(number) for number in range(self.produced))

    @property
    def said_reason(self) -> str:
        """`finish_reason` as a chat reports it: vLLM's "tool_calls", unless the caller named the tool."""
        calls = self.tool and self.finish_reason == "stop" and not self.answer.generation.named
        return "tool_calls" if calls else self.finish_reason


class Work(Protocol):
    """A checked request: it generates, or pools."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Return its inputs."""


Asked = TypeVar("Asked", bound=Work)


class RequestAnswer(ABC, Generic[Asked]):
    """One request's answer. The instance's loop calls `token` for each token and `closed` when all sequences ended."""

    def __init__(self, generation: Asked, request_id: str, model: str, created_s: int) -> None:
        self.generation = generation
        self.request_id = request_id
        self.model = model
        self.created_s = created_s
        self.sequences: list[Sequence] = []
        self.unfinished = 0
        self.says_cached = False  # whether the server says how much of a prompt was cached
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the sequences of this request, in the order of their indices."""
        self.sequences = sequences
        self.unfinished = len(sequences)

    @abstractmethod
    def token(self, sequence: Sequence) -> None:
        """Take one more token of *sequence*."""

    def ended(self, sequence: Sequence) -> None:
        """Note that *sequence* is complete; after the last one, wake the task that waits for the answer."""
        self.unfinished -= 1
        if self.unfinished == 0:
            self.closed()

    def closed(self) -> None:
        """Finish the answer: all sequences have ended."""
        self.finish()

    def finish(self) -> None:
        """Wake the task that waits for the answer."""
        if not self.done.done():
            self.done.set_result(None)

    def cut(self) -> None:
        """End the answer with CutError: the server died."""
        if not self.done.done():
            self.done.set_exception(CutError())

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompts that were in the prefix cache."""
        each = max(1, len(self.sequences) // max(1, len(self.generation.prompts)))
        return sum(sequence.cached_tokens for sequence in self.sequences[::each])

    @property
    def prompt_details(self) -> dict[str, int] | None:
        """What its usage says of its prompt; None where the server does not."""
        return {"cached_tokens": self.cached_tokens} if self.says_cached else None

    def usage(self, completion_tokens: int | None = None) -> dict[str, int]:
        prompt_tokens = sum(prompt.tokens for prompt in self.generation.prompts)
        completion = sum(s.produced for s in self.sequences) if completion_tokens is None else completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion,
            "completion_tokens": completion,
        }


class PlainAnswer(RequestAnswer[Generation]):
    """An answer that is sent as one body."""

    def token(self, sequence: Sequence) -> None:
        sequence.produced += 1

    def body(self) -> bytes:
        chat = self.generation.kind == "chat"
        answer: dict[str, Any] = {
            "id": self.request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [_chat_choice(s) if chat else self._completion_choice(s) for s in self.sequences],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **self.usage(),
                "prompt_tokens_details": self.prompt_details,
                "completion_tokens_details": None,
            },
        }
        if chat:
            ids = self.generation.prompts[0].token_ids if self.generation.token_ids else None
            answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
        return orjson.dumps({**answer, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})

    def _completion_choice(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "text": (sequence.prompt.echo if self.generation.echo else "") + sequence.written(),
            "logprobs": None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": _ids_of_answer(sequence),
            "prompt_logprobs": None,
            "prompt_token_ids": sequence.prompt.token_ids if self.generation.token_ids else None,
            "routed_experts": None,
        }


def _chat_choice(sequence: Sequence) -> dict[str, Any]:
    said = sequence.written()
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if sequence.tool:
        function = {"name": sequence.tool, "arguments": said}
        message["content"] = "" if sequence.answer.generation.must_call else None
        message["tool_calls"] = [{"id": sequence.call_id, "type": "function", "function": function}]
    message["reasoning"] = None
    return {
        "index": sequence.index,
        "message": message,
        "logprobs": None,
        "finish_reason": sequence.said_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": _ids_of_answer(sequence),
        "routed_experts": None,
    }


def _ids_of_answer(sequence: Sequence) -> list[int] | None:
    return sequence.token_ids(0, sequence.produced) if sequence.answer.generation.token_ids else None


class StreamAnswer(RequestAnswer[Generation]):
    """An answer that is sent token by token, as server-sent events in HTTP/1.1 chunks on *transport*.

    The head of the response was already sent, and the owner of the response writes the final empty chunk. Data that a
    slow reader has not taken waits in the transport's buffer, as it does in vLLM's output queue: at most the rest of
    its answer.
    """

    def __init__(
        self, generation: Generation, request_id: str, model: str, created_s: int, transport: asyncio.Transport
    ) -> None:
        super().__init__(generation, request_id, model, created_s)
        self._transport = transport
        self._continuous = generation.continuous_usage
        self._plain = not (generation.continuous_usage or generation.token_ids)  # events differ in their words alone
        self._opened = False

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # uvloop raises; the server will hear of the disconnect in a moment
            self._transport.write(data)

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the sequences and build the constant parts of their events."""
        super().begin(sequences)
        mark = orjson.dumps(_MARK)[1:-1]
        for sequence in sequences:
            before, _, after = self._event(sequence, _MARK, None).rpartition(mark)
            sequence.prefix, sequence.suffix = before, after + b"\r\n"
            sequence.frame_bytes = len(before) + len(after)

    def token(self, sequence: Sequence) -> None:
        number = sequence.produced
        sequence.produced = number + 1
        if 0 < number < sequence.output_tokens - 1 and sequence.pieces is None and self._plain:
            place = (sequence.offset + number) % _COUNT
            self._write(
                _HEADS[sequence.frame_bytes + LENGTHS[place]] + sequence.prefix + PIECES[place] + sequence.suffix
            )
            return
        piece = sequence.piece(number)
        if self.generation.echo and number == 0:
            piece = sequence.prompt.echo + piece
        last = number == sequence.output_tokens - 1
        self._write(framed(self._opening() + self._event(sequence, piece, sequence.finish_reason if last else None)))

    def aborted(self, sequence: Sequence) -> None:
        """End *sequence* with an abort event. (A caller that disconnected needs none.)"""
        self._write(framed(self._opening() + self._event(sequence, "", "abort")))

    def closed(self) -> None:
        end = b"data: [DONE]\n\n"
        if self.generation.include_usage:
            details = {"prompt_tokens_details": self.prompt_details} if self.says_cached else {}
            usage = {**self.usage(), **details}
            chunk = {**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
            end = b"data: " + orjson.dumps(chunk) + b"\n\n" + end
        self._write(framed(end))
        self.finish()

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.generation.kind == "chat" else "text_completion"
        return {"id": self.request_id, "object": kind, "created": self.created_s, "model": self.model}

    def _opening(self) -> bytes:
        """Return the events before the first token of a chat: one with the role for each choice."""
        if self._opened or self.generation.kind != "chat":
            return b""
        self._opened = True
        events = []
        for sequence in self.sequences:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {**self._head(), "choices": [choice]}
            if self._continuous:
                chunk["usage"] = {**self.usage(0), "completion_tokens_details": None}
            ids = sequence.prompt.token_ids if self.generation.token_ids else None
            events.append(b"data: " + orjson.dumps({**chunk, "prompt_token_ids": ids, "prompt_text": None}) + b"\n\n")
        return b"".join(events)

    def _event(self, sequence: Sequence, piece: str, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": sequence.index}
        stop_reason = sequence.stop_reason if finish_reason else None
        ids = prompt_ids = None
        if self.generation.token_ids and piece is not _MARK and finish_reason != "abort":
            ids = sequence.token_ids(sequence.produced - 1, sequence.produced)
            prompt_ids = sequence.prompt.token_ids if sequence.produced == 1 else None
        if self.generation.kind == "chat":
            if finish_reason and finish_reason != "abort":
                finish_reason = sequence.said_reason
            delta = _tool_delta(sequence, piece) if sequence.tool else {"content": piece}
            choice |= {"delta": delta, "logprobs": None, "finish_reason": finish_reason}
            choice |= {"stop_reason": stop_reason, "token_ids": ids} if finish_reason else {"token_ids": ids}
        else:
            choice |= {"text": piece, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": ids}
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if finish_reason and not self.generation.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if self._continuous:
            tokens, produced = sequence.prompt.tokens, sequence.produced
            chunk["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens + produced, "completion_tokens": produced}
            if self.generation.kind == "chat":
                chunk["usage"]["completion_tokens_details"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _tool_delta(sequence: Sequence, piece: str) -> dict[str, Any]:
    """Return a piece of a tool call's arguments; the first piece names the call."""
    if sequence.produced > 1:
        return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
    function = {"name": sequence.tool, "arguments": piece}
    return {"tool_calls": [{"id": sequence.call_id, "type": "function", "index": 0, "function": function}]}


def framed(data: bytes) -> bytes:
    """Return *data* as one HTTP/1.1 chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


NO_LOGPROBS: list[object] = []
TOOL_FIELDS = {"allowed_callers", "async", "defer_loading", "description", "output_schema"}


class PlainResponse(PlainAnswer):
    """A response that is sent as one body."""

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
        self.whole = b""

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the single sequence and send the events that vLLM sends before its engine has begun."""
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
        self.whole = orjson.dumps(response)
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
    """Return the output item: a message, or the call of a tool."""
    if sequence.tool:
        call = {"arguments": said, "call_id": sequence.call_id, "name": sequence.tool, "type": "function_call"}
        return {**call, "id": item_id, "async": None, "caller": None, "namespace": None, "status": status}
    content = [_part(said, None)] if said else []
    message = {"id": item_id, "content": content, "role": "assistant", "status": status}
    return {**message, "type": "message", "phase": None}


def _status(sequence: Sequence) -> str:
    """Return vLLM's status: complete unless the answer ran out of tokens."""
    return "incomplete" if sequence.finish_reason == "length" else "completed"


def _response(
    answer: PlainAnswer | StreamAnswer, output: list[dict[str, Any]], status: str, *, usage: bool = True
) -> dict[str, Any]:
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    body = answer.generation.body
    assert isinstance(body, ResponseBody)
    return {
        "id": answer.request_id,
        "created_at": answer.created_s,
        "incomplete_details": incomplete,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "model": answer.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "tool_choice": body.tool_choice if body.tools else "none",
        "tools": [{"strict": None} | tool | dict.fromkeys(TOOL_FIELDS - tool.keys()) for tool in body.tools],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "background": False,
        "max_output_tokens": answer.generation.max_tokens[0],
        "max_tool_calls": None,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "reasoning": None,
        "service_tier": body.service_tier,
        "status": status,
        "text": body.text,
        "top_logprobs": None,
        "truncation": body.truncation or "disabled",
        "usage": _usage(answer) if usage else None,
        "user": body.user,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
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
            "cached_tokens": answer.cached_tokens,
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
