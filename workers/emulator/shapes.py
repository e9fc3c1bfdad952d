"""Shapes of answers: the JSON of a whole answer and the events of a stream, for each surface that generates.

Chats and completions have each field of vLLM 0.32; the others have the fields that their SDKs need.
"""

import uuid
from typing import Any, ClassVar, Final

import orjson

from workers.emulator.answers import DONE, MARK, Answer, Sequence, Shape
from workers.vllm.sound import sound_tokens

FINGERPRINT: Final = "vllm-0.32.0-emulated"


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Completion(Shape):
    """OpenAI's completions."""

    kind: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.alike = not (self.asked.continuous_usage or self.asked.token_ids)

    def whole(self) -> dict[str, Any]:
        cached = {"cached_tokens": self.answer.cached_tokens} if self.answer.reports_cached else None
        return {
            "id": self.answer.request_id,
            "object": self.kind,
            "created": self.answer.created_s,
            "model": self.answer.model,
            "choices": [self._choice(sequence) for sequence in self.answer.sequences],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**self.answer.usage(), "prompt_tokens_details": cached, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        return self._common(sequence) | {
            "text": (sequence.prompt.echo if self.asked.echo else "") + sequence.written(),
            "prompt_logprobs": None,
            "prompt_token_ids": sequence.prompt.token_ids if self.asked.token_ids else None,
        }

    def _common(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "logprobs": None,
            "finish_reason": self._reason(sequence),
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.token_ids(0, sequence.produced) if self.asked.token_ids else None,
            "routed_experts": None,
        }

    def _reason(self, sequence: Sequence) -> str:
        return sequence.finish_reason

    def _head(self) -> dict[str, Any]:
        answer = self.answer
        return {"id": answer.request_id, "object": self.chunk, "created": answer.created_s, "model": answer.model}

    def event(self, sequence: Sequence, piece: str, reason: str | None) -> bytes:
        ids = prompt_ids = None
        if self.asked.token_ids and piece is not MARK and reason != "abort":
            ids = sequence.token_ids(sequence.produced - 1, sequence.produced)
            prompt_ids = sequence.prompt.token_ids if sequence.produced == 1 else None
        shown = reason if reason in (None, "abort") else self._reason(sequence)
        choice = self._delta(sequence, piece, shown, ids, prompt_ids)
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if reason and not self.asked.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        if self.asked.continuous_usage:
            tokens, produced = sequence.prompt.tokens, sequence.produced
            chunk["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens + produced, "completion_tokens": produced}
            chunk["usage"] |= self._details()
        return _data(chunk)

    def _details(self) -> dict[str, Any]:
        return {}

    def _delta(
        self, sequence: Sequence, piece: str, reason: str | None, ids: list[int] | None, prompt_ids: list[int] | None
    ) -> dict[str, Any]:
        choice = {"index": sequence.index, "text": piece, "logprobs": None, "finish_reason": reason}
        choice["stop_reason"] = sequence.stop_reason if reason else None
        return choice | {"prompt_token_ids": prompt_ids, "token_ids": ids}

    def closing(self) -> bytes:
        if not self.asked.include_usage:
            return DONE
        cached = {"prompt_tokens_details": {"cached_tokens": self.answer.cached_tokens}}
        usage = {**self.answer.usage(), **(cached if self.answer.reports_cached else {})}
        return _data({**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}) + DONE


class Chat(Completion):
    """OpenAI's chat completions."""

    kind = "chat.completion"
    chunk = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        ids = self.asked.prompts[0].token_ids if self.asked.token_ids else None
        return super().whole() | {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        message = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        message |= {"role": "assistant", "content": sequence.written()}
        if sequence.tool:
            function = {"name": sequence.tool, "arguments": message["content"]}
            message["content"] = "" if self.asked.must_call else None
            message["tool_calls"] = [{"id": sequence.call_id, "type": "function", "function": function}]
        return self._common(sequence) | {"message": message}

    def _reason(self, sequence: Sequence) -> str:
        """Return vLLM's "tool_calls", unless the caller named the tool."""
        calls = sequence.tool and sequence.finish_reason == "stop" and not self.asked.named
        return "tool_calls" if calls else sequence.finish_reason

    def _details(self) -> dict[str, Any]:
        return {"completion_tokens_details": None}

    def opening(self) -> bytes:
        """Return an event with the role for each choice."""
        events = []
        for sequence in self.answer.sequences:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {**self._head(), "choices": [choice]}
            if self.asked.continuous_usage:
                chunk["usage"] = {**self.answer.usage(0), **self._details()}
            ids = sequence.prompt.token_ids if self.asked.token_ids else None
            events.append(_data({**chunk, "prompt_token_ids": ids, "prompt_text": None}))
        return b"".join(events)

    def _delta(
        self, sequence: Sequence, piece: str, reason: str | None, ids: list[int] | None, prompt_ids: list[int] | None
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece}
        if sequence.tool:
            call: dict[str, Any] = {"index": 0, "function": {"arguments": piece}}
            if sequence.produced <= 1:  # the first piece names the call
                call |= {"id": sequence.call_id, "type": "function"}
                call["function"] |= {"name": sequence.tool}
            delta = {"tool_calls": [call]}
        choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return choice | ({"stop_reason": sequence.stop_reason} if reason else {}) | {"token_ids": ids}


class Speech(Completion):
    """OpenAI's transcriptions and translations."""

    chunk = "transcription.chunk"

    def whole(self) -> dict[str, Any]:
        words = self.answer.sequences[0].written()
        seconds = self.asked.body["seconds"]
        usage = {"type": "duration", "seconds": -int(-seconds // 1)}
        if self.asked.get("response_format") != "verbose_json":
            return {"text": words, "usage": usage}
        return {"text": words, "duration": seconds, "language": self.asked.get("language", "en"), "segments": []}

    def _delta(
        self, sequence: Sequence, piece: str, reason: str | None, ids: list[int] | None, prompt_ids: list[int] | None
    ) -> dict[str, Any]:
        return {"delta": {"content": piece}} | ({"finish_reason": reason} if reason else {})

    def closing(self) -> bytes:
        if not self.asked.include_usage:
            return DONE
        prompt, output = sound_tokens(self.asked.body["seconds"]), self.answer.output_tokens
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
        return _data({**self._head(), "choices": [], "usage": usage}) + DONE


class _Named(Shape):
    """Named events, numbered or not, around one block of text or one call of a tool."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._number = 0
        self._open = False
        self._said: list[str] = []

    def _event(self, kind: str, **fields: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

    def event(self, sequence: Sequence, piece: str, reason: str | None) -> bytes:
        events = b""
        if piece:
            events = b"" if self._open else self._begin(sequence)
            self._open = True
            self._said.append(piece)
            events += self._piece(sequence, piece)
        return events + self._end(sequence) if reason and self._open else events

    def _begin(self, sequence: Sequence) -> bytes:
        raise NotImplementedError

    def _piece(self, sequence: Sequence, piece: str) -> bytes:
        raise NotImplementedError

    def _end(self, sequence: Sequence) -> bytes:
        raise NotImplementedError


class Response(_Named):
    """OpenAI's responses."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._item_id = f"item_{uuid.uuid4().hex}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return super()._event(kind, sequence_number=self._number - 1, **fields)

    def whole(self) -> dict[str, Any]:
        (sequence,) = self.answer.sequences
        cut = sequence.finish_reason == "length"
        return self._response([self._item(sequence, sequence.written())], "incomplete" if cut else "completed", cut)

    def _response(self, output: list[dict[str, Any]], status: str, cut: bool = False) -> dict[str, Any]:
        answer, prompt, done = self.answer, self.answer.prompt_tokens, self.answer.output_tokens
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": done, "total_tokens": prompt + done}
        usage |= {"input_tokens_details": {"cached_tokens": answer.cached_tokens}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": answer.request_id,
            "object": "response",
            "created_at": answer.created_s,
            "model": answer.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self.asked.get("instructions"),
            "max_output_tokens": self.asked.max_tokens[0],
            "metadata": self.asked.get("metadata"),
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": self.asked.get("previous_response_id"),
            "tool_choice": self.asked.get("tool_choice", "auto") if self.asked.get("tools") else "none",
            "tools": self.asked.get("tools", []),
            "usage": None if status == "in_progress" else usage,
        }

    def _item(self, sequence: Sequence, words: str, status: str = "completed") -> dict[str, Any]:
        """Return the output item: a message, or the call of a tool."""
        if sequence.tool:
            call = {"call_id": sequence.call_id, "name": sequence.tool, "arguments": words}
            return {"type": "function_call", "id": self._item_id, "status": status, **call}
        content = [self._part(words)] if words else []
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}

    def _part(self, words: str) -> dict[str, Any]:
        return {"type": "output_text", "text": words, "annotations": []}

    def at_once(self) -> bytes:
        response = self._response([], "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0}

    def _begin(self, sequence: Sequence) -> bytes:
        item = self._item(sequence, "", "in_progress")
        events = self._event("response.output_item.added", item=item, output_index=0)
        if not sequence.tool:
            part = {"content_index": 0, "part": self._part("")}
            events += self._event("response.content_part.added", **self._place(), **part)
        return events

    def _piece(self, sequence: Sequence, piece: str) -> bytes:
        if sequence.tool:
            return self._event("response.function_call_arguments.delta", delta=piece, **self._place())
        fields = {"content_index": 0, "delta": piece, "logprobs": []}
        return self._event("response.output_text.delta", **self._place(), **fields)

    def _end(self, sequence: Sequence) -> bytes:
        words, place = "".join(self._said), self._place()
        if sequence.tool:
            fields = {"arguments": words, "name": sequence.tool}
            events = self._event("response.function_call_arguments.done", **place, **fields)
        else:
            place |= {"content_index": 0}
            events = self._event("response.output_text.done", **place, text=words, logprobs=[])
            events += self._event("response.content_part.done", **place, part=self._part(words))
        return events + self._event("response.output_item.done", item=self._item(sequence, words), output_index=0)

    def closing(self) -> bytes:
        return self._event("response.completed", response=self.whole())


STOP_REASONS: Final = {"length": "max_tokens", "stop": "end_turn", "abort": None}


class Message(_Named):
    """Anthropic's messages."""

    def whole(self) -> dict[str, Any]:
        (sequence,) = self.answer.sequences
        words = sequence.written()
        content = [
            self._block(sequence) | ({"input": orjson.loads(words or "{}")} if sequence.tool else {"text": words})
        ]
        return self._message(self.answer.output_tokens) | self._stop(sequence) | {"content": content if words else []}

    def _message(self, output_tokens: int) -> dict[str, Any]:
        answer = self.answer
        cached = answer.cached_tokens if answer.reports_cached else 0
        usage = {"input_tokens": answer.prompt_tokens - cached, "output_tokens": output_tokens}
        usage |= {"cache_read_input_tokens": cached} if answer.reports_cached else {}
        head = {"id": answer.request_id, "type": "message", "role": "assistant", "model": answer.model}
        return head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self, sequence: Sequence) -> dict[str, str | None]:
        if isinstance(sequence.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence.stop_reason}
        reason = "tool_use" if sequence.tool else STOP_REASONS[sequence.finish_reason]
        return {"stop_reason": reason, "stop_sequence": None}

    def _block(self, sequence: Sequence) -> dict[str, Any]:
        if sequence.tool:
            return {"type": "tool_use", "id": sequence.call_id, "name": sequence.tool, "input": {}}
        return {"type": "text", "text": ""}

    def opening(self) -> bytes:
        return self._event("message_start", message=self._message(0))

    def _begin(self, sequence: Sequence) -> bytes:
        return self._event("content_block_start", index=0, content_block=self._block(sequence))

    def _piece(self, sequence: Sequence, piece: str) -> bytes:
        delta = {"type": "text_delta", "text": piece}
        if sequence.tool:
            delta = {"type": "input_json_delta", "partial_json": piece}
        return self._event("content_block_delta", index=0, delta=delta)

    def _end(self, sequence: Sequence) -> bytes:
        return self._event("content_block_stop", index=0)

    def closing(self) -> bytes:
        (sequence,) = self.answer.sequences
        usage = self._message(self.answer.output_tokens)["usage"]
        return self._event("message_delta", delta=self._stop(sequence), usage=usage) + self._event("message_stop")


SHAPES: Final[dict[str, type[Shape]]] = {
    "completion": Completion,
    "chat": Chat,
    "response": Response,
    "message": Message,
    "speech": Speech,
}
