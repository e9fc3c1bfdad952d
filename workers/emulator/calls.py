"""Requests of an emulated server: a body is read for what changes its answer, and the rest is ignored.

What vLLM refuses is refused with its status and the shape of its errors, not in its words.
"""

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from workers.emulator import text
from workers.emulator.kv_events import PromptBlock
from workers.emulator.spec import InstanceSpec

Surface = Literal["completion", "chat", "response", "message", "speech", "pooling"]
MAX_TOKEN_ID: Final = 2**31 - 1  # an emulated vocabulary has every id that fits
MAX_STOP_STRINGS: Final = 4
DEFAULT_TOKENS: Final = {"completion": 16, "speech": 224}
"""Tokens of an answer whose request sets no limit; elsewhere as many as the context holds."""
LIMITS: Final = {"response": ("max_output_tokens",), "chat": ("max_completion_tokens", "max_tokens")}
"""Fields that limit an answer, the first one that is given; `max_tokens` where a surface is not named."""
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, math.inf),
    "top_k": (-1, math.inf),
    "n": (1, math.inf),
    "min_tokens": (0, math.inf),
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "max_output_tokens": (1, math.inf),
    "priority": (-(2**63), 2**63 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
INTEGERS: Final = frozenset(BOUNDS) - {
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
}  # fmt: skip
BOOLEANS: Final = dict.fromkeys(("true", "1", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("false", "0", "f", "no", "n", "off"), False
)
"""Words that pydantic reads as a boolean."""
UNSUPPORTED: Final = ("logprobs", "prompt_logprobs", "use_beam_search", "structured_outputs", "suffix", "prompt_embeds")
"""Fields that need a model."""


class ApiError(Exception):
    """An answer with an OpenAI-shaped error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def bad(message: str, param: str | None = None) -> ApiError:
    """Return vLLM's 400 for a value that it refuses."""
    return ApiError(400, "BadRequestError", message, param)


def malformed(message: str, param: str | None = None) -> ApiError:
    """Return vLLM's 400 for a body that it cannot read."""
    return ApiError(400, "Bad Request", f"1 validation error: {message}", param)


def decoded(raw: bytes) -> dict[str, Any]:
    """Return the JSON object *raw*. Raises ApiError."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise malformed(f"JSON decode error: {error}", "body") from None
    if not isinstance(data, dict):
        raise malformed("the body is not a JSON object", "body")
    return data


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, or token ids."""

    text: str
    ids: tuple[int, ...] | None = None

    @property
    def echo(self) -> str:
        return self.text if self.ids is None else text.detokenize(self.ids)

    @property
    def tokens(self) -> int:
        return text.count_tokens(self.text) if self.ids is None else len(self.ids)

    @property
    def token_ids(self) -> list[int]:
        return text.prompt_ids(self._encoded()) if self.ids is None else list(self.ids)

    @property
    def digest(self) -> int:
        """A number for its content, equal in every process (Python's own hash is salted)."""
        return zlib.crc32(self._encoded())

    def blocks(self, block_tokens: int, adapter: str = "", salt: str = "") -> tuple[PromptBlock, ...]:
        """Return the full blocks of tokens; those of another *adapter* or *salt* are others."""
        data, ids = self._encoded(), self.token_ids
        size = block_tokens * (text.CHARACTERS_PER_TOKEN if self.ids is None else 8)
        blocks: list[PromptBlock] = []
        value = zlib.crc32(f"{adapter}\0{salt}".encode(errors="surrogatepass")) if adapter or salt else 0
        for number in range(len(data) // size):
            value = zlib.crc32(data[number * size : (number + 1) * size], value)
            parent = blocks[-1].digest if blocks else None
            tokens = tuple(ids[number * block_tokens : (number + 1) * block_tokens])
            blocks.append(PromptBlock(value, parent, tokens, adapter, salt))
        return tuple(blocks)

    def _encoded(self) -> bytes:
        # One byte a character, so that blocks of bytes are blocks of tokens; what is lost only merges rare characters.
        return self.text.encode("latin-1", "replace") if self.ids is None else array("q", self.ids).tobytes()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; *parameters* is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A checked request: *n* sequences for each prompt. Lengths are in tokens."""

    surface: Surface
    body: dict[str, Any]
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]  # for each prompt, cut to the context
    n: int = 1
    tools: tuple[Tool, ...] = ()  # those that may be called
    must_call: bool = False
    named: bool = False  # the caller named the tool
    schema: dict[str, Any] | None = None  # of an answer that must be JSON

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field *name* of the body, *default* if it is missing or null."""
        value = self.body.get(name)
        return default if value is None else value

    @property
    def stop(self) -> list[str]:
        given = self.get("stop", self.get("stop_sequences", []))
        return [given] if isinstance(given, str) else given

    @property
    def include_usage(self) -> bool:
        return bool(self.get("stream_options", {}).get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.get("stream_options", {}).get("continuous_usage_stats"))

    @property
    def echo(self) -> bool:
        return self.surface == "completion" and bool(self.get("echo"))

    @property
    def token_ids(self) -> bool:
        """Whether the ids of prompt and answer were requested."""
        return bool(self.get("return_token_ids"))


def read(surface: Surface, body: dict[str, Any], spec: InstanceSpec) -> CheckedCall:
    """Check *body* and return what it asks of the engine. Raises ApiError."""
    check_fields(surface, body)
    prompts = prompts_of(surface, body)
    names = LIMITS.get(surface, ("max_tokens",))
    name, limit = next(((name, body[name]) for name in names if body.get(name) is not None), (names[0], None))
    if surface == "message" and limit is None:
        raise malformed("Field required", "body.max_tokens")
    if limit is not None and limit > spec.max_model_len:
        raise bad(f"{name}={limit} cannot be greater than max_model_len={spec.max_model_len}.", name)
    for prompt in prompts:
        check_length(prompt, spec.max_model_len)
    wanted = spec.max_model_len if limit is None else limit
    wanted = DEFAULT_TOKENS.get(surface, wanted) if limit is None else wanted
    max_tokens = tuple(min(wanted, spec.max_model_len - prompt.tokens) for prompt in prompts)
    if min(max_tokens) < 1:
        raise bad(f"max_tokens must be at least 1, got {min(max_tokens)}.", "max_tokens")
    if (body.get("min_tokens") or 0) > min(max_tokens):
        raise bad(f"min_tokens must be less than or equal to max_tokens={min(max_tokens)}, got {body['min_tokens']}.")
    tools, must_call, named = _tools(surface, body, spec)
    return CheckedCall(surface, body, prompts, max_tokens, body.get("n") or 1, tools, must_call, named, _schema(body))


def check_fields(surface: Surface, body: dict[str, Any]) -> None:
    """Refuse fields of a wrong type, out of bounds, or that need a model. Raises ApiError."""
    for name in BOUNDS.keys() & body.keys():
        value, (low, high) = body[name], BOUNDS[name]
        if value is None:
            continue
        if not isinstance(value, int if name in INTEGERS else int | float) or isinstance(value, bool):
            raise malformed(f"{name} should be a valid {'integer' if name in INTEGERS else 'number'}", f"body.{name}")
        if not low <= value <= high:
            limit = f"be at least {low}" if high == math.inf else f"be in [{low}, {high}]"
            raise bad(f"{name} must {limit}, got {value}.", name)
    if (stream := body.get("stream")) is not None:
        if str(stream).lower() not in BOOLEANS:
            raise malformed("stream should be a valid boolean", "body.stream")
        body["stream"] = BOOLEANS[str(stream).lower()]
    for name in UNSUPPORTED:
        if body.get(name) not in (None, False, "", []):
            raise ApiError(501, "NotImplementedError", f"`{name}` is not supported by the emulated server.", name)
    stop = body.get("stop", body.get("stop_sequences"))
    if stop is not None and not isinstance(stop, str) and (not _texts(stop) or len(stop) > MAX_STOP_STRINGS):
        raise malformed(f"stop should be a string or up to {MAX_STOP_STRINGS} strings", "body.stop")
    if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
        raise bad("stop cannot contain an empty string.")
    if surface in ("chat", "completion") and body.get("stream_options") and not body.get("stream"):
        raise bad("Stream options can only be defined when `stream=True`.", "stream_options")


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# Prompts


def prompts_of(surface: Surface, body: dict[str, Any]) -> tuple[Prompt, ...]:
    """Return the prompts of *body*, a single one but for completions. Raises ApiError."""
    if surface == "completion":
        return _completion_prompts(body.get("prompt"))
    if surface == "response":
        given = body.get("input")
        if not isinstance(given, str | list):
            raise malformed("Field required", "body.input")
        system = [("system", body["instructions"])] if body.get("instructions") else []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return (conversation([*system, *map(_message, items)], body.get("tools")),)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) and each.get("role") for each in messages):
        raise malformed("Input should be a valid list of messages", "body.messages")
    if not messages:
        raise bad("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if any(not isinstance(each.get("content"), str | list | None) for each in messages):
        raise malformed("Input should be a valid string or list", "body.messages")
    system = [("system", words_of(body["system"]))] if body.get("system") else []
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    return (conversation([*system, *map(_message, messages)], tools),)


def _completion_prompts(given: Any) -> tuple[Prompt, ...]:
    if given is None or given == "":
        raise bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if given == []:
        raise bad("You must pass at least one prompt")
    prompts = [given] if isinstance(given, str) or _ids(given) else given
    if not isinstance(prompts, list) or not all(isinstance(each, str | list) for each in prompts):
        raise malformed("Input should be a string, token ids, or a list of either", "body.prompt")
    return tuple(_given_prompt(each) for each in prompts)


def _given_prompt(given: str | list[Any]) -> Prompt:
    if not given:
        raise bad("The decoder prompt cannot be empty")
    if isinstance(given, str):
        return Prompt(given)
    if not _ids(given):
        raise malformed("Token ids should be integers of 0 and more", "body.prompt")
    if max(given) > MAX_TOKEN_ID:
        raise bad(f"Token id {max(given)} is out of vocabulary")
    return Prompt("", tuple(given))


def _ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int and each >= 0 for each in given)


def words_of(content: Any) -> str:
    """Return the text of a message's content, of whatever surface: texts, and the texts of its parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, map(words_of, content)))
    if not isinstance(content, dict):
        return ""
    return words_of(
        next((content[name] for name in ("text", "content", "output", "arguments") if content.get(name)), "")
    )


def _message(item: Any) -> tuple[str, str]:
    """Return the role and the text of a message or item."""
    if not isinstance(item, dict):
        return "user", words_of(item)
    # As templates do, without the ids of calls, which are random: what is said next depends on the prompt.
    called = [call.get("function") for call in item.get("tool_calls") or ()]
    said = words_of(item) + (orjson.dumps(called).decode() if called else "")
    return ("tool" if item.get("type") == "function_call_output" else str(item.get("role") or "assistant")), said


def conversation(messages: Sequence[tuple[str, str]], tools: Any = None) -> Prompt:
    """Return a conversation, given as role and text, as a chat template would write it."""
    head = f"<|tools|>\n{orjson.dumps(tools).decode()}<|end|>\n" if tools else ""
    return Prompt(head + "".join(f"<|{role}|>\n{words}<|end|>\n" for role, words in messages) + "<|assistant|>\n")


def check_length(prompt: Prompt, limit: int) -> None:
    """Refuse a prompt of more tokens than *limit*."""
    if prompt.tokens > limit:
        what = "text" if prompt.ids is None else "tokens"
        raise bad(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {prompt.tokens} input "
            "tokens. Please reduce the length of the input prompt.",
            f"input_{what}",
        )


# Tools, and answers that must be JSON


def _tools(surface: Surface, body: dict[str, Any], spec: InstanceSpec) -> tuple[tuple[Tool, ...], bool, bool]:
    """Return (tools that may be called, whether one has to be, whether it was named). Raises ApiError."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "none"):  # Anthropic's
        choice = choice["type"]
    if surface == "chat" and choice not in (None, "none") and given is None:
        raise bad("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if surface == "chat" and given == []:
        raise bad("`tools` must not be an empty array.", "tools")
    if not given or choice == "none":
        return (), False, False
    functions = [tool.get("function") or tool for tool in given if isinstance(tool, dict)]
    tools = [
        Tool(each["name"], each.get("parameters") or each.get("input_schema") or {"type": "object"})
        for each in functions
        if each.get("name")
    ]
    name = ""
    if isinstance(choice, dict):
        name = str((choice.get("function") or choice).get("name", ""))
        if name not in {tool.name for tool in tools}:
            raise bad("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    elif choice not in (None, "auto", "required", "any"):
        raise bad(f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
    must_call = choice not in (None, "auto")
    if not spec.enable_auto_tool_choice and surface == "chat":
        raise bad("tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set")
    if not must_call and (not spec.enable_auto_tool_choice or _after_a_tool(body)):
        return (), False, False
    return tuple(tool for tool in tools if name in ("", tool.name)), must_call, bool(name)


def _after_a_tool(body: dict[str, Any]) -> bool:
    """Whether the last message is a tool's result, which is answered in words."""
    given = body.get("messages") or body.get("input")
    last = given[-1] if isinstance(given, list) and given and isinstance(given[-1], dict) else {}
    parts = last.get("content")
    kinds = {part.get("type") for part in (parts if isinstance(parts, list) else [last]) if isinstance(part, dict)}
    return last.get("role") == "tool" or bool(kinds & {"function_call_output", "tool_result"})


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of an answer that has to be JSON; an object with one text where any object will do."""
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if not isinstance(form, dict) or form.get("type") not in ("json_object", "json_schema"):
        return None
    schema = form.get("schema") or (form.get("json_schema") or {}).get("schema")
    return schema if isinstance(schema, dict) else {"properties": {"answer": {"type": "string"}}}
