"""Bodies of generation requests, read as vLLM 0.32 reads them, and its error bodies, in its words.

Fields that change what an emulated server does are read; unknown ones are ignored, as vLLM ignores them. vLLM validates
with pydantic and prints its error entries, and so does the emulator: kinds and texts of most errors are equal to the
letter, but for messages of a wrong form vLLM lists each message type that it tried.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_REPORTED_ERRORS = 10
MAX_INPUT_CHARACTERS = 200


class ApiError(Exception):
    """An answer with an OpenAI-shaped error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}
        )


def wrong(message: str, param: str | None = None, value: object = None, *, repeat: bool = True) -> ApiError:
    """Return vLLM's 400 for a value that it understands and refuses; the text repeats parameter and value."""
    if param is not None and repeat:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return ApiError(400, "BadRequestError", message, param)


def entry(kind: str, location: str, message: str, value: object, context: dict[str, Any] | None = None) -> str:
    """Return one validation error as vLLM prints it: a Python dictionary."""
    fields = {"type": kind, "loc": location, "msg": message, "input": _summary(value)}
    return str({**fields, "ctx": context} if context else fields)


def _summary(value: object) -> object:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    shown = str(value)
    return shown if len(shown) <= MAX_INPUT_CHARACTERS else shown[:MAX_INPUT_CHARACTERS] + "...[truncated]"


def malformed(entries: list[str], param: str | None) -> ApiError:
    """Return vLLM's 400 for a body that it cannot read."""
    count = len(entries)
    label = "error" if count == 1 else "errors"
    lines = [f"{count} validation {label}:", *(f"  {entry}" for entry in entries[:MAX_REPORTED_ERRORS])]
    if count > MAX_REPORTED_ERRORS:
        lines.append(f"  ...and {count - MAX_REPORTED_ERRORS} more {label}")
    return ApiError(400, "Bad Request", "\n".join(lines), param)


INT64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
NATURAL = Annotated[int, Field(ge=0)]
MAX_STOP_STRINGS = 4
MAX_PROMPTS = 1024

BodyKind = Literal["completion", "chat", "response"]


class PlainBody(BaseModel):
    """A body whose unknown fields are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(PlainBody):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ContentPart(PlainBody):
    type: str = "text"
    text: str | None = None


class Message(PlainBody):
    role: str
    content: str | list[ContentPart | str] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ResponseFormat(PlainBody):
    type: str
    json_schema: dict[str, Any] | None = None


class Function(PlainBody):
    name: str
    parameters: dict[str, Any] | None = None


class ChatTool(PlainBody):
    type: Literal["function"] = "function"
    function: Function


class GenerationBody(PlainBody):
    """Fields shared by the three generation calls."""

    kind: ClassVar[BodyKind]
    model: str | None = None
    cache_salt: str | None = None
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
    kind = "completion"
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    prompt: list[NATURAL] | list[list[NATURAL]] | str | list[str] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None


class ChatBody(GenerationBody):
    kind = "chat"
    messages: list[Message]
    echo: bool = False
    logprobs: bool | None = False
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = 1
    tool_choice: Any = None
    tools: list[ChatTool] | None = None


class ResponseBody(GenerationBody):
    kind = "response"
    background: bool | None = False
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    logprobs: None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    n: Literal[1] = 1
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None


Body = CompletionBody | ChatBody | ResponseBody
BODIES: dict[BodyKind, type[Body]] = {body.kind: body for body in (CompletionBody, ChatBody, ResponseBody)}


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `input` of a Responses call as items."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class RpcBody(PlainBody):
    method: str


class AdapterName(PlainBody):
    lora_name: str


class AdapterBody(AdapterName):
    lora_path: str
    load_inplace: bool = False


Model = TypeVar("Model", bound=BaseModel)


def read_body(kind: BodyKind, content_type: str, raw: bytes) -> Body:
    """Decode and check types. Raises ApiError as vLLM answers."""
    if content_type != "application/json":
        raise malformed(["Unsupported Media Type: Only 'application/json' is allowed"], None)
    if not raw:
        raise malformed([entry("missing", "body", "Field required", None)], "body")
    data = decoded(raw)
    _check_raw(kind, data)
    return validated(BODIES[kind], data)


def decoded(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise _bad_json(raw) from None
    if not isinstance(data, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise malformed([entry("model_attributes_type", "body", message, data)], "body")
    return data


def validated(model: type[Model], data: dict[str, Any]) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(error) from None


def _check_raw(kind: BodyKind, data: dict[str, Any]) -> None:
    """Make the checks that vLLM makes before it validates types."""
    if kind == "completion" and data.get("prompt") in (None, "") and not data.get("prompt_embeds"):
        raise wrong("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if kind != "response" and data.get("stream_options") and not data.get("stream"):
        raise wrong("Stream options can only be defined when `stream=True`.", "stream_options")
    if kind == "chat" and data.get("tools") == []:
        raise wrong(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if kind == "chat":
        _check_tool_choice(data)
    prompts = data.get("prompt")
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and not all(type(item) is int for item in prompts):
        raise wrong(
            f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )


def _check_tool_choice(data: dict[str, Any]) -> None:
    choice, tools = data.get("tool_choice"), data.get("tools")
    if choice in (None, "none"):
        return
    if tools is None:
        raise wrong("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if not isinstance(choice, dict):
        if choice not in ("auto", "required"):
            raise wrong(
                f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are '
                "supported.",
                "tool_choice",
            )
        return
    function = choice.get("function")
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    if not isinstance(function, dict):
        raise wrong(f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function")
    if "name" not in function:
        message = f"Expected field `name` in `function` in `tool_choice`! {usage}"
        raise wrong(message, "tool_choice.function.name")
    if not any(tool.get("function", {}).get("name") == function["name"] for tool in tools if isinstance(tool, dict)):
        raise wrong("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")


def _bad_json(raw: bytes) -> ApiError:
    """Return the error for a body that is no JSON, in the words of Python's own decoder, which vLLM uses."""
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
