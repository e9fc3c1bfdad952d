"""Validation of a request body, before anything is queued for it.

Only fields that we act on, or that would otherwise fail late or cost much, are checked; every other field passes through to
vLLM untouched. Everything that vLLM accepts is accepted: JSON as Python's own parser reads it, and fields as vLLM's pydantic
models do, including numbers and booleans as text. Each error names the field, as `param` in the OpenAI error body.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import msgspec
import orjson
from msgspec import Struct, field
from pydantic import Field, TypeAdapter, ValidationError

from controlplane.gateway.admission.forms import read_form, with_field
from controlplane.gateway.admission.turns import (
    Turn,
    characters,
    chat_turns,
    message_turns,
    response_as_chat,
    response_turns,
)
from controlplane.gateway.errors import JSON_TYPE, ApiError, invalid, too_large
from forecasting.lengths.query import MOST_TURNS_READ, LengthQuery, joined, read_turns
from workers.vllm.sound import sound_tokens

MAX_CHOICES = 16_384  # vLLM's own limit
MAX_TOKENS = 2**64 - 1  # largest integer of JSON here; vLLM refuses more than a model's context
MAX_COUNTED = 2**31 - 1  # tokens of a sequence that we count with; the body asks its instance for what it says
MAX_PRIORITY = 2**63 - 1
BEGINNING = 1024
"""Characters of a turn or prompt that count in the beginning of a conversation."""

_LAX: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (int, float, bool)}
TokenId = Annotated[int, Field(ge=0, lt=2**64)]
_PROMPT: TypeAdapter[Any] = TypeAdapter(list[TokenId] | list[list[TokenId]] | str | list[str])  # as declared by vLLM


class Kind(StrEnum):
    """A call that instances answer; its value is the last part of its path."""

    CHAT = "chat/completions"
    CHAT_BATCH = "chat/completions/batch"
    COMPLETION = "completions"
    RESPONSE = "responses"
    MESSAGE = "messages"
    TRANSCRIPTION = "audio/transcriptions"
    TRANSLATION = "audio/translations"
    COUNT_TOKENS = "messages/count_tokens"
    INPUT_TOKENS = "responses/input_tokens"
    RENDER_CHAT = "chat/completions/render"
    RENDER_COMPLETION = "completions/render"
    RENDER_RESPONSE = "responses/render"
    RENDER_MESSAGE = "messages/render"
    EMBEDDING = "embeddings"
    COHERE_EMBED = "v2/embed"
    RERANK = "rerank"
    SCORE = "score"
    POOLING = "pooling"
    CLASSIFY = "classify"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def path(self) -> str:
        """Return the path: calls of OpenAI and Anthropic are below `/v1`."""
        return f"/v1/{self}" if self in BELOW_V1 else f"/{self}"

    @property
    def instance_path(self) -> str:
        """Return the path at an instance: vLLM counts no input tokens of a response, but those of a chat."""
        return Kind.TOKENIZE.path if self is Kind.INPUT_TOKENS else self.path

    @property
    def generates(self) -> bool:
        """Whether its answer has output tokens."""
        return self in GENERATING

    @property
    def computes(self) -> bool:
        """Whether the engine computes anything: not for a tokenizer, which the API server has."""
        return self not in TOKENIZING


SPEECH = frozenset({Kind.TRANSCRIPTION, Kind.TRANSLATION})
"""Calls whose body is a form with a sound."""
GENERATING = frozenset({Kind.CHAT, Kind.CHAT_BATCH, Kind.COMPLETION, Kind.RESPONSE, Kind.MESSAGE}) | SPEECH
ANTHROPIC = frozenset({Kind.MESSAGE, Kind.COUNT_TOKENS})
RENDERING = frozenset({Kind.RENDER_CHAT, Kind.RENDER_COMPLETION, Kind.RENDER_RESPONSE, Kind.RENDER_MESSAGE})
TOKENIZING = RENDERING | {Kind.TOKENIZE, Kind.DETOKENIZE, Kind.COUNT_TOKENS, Kind.INPUT_TOKENS}
BELOW_V1 = GENERATING | ANTHROPIC | RENDERING | {Kind.INPUT_TOKENS, Kind.EMBEDDING}
PATH_KINDS = {kind.path: kind for kind in Kind}
PATH_KINDS |= {f"/v1/{kind}": kind for kind in Kind if kind is not Kind.COHERE_EMBED} | {"/v2/rerank": Kind.RERANK}
"""Calls by path. vLLM's own are below `/v1` too, where OpenAI's SDKs look for them."""
TYPED = frozenset({Kind.RESPONSE, Kind.MESSAGE})
"""Calls whose streams have events with a type each, instead of choices."""


class Call(Struct):
    """A checked request body and what the dispatcher needs from it."""

    body: dict[str, Any]
    model: str
    stream: bool
    include_usage: bool  # the tenant gets usage at the end of a stream
    sequences: int  # prompts x choices, which vLLM runs at once for this request
    prompt_tokens: int | None  # exact when the prompt came as token ids
    prompt_characters: int  # of text and of tools, otherwise
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    kind: Kind = Kind.COMPLETION
    raw: bytes = b""
    """The body for an instance: unchanged where it is strict JSON."""
    turns: list[Turn] = field(default_factory=list)  # of a conversation
    content_type: bytes = JSON_TYPE[1]  # of `raw`

    def __post_init__(self) -> None:
        self.min_tokens = min(self.min_tokens, MAX_COUNTED)
        if self.max_tokens is not None:
            self.max_tokens = min(self.max_tokens, MAX_COUNTED)

    def rename(self, model: str) -> None:
        """Ask for *model* instead."""
        self.model = self.body["model"] = model
        if self.kind in SPEECH:  # of two fields of one name vLLM takes the last
            self.raw = with_field(self.raw, self.content_type, "model", model)
        else:
            self.raw = orjson.dumps(self.body)

    @property
    def beginning(self) -> str:
        """Return what later requests of its conversation have too: the end user, and the turns up to the first of a user, or
        the beginning of its prompt.
        """
        pieces = [str(self.body.get("user") or self.body.get("safety_identifier"))[:BEGINNING]]
        for role, content in self.turns:
            pieces.append(f"{role}\0{_text_of(content)[:BEGINNING]}")
            if role == "user":
                break
        first = self.body.get("prompt") or self.body.get("input")
        if isinstance(first, list) and first and isinstance(first[0], list | str):
            first = first[0]
        if not self.turns and isinstance(first, list | str):
            pieces.append(str(first[:BEGINNING]))
        return "\0".join(pieces)


def parse(
    raw: bytes, kind: Kind, *, max_depth: int, most_bytes: int | None = None, content_type: bytes = JSON_TYPE[1]
) -> Call:
    """Check the body *raw* of a call. Raises ApiError 400, or 413 if it is larger than *most_bytes*.

    Images, sounds and films do not count towards *most_bytes*; they have a separate limit.
    """
    if kind in SPEECH:
        return _speech(raw, kind, content_type)
    too_much = most_bytes is not None and len(raw) > most_bytes
    try:
        body, raw = read_body(raw, max_depth)
        too_much = too_much and len(raw) - sum(map(len, _media(body))) > (most_bytes or 0)
    finally:
        if too_much:
            raise too_large(f"The request body is larger than {most_bytes} bytes, without images, sounds and films.")
    model = _model(body)
    if not kind.generates:
        _integer(body, "priority", least=-MAX_PRIORITY, most=MAX_PRIORITY)
        if kind is Kind.INPUT_TOKENS:
            raw = msgspec.json.encode(response_as_chat(body))
        return _without_output(body, model, kind, raw)
    stream_asked = body.get("stream")
    stream = _boolean(body, "stream")
    choices, min_tokens, turns = 1, 0, []
    if kind is Kind.RESPONSE:  # usage is in its last event, requested or not
        include_usage, prompts, prompt_tokens, turns = True, 1, None, response_turns(body)
        max_tokens = _integer(body, "max_output_tokens", least=1, most=MAX_TOKENS)
    elif kind is Kind.MESSAGE:
        include_usage, prompts, prompt_tokens, turns = True, 1, None, message_turns(body)
        max_tokens = _integer(body, "max_tokens", least=1, most=MAX_TOKENS)
        if max_tokens is None:
            raise invalid("`max_tokens` must be given.", "max_tokens", "missing_required_parameter")
    else:
        include_usage = _stream_options(body, bool(stream_asked))
        choices = _integer(body, "n", least=1, most=MAX_CHOICES) or 1
        min_tokens = _integer(body, "min_tokens", least=0, most=MAX_TOKENS) or 0
        # A prompt's own log-probabilities are requested by an echo without output, for which vLLM makes one token.
        scores_only = kind is Kind.COMPLETION and _boolean(body, "echo")
        max_tokens = _integer(body, "max_tokens", least=0 if scores_only else 1, most=MAX_TOKENS)
        max_tokens = 1 if max_tokens == 0 else max_tokens
    if kind in (Kind.CHAT, Kind.CHAT_BATCH):
        max_tokens = _integer(body, "max_completion_tokens", least=1, most=MAX_TOKENS) or max_tokens
    if kind is Kind.CHAT:
        prompts, prompt_tokens, turns = 1, None, chat_turns(body)
    elif kind is Kind.CHAT_BATCH:
        stream, prompt_tokens = False, None  # which vLLM does not read here
        conversations = _conversations(body)
        prompts, prompt_characters = len(conversations), sum(map(characters, conversations))
    elif kind is Kind.COMPLETION:
        prompts, prompt_tokens, prompt_characters = _prompt(body)
    if turns:
        tools = _typed(body, "tools", (list,), "a list") if "tools" in body else None
        prompt_characters = characters(turns) + (len(msgspec.json.encode(tools)) if tools else 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"`min_tokens` ({min_tokens}) is larger than `max_tokens` ({max_tokens}).", "min_tokens")
    _number(body, "temperature", least=0.0, most=2.0)
    _number(body, "top_p", least=0.0, most=1.0)
    _integer(body, "priority", least=-MAX_PRIORITY, most=MAX_PRIORITY)
    _stop(body, "stop_sequences" if kind is Kind.MESSAGE else "stop")
    return Call(
        body=body,
        model=model,
        stream=stream,
        include_usage=include_usage,
        sequences=prompts * choices,
        prompt_tokens=prompt_tokens,
        prompt_characters=prompt_characters,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_boolean(body, "ignore_eos"),
        kind=kind,
        raw=raw,
        turns=turns,
    )


def _model(body: dict[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("`model` must be the name of a model.", "model", "missing_required_parameter")
    return model


def _conversations(body: dict[str, Any]) -> list[list[Turn]]:
    """Return the conversations of a batch of chats."""
    given = body.get("messages")
    if not isinstance(given, list) or not given or len(given) > MAX_CHOICES:
        words = f"`messages` must be a list of 1 to {MAX_CHOICES} conversations, each a list of messages."
        raise invalid(words, "messages", "invalid_type" if given else "missing_required_parameter")
    return [chat_turns({"messages": each}) for each in given]


def _speech(raw: bytes, kind: Kind, content_type: bytes) -> Call:
    """Return a call whose prompt is a sound, as many tokens as vLLM counts for it."""
    form = read_form(raw, content_type)
    body: dict[str, Any] = dict(form.fields)
    return Call(
        body=body,
        model=_model(body),
        stream=_boolean(body, "stream"),
        include_usage=_boolean(body, "stream_include_usage"),
        sequences=1,
        prompt_tokens=sound_tokens(form.seconds),
        prompt_characters=0,
        max_tokens=_integer(body, "max_completion_tokens", least=1, most=MAX_TOKENS),
        min_tokens=0,
        ignore_eos=False,
        kind=kind,
        raw=raw,
        content_type=content_type,
    )


def _without_output(body: dict[str, Any], model: str, kind: Kind, raw: bytes) -> Call:
    """Return a call that nothing is generated for; `admission.inputs` measures its inputs by the task of its model."""
    return Call(
        body=body,
        model=model,
        stream=False,
        include_usage=False,
        sequences=1,
        prompt_tokens=None,
        prompt_characters=0,
        max_tokens=1,
        min_tokens=0,
        ignore_eos=False,
        kind=kind,
        raw=raw,
    )


def read_body(raw: bytes, max_depth: int) -> tuple[dict[str, Any], bytes]:
    """Return the object of the JSON in *raw*, and the body to pass on. Raises ApiError 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw = _by_the_letter(raw)
            body = orjson.loads(raw)
        except RecursionError:
            raise _too_deep(max_depth) from None
        except ValueError:
            raise invalid(
                f"The request body is not valid JSON: {_what_is_wrong(raw, error)}", code="invalid_json"
            ) from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    if _opens_more(raw, max_depth):  # no body is deeper than its number of brackets
        _check_depth(body, max_depth)
    return body, raw


