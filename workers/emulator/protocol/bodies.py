"""Bodies of generation requests, read as vLLM 0.32 reads them.

The fields that change what an emulated server does are read; unknown ones are ignored, as vLLM ignores them.
"""

import json
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.emulator.protocol.errors import ApiError, entry, malformed, wrong

INT64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
NATURAL = Annotated[int, Field(ge=0)]
MAX_STOP_STRINGS = 4
MAX_PROMPTS = 1024

Kind = Literal["completion", "chat"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class StreamOptions(_Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Part(_Body):
    type: str = "text"
    text: str | None = None


class Message(_Body):
    role: str
    content: str | list[Part | str] | None = None


class ResponseFormat(_Body):
    type: str


class GenerationBody(_Body):
    """What both calls share."""

    model: str | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    min_p: float | None = None
    min_tokens: int = 0
    presence_penalty: float | None = None
    priority: INT64 = 0
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    seed: INT64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    use_beam_search: bool = False


class CompletionBody(GenerationBody):
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    prompt: list[NATURAL] | list[list[NATURAL]] | str | list[str] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None


class ChatBody(GenerationBody):
    messages: list[Message]
    echo: bool = False
    logprobs: bool | None = False
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = 1
    tool_choice: Any = None
    tools: list[dict[str, Any]] | None = None


def read_body(kind: Kind, content_type: str, raw: bytes) -> CompletionBody | ChatBody:
    """Decode and check types. Raises ApiError as vLLM answers."""
    if content_type != "application/json":
        raise malformed(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    if not raw:
        raise malformed([entry("missing", "body", "Field required", None)], "body")
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise _bad_json(raw) from None
    if not isinstance(data, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise malformed([entry("model_attributes_type", "body", message, data)], "body")
    _check_raw(kind, data)
    try:
        return CompletionBody.model_validate(data) if kind == "completion" else ChatBody.model_validate(data)
    except ValidationError as error:
        raise _invalid(error) from None


def _check_raw(kind: Kind, data: dict[str, Any]) -> None:
    """What vLLM checks before the types."""
    if kind == "completion" and data.get("prompt") in (None, "") and not data.get("prompt_embeds"):
        raise wrong("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if data.get("stream_options") and not data.get("stream"):
        raise wrong("Stream options can only be defined when `stream=True`.", "stream_options")
    if kind == "chat" and data.get("tools") == []:
        raise wrong(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    prompts = data.get("prompt")
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and not all(type(item) is int for item in prompts):
        raise wrong(
            f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )


def _bad_json(raw: bytes) -> ApiError:
    """The decoder's text as vLLM gives it, which uses Python's own decoder."""
    position, reason = 0, "Invalid JSON"
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        position, reason = error.pos, error.msg
    except (ValueError, RecursionError) as error:
        reason = str(error)
    location = f"body.{position}"
    return malformed([entry("json_invalid", location, "JSON decode error", {}, {"error": reason})], location)


def _invalid(error: ValidationError) -> ApiError:
    entries, first = [], None
    for item in error.errors(include_url=False):
        # Names of union branches are pydantic's own words; what is left is the path in the caller's body.
        location = ".".join(["body", *(str(part) for i, part in enumerate(item["loc"]) if _in_location(i, part))])
        first = first or location
        context = {key: value for key, value in item.get("ctx", {}).items() if key != "error"}
        entries.append(entry(item["type"], location, item["msg"], item["input"], context))
    return malformed(entries, first)


def _in_location(depth: int, part: int | str) -> bool:
    return depth == 0 or isinstance(part, int) or part in {"role", "content", "text", "include_usage"}
