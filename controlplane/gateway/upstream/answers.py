"""Answers of an instance as bounded values: the only place where its bytes are parsed.

Nothing from an instance has a trusted type or size before it is read here. An answer that does not fit the request raises
`EngineFailed`, which names what came instead; an impossible usage counts as missing.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from controlplane.dispatch.port import BUSY
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import ApiError
from forecasting.lengths.online import CHARACTERS_PER_TOKEN
from workers.vllm.sound import TOKENS_PER_S, sound_tokens

ENGINE_DEAD = b"EngineCore encountered an issue"  # vLLM's EngineDeadError: its API server answers a few seconds longer
BUSY_STATUSES = frozenset({401, 500, 502, 503, 504})
"""Statuses of the instance's own trouble: another may do better. 401 is about our token, never about the tenant's."""


class InstanceLost(Exception):
    """The instance failed before it sent a byte of the answer: the request may go to another.

    *failure*: `controlplane.dispatch.port.Left.failure`. *came*: what came instead of an answer, in words for the tenant.
    *busy*: status of an instance that takes no more for *wait_s*; 0: of no such one.
    """

    def __init__(self, reason: str, failure: str = "", came: str = "", *, busy: int = 0, wait_s: float = 1.0) -> None:
        super().__init__(reason)
        self.failure, self.came, self.wait_s = BUSY if busy else failure, came, wait_s
        message = "Every instance that could take the request is busy."
        self.error = ApiError(busy, message, code="instance_busy", retry_after_s=wait_s) if busy else None
        """The tenant's answer if no other can take it."""


class Evicted(Exception):
    """The instance was left because others need it; its output is kept, and the request returns to the queue."""