def _opens_more(raw: bytes, most: int) -> bool:
    """Return whether *raw* has more than *most* opening brackets: `find` is 20 times as fast as `count` over long texts."""
    for bracket in b"[{":
        at = raw.find(bracket)
        while at >= 0 and most >= 0:
            most -= 1
            at = raw.find(bracket, at + 1)
    return most < 0


def _by_the_letter(raw: bytes) -> bytes:
    """Return *raw* in UTF-8 without what the standard forbids and Python's parser, which is vLLM's, accepts.

    That is a byte order mark, another encoding of Unicode, and a lone surrogate (which becomes U+FFFD: a client cut a text
    within a character).

    Raises ValueError for what that parser rejects too, and for NaN and infinities; RecursionError for what is too deep.
    """
    body = json.loads(raw, parse_constant=_refuse_constant)
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _what_is_wrong(raw: bytes, error: ValueError) -> str:
    """Say what is wrong with *raw*; of bytes that are no text, the parser that raised *error* says it in other terms."""
    try:
        raw.decode()
    except UnicodeDecodeError as at:
        compressed = " It begins as gzip does: send it uncompressed." * raw.startswith(b"\x1f\x8b")
        return f"byte {at.start}, 0x{raw[at.start]:02x}, is not UTF-8.{compressed}"
    return str(error)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _too_deep(max_depth: int) -> ApiError:
    return invalid(f"The request body is nested deeper than {max_depth} levels.", code="json_too_deep")


