"""A whole answer assembled from a stream, so that a call its tenant does not stream shows when its tokens came.

It equals vLLM's answer to such a call: the same fields, null where absent. Texts keep the bytes received.
"""

import json
from collections import defaultdict
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from controlplane.gateway.admission.validation import SPEECH, Call, Kind
from controlplane.gateway.upstream.answers import MOST_ANSWER_BYTES, EngineFailed, Said, what
from controlplane.gateway.upstream.sse import SentEvent

MOST_TOOL_CALLS = MOST_BLOCKS = 2**12
NULL: Final = b"null"
ORDER: Final = ("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage")
"""Fields of a message as vLLM orders them."""
TEXTS: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "text"})
"""Fields that come in pieces; of all others the last value counts, except lists of a choice."""
REASONS: Final = {
    "use_beam_search": "a beam search has no stream",
    "best_of": "the best of several has no stream",
    "prompt_logprobs": "log probabilities of a prompt are in no stream",
    "kv_transfer_params": "what says where keys and values are is in no stream",
    "ec_transfer_params": "what says where encodings are is in no stream",
    "echo": "an echo of the prompt says more in a stream, or less",
    "background": "it is answered before it is computed",
}


def not_streamed(call: Call) -> str:
    """Return why *call* cannot be streamed from its instance and answered as vLLM would; empty if it can."""
    if not call.kind.generates:
        return "it has no output"
    if call.kind is Kind.CHAT_BATCH:
        return "a batch of chats has no stream"
    if call.kind in SPEECH:
        return "the seconds of a sound are in no stream"
    body = call.body
    for name, reason in REASONS.items():
        if body.get(name):
            return reason
    if body.get("prompt_logprobs") is not None:
        return REASONS["prompt_logprobs"]
    # vLLM's stream parsers drop what does not parse, and leave arguments as written. In a whole answer it reads arguments as
    # JSON and writes them again, and what does not parse is content. The same holds for a named tool.
    if body.get("tools") and body.get("tool_choice") != "none":
        return "tool calls are parsed in another way in streams"
    return ""


class _Event(Struct):
    choices: list[dict[str, Raw]]


class _Function(Struct):
    name: str | None = None
    arguments: Raw = Raw(NULL)


