"""What is read of a request body, before it is queued.

Refused is what could hurt us: what is too large or too deep, is no JSON, has NaN in it or names no model. JSON is read as
Python's own parser does, and the fields that we count with as vLLM's pydantic models do, numbers and booleans as text
included. Every field passes on as it was sent, and what is wrong with it vLLM says.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any, NoReturn, Self

import msgspec
import orjson
from msgspec import Struct, field

from controlplane.dispatch.port import Asked
from controlplane.gateway.admission.forms import read_form
from controlplane.gateway.admission.turns import (
    Turn,
    characters,
    chat_turns,
    message_turns,
    response_turns,
)
from controlplane.gateway.errors import JSON_TYPE, ApiError, invalid, too_large
from forecasting.lengths.query import MOST_TURNS_READ, LengthQuery, joined, read_turns
from workers.vllm.sound import sound_tokens

MAX_CHOICES = 16_384  # vLLM's own limit
MAX_COUNTED = 2**31 - 1  # tokens of a sequence that we count with; the body asks its instance for what it says
BEGINNING = 1024
"""Characters of a turn or prompt that count in the beginning of a conversation."""

TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
"""Texts that pydantic reads as true."""


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
    def generates(self) -> bool:
        """Whether its answer has output tokens. Any other call passes: of its body only the model is read."""
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
TOKENIZING = RENDERING | {Kind.TOKENIZE, Kind.DETOKENIZE, Kind.COUNT_TOKENS}
BELOW_V1 = GENERATING | ANTHROPIC | RENDERING | {Kind.EMBEDDING}
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
    prompt_characters: int  # of text and of tools, otherwise; of a call that passes, of the body without media
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    kind: Kind = Kind.COMPLETION
    raw: bytes = b""
    """The body for an instance: unchanged where it is strict JSON."""
    turns: list[Turn] = field(default_factory=list)  # of a conversation
    content_type: bytes = JSON_TYPE[1]  # of `raw`
    renamed: bool = False  # another model than `raw` has

    @classmethod
    def read(
        cls,
        raw: bytes,
        kind: Kind,
        *,
        max_depth: int,
        most_bytes: int | None = None,
        content_type: bytes = JSON_TYPE[1],
    ) -> Self:
        """Read the body *raw* of a call. Raises ApiError 400, or 413 if it is larger than *most_bytes*.

        Images, sounds and films do not count towards *most_bytes*; they have a separate limit.
        """
        if kind in SPEECH:
            return cls._speech(raw, kind, content_type)
        too_much = most_bytes is not None and len(raw) > most_bytes
        media_bytes = 0
        try:
            body, raw = read_body(raw, max_depth)
            if too_much or not kind.generates:
                media_bytes = sum(map(len, _media(body)))
            too_much = too_much and len(raw) - media_bytes > (most_bytes or 0)
        finally:
            if too_much:
                raise too_large(
                    f"The request body is larger than {most_bytes} bytes, without images, sounds and films."
                )
        model = _model(body)
        if not kind.generates:
            return cls(
                body=body,
                model=model,
                stream=False,
                include_usage=False,
                sequences=_inputs(body.get("input")),
                prompt_tokens=None,
                prompt_characters=len(raw) - media_bytes,
                max_tokens=1,
                kind=kind,
                raw=raw,
            )
        turns: list[Turn] = []
        prompt_tokens: int | None = None
        prompts, prompt_characters = 1, 0
        if kind is Kind.CHAT:
            turns = chat_turns(body)
        elif kind is Kind.RESPONSE:
            turns = response_turns(body)
        elif kind is Kind.MESSAGE:
            turns = message_turns(body)
        elif kind is Kind.CHAT_BATCH:
            given = body.get("messages")
            conversations = given if isinstance(given, list) else []
            prompts = min(max(1, len(conversations)), MAX_CHOICES)
            prompt_characters = sum(characters(chat_turns({"messages": each})) for each in conversations)
        else:
            prompts, prompt_tokens, prompt_characters = _prompt(body)
        if turns:
            tools = body.get("tools")
            prompt_characters = characters(turns) + (len(msgspec.json.encode(tools)) if tools else 0)
        max_tokens = _integer(body, "max_output_tokens" if kind is Kind.RESPONSE else "max_tokens")
        if kind in (Kind.CHAT, Kind.CHAT_BATCH):
            max_tokens = _integer(body, "max_completion_tokens") or max_tokens
        if max_tokens == 0:  # an echo of the prompt with its log-probabilities, for which vLLM makes one token
            max_tokens = 1
        options = body.get("stream_options")
        stream = kind is not Kind.CHAT_BATCH and _boolean(body, "stream")  # which vLLM does not read there
        choices = 1 if kind in TYPED else _integer(body, "n", most=MAX_CHOICES) or 1
        return cls(
            body=body,
            model=model,
            stream=stream,
            # Of a typed stream usage is in the last event, requested or not.
            include_usage=kind in TYPED or (isinstance(options, dict) and _boolean(options, "include_usage")),
            sequences=prompts * choices,
            prompt_tokens=prompt_tokens,
            prompt_characters=prompt_characters,
            max_tokens=max_tokens,
            min_tokens=min(_integer(body, "min_tokens") or 0, MAX_COUNTED if max_tokens is None else max_tokens),
            ignore_eos=_boolean(body, "ignore_eos"),
            kind=kind,
            raw=raw,
            turns=turns,
        )

    @classmethod
    def _speech(cls, raw: bytes, kind: Kind, content_type: bytes) -> Self:
        """Return a call whose prompt is a sound, as many tokens as vLLM counts for it."""
        form = read_form(raw, content_type)
        body: dict[str, Any] = dict(form.fields)
        return cls(
            body=body,
            model=_model(body),
            stream=_boolean(body, "stream"),
            include_usage=_boolean(body, "stream_include_usage"),
            sequences=1,
            prompt_tokens=sound_tokens(form.seconds),
            prompt_characters=0,
            max_tokens=_integer(body, "max_completion_tokens") or None,
            kind=kind,
            raw=raw,
            content_type=content_type,
        )

    @property
    def priority(self) -> int:
        """Return the priority that the tenant asks for, 0 without one."""
        return _integer(self.body, "priority", most=MAX_COUNTED) or 0

    def ask_for(self, model: str) -> None:
        """Ask for *model* instead."""
        self.model = self.body["model"] = model
        self.renamed = True

    def query(self, asked: Asked, slo_class: str = "") -> LengthQuery:
        """Return what the length of the answer to *asked* is predicted from, without its prompt (`with_prompt`).

        *slo_class* is the one that it was degraded from.
        """
        return LengthQuery(
            text="",
            prompt_tokens=asked.prompt_tokens,
            model=asked.model,
            tenant=asked.tenant,
            slo_class=slo_class or asked.slo_class,
            max_tokens=asked.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            sequences=asked.sequences,
        )

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


def _inputs(given: Any) -> int:
    """Return the number of sequences that vLLM makes of `input`: one of each text, list of token ids or conversation."""
    return len(given) if isinstance(given, list) and given and isinstance(given[0], str | list) else 1


def _model(body: dict[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("`model` must be the name of a model.", "model", "missing_required_parameter")
    return model


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
    """Yield media in parts of messages, `{"image_url": {"url": …}}` or `{"image_url": …}`, and Cohere's images."""
    turns = body.get("messages") or body.get("input") or body.get("inputs")
    for turn in turns if isinstance(turns, list) else ():
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else ():
            for name, value in part.items() if isinstance(part, dict) else ():
                for text in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(text, str) and name != "text":
                        yield text
    images = body.get("images")
    yield from (image for image in (images if isinstance(images, list) else ()) if isinstance(image, str))