def _check_depth(body: dict[str, Any], max_depth: int) -> None:
    """Check the depth level by level, so that a deep body costs no recursion."""
    level: list[Any] = [body]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _media(body: dict[str, Any]) -> Iterator[str]:
    """Yield media in parts of messages: `{"image_url": {"url": …}}` in a chat, `{"image_url": …}` in a response."""
    turns = body.get("messages") or body.get("input")
    for turn in turns if isinstance(turns, list) else ():
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else ():
            for name, value in part.items() if isinstance(part, dict) else ():
                for text in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(text, str) and name != "text":
                        yield text


def _typed(body: dict[str, Any], name: str, kinds: tuple[type, ...], words: str) -> Any:
    value = body[name]
    if value is not None and not isinstance(value, kinds):
        raise invalid(f"`{name}` must be {words}, not {type(value).__name__}.", name, "invalid_type")
    return value


def _lax(body: dict[str, Any], name: str, kind: type, words: str, param: str = "") -> Any:
    """Return the field *name* as pydantic reads a *kind*, None without it; the value in *body* is replaced by it."""
    value = body.get(name)
    if value is None or type(value) is kind:
        return value
    return _read_as(body, name, _LAX[kind], words, param or name)


def _read_as(body: dict[str, Any], name: str, declared: TypeAdapter[Any], words: str, param: str) -> Any:
    value = body[name]
    try:
        body[name] = read = declared.validate_python(value)
    except ValidationError:
        shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
        raise invalid(f"`{param}` must be {words}, not {shown[:40]}.", param, "invalid_type") from None
    return read