class _ToolCall(Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


_events = msgspec.json.Decoder(_Event)
_fields = msgspec.json.Decoder(dict[str, Raw])
_tool_calls = msgspec.json.Decoder(list[_ToolCall])
_index = msgspec.json.Decoder(int)
_text = msgspec.json.Decoder(str)


class _Tool:
    __slots__ = ("arguments", "id", "name", "type")

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.type = "function"
        self.arguments = bytearray()


class _Choice:
    """One choice, as received so far."""

    __slots__ = ("fields", "lists", "logprobs", "message", "texts", "tools")

    def __init__(self) -> None:
        self.texts: defaultdict[str, bytearray] = defaultdict(bytearray)
        self.lists: dict[str, bytearray] = {}
        self.logprobs: dict[str, bytearray] | None = None
        self.message: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.tools: dict[int, _Tool] = {}


class WholeAnswer:
    """The answer to *call*, event by event."""

    __slots__ = ("_blocks", "_bytes", "_call", "_choices", "_head", "_response", "last")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        """Blocks of a message as they began; what came after is in `_choices`."""
        self._response: bytes | None = None
        self._bytes = 0
        self.last: tuple[bytearray, bytes] | None = None
        """The text that the last event extended, and the piece added; None if the event had anything else."""

    def take(self, event: SentEvent, said: Said | None) -> None:
        """Take in *event*. Raises EngineFailed if it is unusable or too large."""
        if said is None:
            return
        try:
            self._take(event.data, said)
        except (msgspec.MsgspecError, LookupError, ValueError, RecursionError):
            try:
                self._take(_by_the_letter(event.data), said)
            except (msgspec.MsgspecError, LookupError, ValueError, RecursionError):
                raise EngineFailed(what(event.data)) from None

    def append(self, text: bytearray, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes > MOST_ANSWER_BYTES:
            raise EngineFailed(f"more than {MOST_ANSWER_BYTES} bytes")
        text += piece

    def body(self) -> bytes:
        """Return the answer as vLLM writes it. Raises EngineFailed if one of its texts is not valid."""
        if self._call.kind is Kind.RESPONSE:
            if self._response is None:
                raise EngineFailed("a stream without a response")
            return self._response
        if self._call.kind is Kind.MESSAGE:
            content = [
                block | {name: _checked(text) for name, text in self._choices[index].texts.items()}
                for index, block in sorted(self._blocks.items())
            ]
            answer = self._head | {"content": content}
            order = sorted(answer, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
            return msgspec.json.encode({name: answer[name] for name in order})
        chat = self._call.kind is Kind.CHAT
        usage = self._head.pop("usage", None)
        answer = {
            "id": None,
            "object": "chat.completion" if chat else "text_completion",
            "created": None,
            "model": self._call.model,
            "choices": [self._choice(index, self._choices[index]) for index in sorted(self._choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": USAGE | _fields.decode(usage) if usage is not None and bytes(usage).startswith(b"{") else usage,
        }
        if chat:
            answer |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
        answer |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
        return msgspec.json.encode(answer | self._head)

    def _take(self, data: bytes, said: Said) -> None:
        self.last = None
        if self._call.kind is Kind.MESSAGE:
            self._take_message(data, said)
            return
        if self._call.kind is Kind.RESPONSE:
            response = _fields.decode(data)["response"]
            self.append(bytearray(), response)
            self._response = bytes(response)
            return
        if not self._head or not said.choices or said.usage is not None:
            head = _fields.decode(data)
            self._head |= {
                name: value for name, value in head.items() if name not in ("choices", "object") and value != NULL
            }
        texts: list[tuple[bytearray, bytes]] = []
        alone = True
        for given in _events.decode(data).choices:
            index = _index.decode(given.pop("index", b"0"))
            if not 0 <= index < self._call.sequences:
                raise EngineFailed(f"a choice {index} of {self._call.sequences}")
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _Choice()
            delta = given.pop("delta", NULL)
            if delta != NULL:
                alone = self._join(choice, choice.message, _fields.decode(delta), texts) and alone
            alone = self._join(choice, choice.fields, given, texts) and alone
        if alone and len(texts) == 1:
            self.last = texts[0]

    def _take_message(self, data: bytes, said: Said) -> None:
        """Take in an event of the Messages API: blocks of text and thoughts come piece by piece."""
        fields = _fields.decode(data)
        match said.type:
            case "message_start":
                self._head = _known(fields["message"])
            case "content_block_start":
                index = _index.decode(fields["index"])
                if index != len(self._blocks) or index >= MOST_BLOCKS:
                    raise EngineFailed(f"a block {index}")
                self._blocks[index], self._choices[index] = _fields.decode(fields["content_block"]), _Choice()
            case "content_block_delta":
                choice = self._choices[_index.decode(fields["index"])]
                for name, value in _fields.decode(fields["delta"]).items():
                    if name != "type":
                        self.append(choice.texts[name], _inside(bytes(value)))
            case "message_delta":
                self._head |= _known(fields["delta"]) | {"usage": fields["usage"]}

    def _join(
        self, choice: _Choice, rest: dict[str, Any], given: dict[str, Raw], texts: list[tuple[bytearray, bytes]]
    ) -> bool:
        """Extend *choice*; return whether there were only pieces of text, which are added to *texts*."""
        alone = True
        for name, raw in given.items():
            value = bytes(raw)
            if value == NULL:
                continue
            if name in TEXTS:
                if value == b'""' and "role" in given:  # it opens a message, which may have no text
                    continue
                if not value.startswith(b'"'):
                    raise EngineFailed("a text that is none")
                text = choice.texts[name]
                self.append(text, value[1:-1])
                texts.append((text, value[1:-1]))
                continue
            alone = False
            if name == "tool_calls":
                self._call_tools(choice, raw)
            elif name == "logprobs":
                if choice.logprobs is None:
                    choice.logprobs = {}
                for each, items in _fields.decode(raw).items():
                    self._extend(choice.logprobs, each, bytes(items))
            elif value.startswith(b"[") and rest is choice.fields and name != "prompt_token_ids":
                self._extend(choice.lists, name, value)
            else:
                self.append(bytearray(), value)
                rest[name] = Raw(value)
        return alone

    def _extend(self, lists: dict[str, bytearray], name: str, value: bytes) -> None:
        """Extend the list *name* by *value*."""
        if value == NULL:
            return
        if not value.startswith(b"["):
            raise EngineFailed("a list that is none")
        items = lists.setdefault(name, bytearray())
        part = value[1:-1].strip()
        self.append(items, b"," + part if items and part else part)

    def _call_tools(self, choice: _Choice, raw: Raw) -> None:
        for part in _tool_calls.decode(raw):
            if not 0 <= part.index < MOST_TOOL_CALLS:
                raise EngineFailed(f"a tool call {part.index}")
            tool = choice.tools.setdefault(part.index, _Tool())
            tool.id, tool.type = part.id or tool.id, part.type or tool.type
            if part.function is not None:
                tool.name = part.function.name or tool.name
                arguments = bytes(part.function.arguments)
                if arguments != NULL:
                    if not arguments.startswith(b'"'):
                        raise EngineFailed("arguments that are no text")
                    self.append(tool.arguments, arguments[1:-1])

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        texts = {name: _checked(text) for name, text in choice.texts.items()}
        lists = {name: _list(items) for name, items in choice.lists.items()}
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {name: _list(items) for name, items in choice.logprobs.items()}
        ends = {"logprobs": logprobs, "finish_reason": None, "stop_reason": None, "token_ids": None}
        if self._call.kind is not Kind.CHAT:
            ends |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(index), "routed_experts": None}
            return {"index": index, "text": ""} | texts | ends | choice.fields | lists
        named = isinstance(self._call.body.get("tool_choice"), dict)
        message = {"role": "assistant", "content": "" if named else None} | dict.fromkeys(
            ("refusal", "annotations", "audio", "function_call")
        )
        if choice.tools:
            message["tool_calls"] = [
                {
                    "id": tool.id,
                    "type": tool.type,
                    "function": {"name": tool.name, "arguments": _checked(tool.arguments)},
                }
                for _, tool in sorted(choice.tools.items())
            ]
        message |= {"reasoning": None} | choice.message | texts
        return {"index": index, "message": message} | ends | {"routed_experts": None} | choice.fields | lists

    def _prompt_ids(self, index: int) -> Any:
        """Return the token ids of the prompt, sent once for all of its choices."""
        first = index - index % (self._call.body.get("n") or 1)
        return self._choices[first].fields.get("prompt_token_ids") if first in self._choices else None


USAGE: Final = dict.fromkeys(
    ("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")
)


def _by_the_letter(data: bytes) -> bytes:
    """Return the JSON of *data* without what only Python reads: NaN, which becomes null, and lone surrogates."""
    text = json.dumps(json.loads(data, parse_constant=lambda _: None), ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _known(data: Raw) -> dict[str, Raw]:
    """Return the fields of the object *data* that are not null."""
    return {name: value for name, value in _fields.decode(data).items() if bytes(value) != NULL}


def _inside(value: bytes) -> bytes:
    """Return a JSON string without its quotes. Raises EngineFailed if it is none."""
    if not value.startswith(b'"'):
        raise EngineFailed("a text that is none")
    return value[1:-1]


def _list(items: bytearray) -> Raw:
    return Raw(b"[" + items + b"]")


def _checked(text: bytearray) -> Raw:
    """Return *text* as a JSON string. Raises EngineFailed if it is not one."""
    whole = b'"' + bytes(text) + b'"'
    try:
        _text.decode(whole)
    except (msgspec.MsgspecError, ValueError):
        try:
            whole = _by_the_letter(whole)
        except ValueError:
            raise EngineFailed("a text that is none") from None
    return Raw(whole)