class Interrupted(ApiError):
    """The instance failed after the first byte. *failure*: as above; *reason*: `controlplane.dispatch.port.Left.reason`."""

    def __init__(
        self,
        failure: str,
        reason: str = "",
        *,
        code: str,
        status: int = 502,
        message: str = "The instance that served this request failed before the answer was complete.",
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(status, message, code=code, retry_after_s=retry_after_s)
        self.failure, self.reason = failure, reason


def reclaimed() -> Interrupted:
    """Return the end of a request whose class is not queued again when a donated instance is reclaimed."""
    why = "The donated instance that served this opportunistic request was reclaimed before the answer was complete."
    return Interrupted("", "the donated instance was reclaimed", code="spot_reclaimed", status=503, message=why)


def run_stopped() -> Interrupted:
    """Return the end of a request whose application run an operator has stopped."""
    why = "An operator has stopped this run."
    return Interrupted("", "its run was stopped", code="run_stopped", status=409, message=why, retry_after_s=None)


class EngineFailed(Exception):
    """An instance gave no answer to the request. *reason*: what came instead; *dead*: it will answer no other either."""

    def __init__(self, reason: str, *, dead: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.dead = reason, dead


class Refusal(ApiError):
    """The instance's refusal of a bad request, for its tenant; *number*: its code, where that is a number."""

    def __init__(
        self, status: int, message: str, *, type: str, param: str | None, code: str, number: int | None
    ) -> None:
        super().__init__(status, message, type=type, param=param, code=code)
        self.number = number

    def fields(self) -> dict[str, object]:
        return super().fields() | ({"code": self.number} if self.number is not None else {})


class RefusedByInstance(Exception):
    """The instance refused the request for good, and its answer has been passed on.

    Its words are for the tenant alone: they may quote the request.
    """

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"refused with {status}")
        self.code, self.status = "refused_by_instance", status
        self.message = f"The instance refused the request with status {status}."
        if code == CONTEXT_LENGTH:
            self.message += " It has more tokens than the model's context."


MAX_TOKENS = 2**31 - 1
MAX_ANSWER_BYTES = 2**28
"""Longest answer, all of which is held in memory."""
MAX_CHARACTERS = 4000  # of an error's message
JSON_KINDS = {
    dict: "a JSON object",
    list: "a JSON array",
    str: "a JSON string",
    bool: "a JSON boolean",
    type(None): "null",
}
OF_THE_REQUEST = frozenset({"badrequesterror", "invalid_request_error", "notfounderror", "unprocessableentityerror"})
"""Types of errors without a number that are about the request."""
NOT_IMPLEMENTED = 501  # a part of the API that is disabled on this server
CONTEXT_LENGTH = "context_length_exceeded"
TOO_LONG = re.compile("maximum context length|cannot be greater than max_model_len")
"""vLLM's words for more tokens than a context has, which OpenAI and its clients know by a code."""
NO_ROUTE = "Not Found"
"""FastAPI's answer to a path that it does not have."""
NOT_OF_THE_REQUEST = BUSY_STATUSES | {403, 405, 407, 408}
"""Statuses that say nothing about the request: the address, our token, a proxy or the engine is at fault."""


GIVEN_UP = ("abort", "error")
"""vLLM's finish reasons that do not end an answer: its engine was stopped, or failed."""


class Choice(Struct, gc=False):
    finish_reason: Any = None


class InstanceMessage(Struct, gc=False):
    """A JSON object of an instance: a whole answer, a stream event or an error. `Any` fields are unchecked."""

    choices: list[Choice] | None = None
    output: Any = None  # of a response
    content: Any = None  # of a message
    text: Any = None  # of a sound
    duration: Any = None  # of a sound, in seconds
    meta: Any = None  # of Cohere's vectors
    usage: Any = None
    metrics: Any = None
    # Events of the Responses API
    type: Any = None
    response: Any = None
    delta: Any = None  # of a message
    sequence_number: Any = None
    # Errors
    error: Any = None
    object: Any = None
    message: Any = None
    param: Any = None
    code: Any = None
    detail: Any | UnsetType = UNSET  # FastAPI's own

    @property
    def ends(self) -> int:
        """Return the number of choices that end in it."""
        choices = self.choices
        if not choices:
            return 0
        return (
            sum([bool(choice.finish_reason) for choice in choices]) if choices[1:] else bool(choices[0].finish_reason)
        )

    @property
    def broken_off(self) -> bool:
        """Whether a choice has ended because its engine gave it up."""
        return any(choice.finish_reason in GIVEN_UP for choice in self.choices or ())

    @property
    def first_token_s(self) -> float | None:
        """Return seconds from its arrival to its first token, where the server reports them."""
        metrics = self.metrics if isinstance(self.metrics, dict) else {}
        first_ms = metrics.get("time_to_first_token_ms")
        if isinstance(first_ms, bool) or not isinstance(first_ms, int | float) or not 0 <= first_ms < MAX_TOKENS:
            return None
        return first_ms / 1000

    @property
    def raw_usage(self) -> Any:
        """Return the raw usage, wherever it is."""
        return self.response.get("usage") if isinstance(self.response, dict) else self.usage


CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")


class Usage:
    """Token counts of an answer, as far as its instance reported them."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens", "whole")

    def __init__(self) -> None:
        self.whole = False  # a stream's last event was passed on
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        """Of the prompt, found in the prefix cache; None where the server does not say it: vLLM does with
        --enable-prompt-tokens-details.
        """

    def update(self, usage: Any) -> None:
        """Take in *usage*; changes nothing where it has no counts."""
        if isinstance(usage, dict):
            prompt = _tokens(usage, "prompt_tokens", "input_tokens")
            if prompt is not None and "input_tokens" in usage:  # Anthropic counts what was cached separately
                prompt += sum(_tokens(usage, name) or 0 for name in CACHED)
            output = _tokens(usage, "completion_tokens", "output_tokens")
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _tokens(details, "cached_tokens")
            elif "cache_read_input_tokens" in usage:
                self.cached_tokens = _tokens(usage, "cache_read_input_tokens")
            self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
            self.output_tokens = self.output_tokens if output is None else output


def _tokens(usage: dict[str, Any], *names: str) -> int | None:
    value = next((usage[name] for name in names if name in usage), None)
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def ids_of(value: Any) -> list[int]:
    """Return *value* as token ids; empty if it is not a list of them."""
    ids = value if isinstance(value, list) else []
    return ids if all(type(each) is int and 0 <= each <= MAX_TOKENS for each in ids) else []


_decoder = msgspec.json.Decoder(InstanceMessage)
_fields_decoder = msgspec.json.Decoder(dict[str, Any])


def read(data: bytes) -> InstanceMessage:
    """Return *data* as the required JSON object."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:  # Python's own servers write NaN, which no standard allows and every client of theirs reads
        return msgspec.convert(json.loads(data), InstanceMessage)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise EngineFailed(describe_payload(data)) from None


def describe_payload(data: bytes) -> str:
    """Describe *data*, which should have been a certain JSON object, without its content."""
    text = data.strip()
    if not text:
        return "nothing"
    if text.startswith(b"<"):
        return "HTML"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "text that is not JSON"
    return JSON_KINDS.get(type(value), "a JSON number")


def whole(data: bytes, kind: Kind) -> InstanceMessage:
    """Return the answer *data* to a call that was not streamed. Raises Refusal for an error about the call."""
    said = read(data)
    error = error_of(said)
    if error is not None:
        raise error
    part = PARTS.get(kind, "choices")
    if not isinstance(getattr(said, part), str if part == "text" else list):
        raise EngineFailed(f"a JSON object without {part}")
    if said.broken_off:
        raise EngineFailed("an answer that was given up")
    return said


PARTS = {Kind.RESPONSE: "output", Kind.MESSAGE: "content", Kind.TRANSCRIPTION: "text", Kind.TRANSLATION: "text"}


def usage_of(data: bytes) -> Any:
    """Return the raw usage of the answer *data* to a call without output. Raises Refusal for an error about the call."""
    if data.lstrip().startswith(b"["):  # what is rendered of several prompts
        return None
    said = read(data)
    error = error_of(said)
    if error is not None:
        raise error
    return said.meta.get("billed_units") if isinstance(said.meta, dict) else said.usage


def sound_usage(said: InstanceMessage, estimated: int) -> dict[str, int]:
    """Return the usage of the transcription *said*, whose server counts no tokens: those of its seconds and its text.

    vLLM rounds seconds up: where they agree with the *estimated* prompt tokens, those stay.
    """
    seconds = said.usage.get("seconds") if isinstance(said.usage, dict) else said.duration
    usage = {"completion_tokens": round(len(said.text) / CHARACTERS_PER_TOKEN)}
    if not isinstance(seconds, bool) and isinstance(seconds, int | float) and 0 <= seconds < MAX_TOKENS / TOKENS_PER_S:
        tokens = sound_tokens(seconds)
        usage["prompt_tokens"] = estimated if 0 <= tokens - estimated < TOKENS_PER_S else tokens
    return usage


def estimated_tokens(answer: bytes) -> int:
    """Return the output tokens of the whole *answer*, whose instance does not count them, by the length of its texts."""
    try:
        written = sum(map(len, _written(json.loads(answer))))
    except (ValueError, RecursionError):
        return 0
    return math.ceil(written / CHARACTERS_PER_TOKEN)


WRITTEN = frozenset({"content", "reasoning", "reasoning_content", "refusal", "text", "thinking", "arguments"})
"""Fields with what a model wrote."""


def _written(value: Any) -> Iterator[str]:
    """Yield the texts that a model wrote in *value*, at any depth."""
    for part in value if isinstance(value, list) else ():
        yield from _written(part)
    for name, part in value.items() if isinstance(value, dict) else ():
        if not isinstance(part, str):
            yield from _written(part)
        elif name in WRITTEN:
            yield part


def usage_in(metadata: bytes) -> Any:
    """Return the raw usage in the `metadata` header of vectors sent as bytes; None where it has none."""
    try:
        return _fields_decoder.decode(metadata).get("usage")
    except (msgspec.MsgspecError, ValueError):
        return None


def refusal(status: int, data: bytes) -> Refusal | None:
    """Return the refusal in an answer with a *status* other than 200; None if it is not about the call."""
    if not (400 <= status < 500 or status == NOT_IMPLEMENTED) or status in NOT_OF_THE_REQUEST:
        return None
    try:
        said = read(data)
    except EngineFailed:
        said = None
    error = _fields(said) if said is not None else None
    if error is not None and status == 404 and error.get("message") == NO_ROUTE:
        message = "The server that the request was given to does not serve this call."
        error = {"message": message, "code": "unsupported_endpoint"}
    if error is None:
        if status == 404:  # not about the model: no vLLM is there
            return None
        error = {"message": f"The instance refused the request with status {status}."}
    return _refusal(status, error)


def error_of(said: InstanceMessage, name: bytes = b"") -> Exception | None:
    """Return the error in *said*, an event of this *name* or an answer, in any form that vLLM has had; None without one.

    A `Refusal` is about the call, an `EngineFailed` about the instance.
    """
    error = _fields(said, name)
    if error is None:
        return None
    code, text = error.get("code"), _text(error.get("message"))
    number = int(code) if isinstance(code, int | str) and str(code).isdecimal() and len(str(code)) == 3 else None
    if number is None:
        number = (
            400 if {(_word(error.get("type")) or "").lower(), (_word(code) or "").lower()} & OF_THE_REQUEST else 500
        )
    if ENGINE_DEAD.decode() in text:
        return EngineFailed("its engine died", dead=True)
    if 400 <= number < 500 and number not in NOT_OF_THE_REQUEST:
        return _refusal(number, error)
    return EngineFailed(f"error {number}")


def _fields(said: InstanceMessage, name: bytes = b"") -> dict[str, Any] | None:
    """Return message, type, param and code of the error *said*."""
    error = said.error
    if error is None or (not error and said.choices is not None):
        if said.type == "response.failed" and isinstance(said.response, dict):
            error = said.response.get("error") or {}
        elif "error" in (said.object, said.type) or name == b"error":
            error = {"message": said.message, "type": said.type, "param": said.param, "code": said.code}
        elif said.detail is not UNSET and said.choices is None and said.output is None:
            error = {"message": said.detail}
        else:
            return None
    return error if isinstance(error, dict) else {"message": error}


def _refusal(status: int, error: dict[str, Any]) -> Refusal:
    """Return *error* in OpenAI's shape."""
    code, message = error.get("code"), _text(error.get("message"))[:MAX_CHARACTERS]
    if status == 400 and TOO_LONG.search(message):
        code = CONTEXT_LENGTH
    return Refusal(
        status,
        message,
        type=_word(error.get("type")) or "invalid_request_error",
        param=_word(error.get("param")),
        code=_word(code) or str(status),
        number=code if type(code) is int and 0 <= code <= MAX_TOKENS else None,
    )


def _text(value: Any) -> str:
    """Return *value* in characters that can be encoded."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return ""


def _word(value: Any) -> str | None:
    return _text(value)[:100] if isinstance(value, str) else None