def _boolean(body: dict[str, Any], name: str, param: str = "") -> bool:
    return bool(_lax(body, name, bool, "true or false", param))


def _integer(body: dict[str, Any], name: str, *, least: int, most: int) -> int | None:
    given = body.get(name)
    large = isinstance(given, float) and given.is_integer() and abs(given) > MAX_TOKENS  # the parser makes it a float
    value: int | None = int(body[name]) if large else _lax(body, name, int, "an integer")
    if value is not None and not least <= value <= most:
        shown = given if large else value
        raise invalid(f"`{name}` must be between {least} and {most}, not {shown}.", name, "integer_out_of_range")
    return value


def _number(body: dict[str, Any], name: str, *, least: float, most: float) -> None:
    value = _lax(body, name, float, "a number")
    if value is not None and not least <= value <= most:
        raise invalid(f"`{name}` must be between {least:g} and {most:g}, not {value}.", name, "decimal_out_of_range")


def _stream_options(body: dict[str, Any], stream: bool) -> bool:
    options = _typed(body, "stream_options", (dict,), "an object") if "stream_options" in body else None
    if not options:
        return False
    if not stream:
        raise invalid("`stream_options` is only allowed when `stream` is true.", "stream_options")
    return _boolean(options, "include_usage", "stream_options.include_usage")