def _boolean(body: dict[str, Any], name: str) -> bool:
    """Return the field *name* as pydantic reads a boolean; False where it is none."""
    value = body.get(name)
    return value.lower() in TRUE if isinstance(value, str) else value in (True, 1)


def _integer(body: dict[str, Any], name: str, *, most: int = MAX_COUNTED) -> int | None:
    """Return the field *name* as pydantic reads an integer, between 0 and *most*; None where it is none."""
    value = body.get(name)
    if not isinstance(value, int | float | str):
        return None
    try:
        return min(max(0, int(float(value))), most)
    except (ValueError, OverflowError):
        return None


def _prompt(body: dict[str, Any]) -> tuple[int, int | None, int]:
    """Return (prompts, exact tokens or None, characters of text) of a string, token ids, or a list of either."""
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if embeds and not prompt:  # computed by the caller, for instances that take them
        return len(embeds) if isinstance(embeds, list) else 1, None, 0
    if isinstance(prompt, str):
        return 1, None, len(prompt)
    if not isinstance(prompt, list) or not prompt:
        return 1, None, 0
    if isinstance(prompt[0], list):
        return len(prompt), max(1, sum(len(each) for each in prompt if isinstance(each, list))), 0
    if isinstance(prompt[0], str):
        return len(prompt), None, sum(len(each) for each in prompt if isinstance(each, str))
    return 1, len(prompt), 0


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