def _stop(body: dict[str, Any], name: str) -> None:
    if name not in body:
        return
    stop = _typed(body, name, (str, list), "a string or a list of strings")
    if isinstance(stop, list) and not all(isinstance(word, str) for word in stop):
        raise invalid(f"`{name}` must be a string or a list of strings.", name, "invalid_type")


def _prompt(body: dict[str, Any]) -> tuple[int, int | None, int]:
    """Return (prompts, exact tokens or None, characters of text) of a string, token ids, or a list of either."""
    prompt = body.get("prompt")
    embeds = body.get("prompt_embeds")
    if embeds and not prompt:  # computed by the caller, for instances that take them
        return len(embeds) if isinstance(embeds, list) else 1, None, 0
    if isinstance(prompt, list) and type(prompt[0] if prompt else None) is int and set(map(type, prompt)) == {int}:
        pass  # the longest lists: pydantic takes its time over them
    elif prompt not in (None, "", []):
        prompt = _read_as(body, "prompt", _PROMPT, "text, token ids (integers from 0), or a list of either", "prompt")
    if prompt and isinstance(prompt, str):
        return 1, None, len(prompt)
    if not prompt or (isinstance(prompt[0], list) and [] in prompt):
        raise invalid("`prompt` must hold text or token ids.", "prompt", "missing_required_parameter")
    first = prompt[0]
    if isinstance(first, int):
        if min(prompt) < 0:
            raise invalid("`prompt` must be a list of token ids (integers from 0).", "prompt", "invalid_type")
        return 1, len(prompt), 0
    if isinstance(first, str):
        return len(prompt), None, sum(map(len, prompt))
    return len(prompt), sum(map(len, prompt)), 0


def with_prompt(call: Call, query: LengthQuery) -> LengthQuery:
    """Return *query* with what a length model reads of *call*, its text bounded by `read_turns`.

    Prompts of a batch come one after the other, and are no conversation. Token ids have no text.
    """
    tools = call.body.get("tools")
    conversation = None
    if call.turns:
        read = [(role, _text_of(content)) for role, content in call.turns[-MOST_TURNS_READ:]]
        text, conversation = read_turns(read, _text_of(call.turns[0][1]))
    else:
        prompt = call.body.get("prompt")
        turns = [_text_of(each) for each in (prompt[-MOST_TURNS_READ:] if isinstance(prompt, list) else [prompt])]
        text = joined(turns, turns[0] if turns else "")
    return replace(
        query,
        text=text,
        turns=len(call.turns) or 1,
        conversation=conversation,
        tools=len(tools) if isinstance(tools, list) else 0,
    )


def _text_of(turn: Any) -> str:
    """Return the text of one message or prompt."""
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, list):
        return ""
    parts = (part.get("text") for part in turn[-MOST_TURNS_READ:] if isinstance(part, dict))
    return "\n".join(text for text in parts if isinstance(text, str))
