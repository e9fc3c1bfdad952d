"""Requests as the engine gets them, checked against the server's limits as vLLM 0.32 does.

Fields whose effect cannot be emulated without a model (log probabilities, beam search, grammars, token ids in
the answer, prompt embeddings) are answered with 501 instead of an answer that lacks what was asked for.
"""

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from workers.emulator import text
from workers.emulator.bodies import (
    ApiError,
    Body,
    BodyKind,
    ChatBody,
    CompletionBody,
    Message,
    ResponseBody,
    as_items,
    wrong,
)
from workers.emulator.kv_events import PromptBlock
from workers.emulator.spec import InstanceSpec

MAX_TOKEN_ID = 2**31 - 1  # an emulated vocabulary has every id that fits


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
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: `n` sequences for each prompt. Lengths are in tokens."""

    body: Body
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]  # for each prompt, cut to the context
    tools: tuple[Tool, ...] = ()  # those that may be called
    must_call: bool = False
    named: bool = False  # the caller named the tool
    schema: dict[str, Any] | None = None  # of an answer that must be JSON

    @property
    def kind(self) -> BodyKind:
        return self.body.kind

    @property
    def n(self) -> int:
        return 1 if self.body.n is None else self.body.n

    @property
    def min_tokens(self) -> int:
        return 0 if isinstance(self.body, ResponseBody) else self.body.min_tokens

    @property
    def stop(self) -> list[str]:
        return [self.body.stop] if isinstance(self.body.stop, str) else self.body.stop or []

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def echo(self) -> bool:
        return isinstance(self.body, CompletionBody) and bool(self.body.echo)

    @property
    def token_ids(self) -> bool:
        """Whether the ids of prompt and answer were requested."""
        return bool(self.body.return_token_ids)


def resolve(body: Body, spec: InstanceSpec) -> Generation:
    """Check values against the server's limits. Raises ApiError as vLLM answers."""
    _check_emulated(body)
    tools, must_call, named = _tools(body, spec)
    prompts: tuple[Prompt, ...]
    if isinstance(body, ChatBody):
        prompts = (_chat_prompt(body),)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        asked_name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    elif isinstance(body, ResponseBody):
        prompts, asked, asked_name = (_response_prompt(body),), body.max_output_tokens, "max_output_tokens"
    else:
        prompts = _completion_prompts(body)
        asked, asked_name = (16 if body.max_tokens is None else body.max_tokens), "max_tokens"
    if asked is not None and asked > spec.max_model_len:
        raise wrong(
            f"{asked_name}={asked} cannot be greater than max_model_len={spec.max_model_len}. "
            "Please request fewer output tokens.",
            asked_name,
            asked,
        )
    for prompt in prompts:
        check_length(prompt, spec.max_model_len)
    max_tokens = tuple(
        spec.max_model_len - prompt.tokens if asked is None else min(asked, spec.max_model_len - prompt.tokens)
        for prompt in prompts
    )
    _check_sampling(body, min(max_tokens))
    return Generation(body, prompts, max_tokens, tools, must_call, named, _schema(body))


def _check_emulated(body: Body) -> None:
    """Refuse fields that need a model."""
    unsupported = {
        "logprobs": body.logprobs not in (None, False),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "use_beam_search": body.use_beam_search,
        "return_token_ids": bool(body.return_token_ids) and isinstance(body, ResponseBody),
        "structured_outputs": body.structured_outputs is not None,
        "response_format": body.response_format is not None and body.response_format.type not in _FORMATS,
        "suffix": isinstance(body, CompletionBody) and bool(body.suffix),
        "prompt_embeds": isinstance(body, CompletionBody) and bool(body.prompt_embeds),
        "echo": isinstance(body, ChatBody) and body.echo,
    }
    for name, asked in unsupported.items():
        if asked:
            raise ApiError(501, "NotImplementedError", f"`{name}` is not supported by the emulated server.", name)


_FORMATS = ("text", "json_object", "json_schema")


def _schema(body: Body) -> dict[str, Any] | None:
    """Return the schema of an answer that has to be JSON; an object with one text where any object will do."""
    if isinstance(body, ResponseBody):
        form: dict[str, Any] = (body.text or {}).get("format") or {}
        kind, schema = form.get("type"), form.get("schema")
    else:
        kind = body.response_format.type if body.response_format else None
        schema = ((body.response_format and body.response_format.json_schema) or {}).get("schema")
    if kind == "json_schema" and isinstance(schema, dict):
        return schema
    return {"properties": {"answer": {"type": "string"}}} if kind in ("json_object", "json_schema") else None


def _tools(body: Body, spec: InstanceSpec) -> tuple[tuple[Tool, ...], bool, bool]:
    """Return (tools that may be called, whether one has to be, whether it was named). Raises ApiError as vLLM answers."""
    if isinstance(body, CompletionBody) or not body.tools or body.tool_choice == "none":
        return (), False, False
    choice = body.tool_choice or "auto"
    if isinstance(body, ChatBody):
        tools = [Tool(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in body.tools]
        last = body.messages[-1].role if body.messages else ""
        name = choice["function"]["name"] if isinstance(choice, dict) else ""
    else:
        functions = [tool for tool in body.tools if tool.get("type") == "function" and tool.get("name")]
        tools = [Tool(tool["name"], tool.get("parameters") or {"type": "object"}) for tool in functions]
        last = str(body.input[-1].get("type", "")) if isinstance(body.input, list) and body.input else ""
        name = str(choice.get("name", "")) if isinstance(choice, dict) else ""
        if name and name not in {tool.name for tool in tools}:
            raise wrong("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")
    if choice == "auto":
        if not spec.enable_auto_tool_choice:
            if isinstance(body, ResponseBody):  # vLLM answers with text
                return (), False, False
            raise wrong('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if last in ("tool", "function_call_output"):  # what a tool said is answered in words
            return (), False, False
    elif isinstance(body, ChatBody) and not spec.enable_auto_tool_choice:
        wanted = f'function "{name}"' if name else f'"{choice}"'
        raise wrong(f"tool_choice={wanted} requires --tool-call-parser to be set")
    return tuple(tool for tool in tools if name in ("", tool.name)), choice != "auto", bool(name)


def _templated(messages: list[tuple[str, str]], tools: list[dict[str, Any]]) -> Prompt:
    """Return a conversation as a chat template would write it."""
    head = f"<|tools|>\n{orjson.dumps(tools).decode()}<|end|>\n" if tools else ""
    return Prompt(head + "".join(f"<|{role}|>\n{said}<|end|>\n" for role, said in messages) + "<|assistant|>\n")


def _chat_prompt(body: ChatBody) -> Prompt:
    if not body.messages:
        raise wrong("Cannot apply chat template to an empty conversation. Provide at least one message.")
    tools = body.tools if body.tool_choice != "none" else None
    return conversation(body.messages, [tool.model_dump() for tool in tools or ()])


def conversation(given: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Prompt:
    """Return the prompt that a chat template makes of the messages *given* and of *tools*."""
    messages = []
    for message in given:
        content = message.content or ""
        if isinstance(content, list):
            content = "\n".join(item if isinstance(item, str) else item.text or "" for item in content)
        # As templates do, without the ids of calls, which are random: what is said next goes by the prompt.
        called = [call.get("function") for call in message.tool_calls or ()]
        messages.append((message.role, content + (orjson.dumps(called).decode() if called else "")))
    return _templated(messages, list(tools))


def _response_prompt(body: ResponseBody) -> Prompt:
    messages = [("system", body.instructions)] if body.instructions else []
    for item in as_items(body.input):
        said = item.get("content") or item.get("output") or item.get("arguments") or ""
        if isinstance(said, list):
            said = "\n".join(str(part.get("text") or "") for part in said if isinstance(part, dict))
        role = "tool" if item.get("type") == "function_call_output" else str(item.get("role") or "assistant")
        messages.append((role, str(said)))
    return _templated(messages, body.tools)


def _completion_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return (_text_prompt(prompt),)
    if not prompt:
        raise wrong("You must pass at least one prompt")
    if isinstance(prompt[0], int):
        return (_token_prompt(prompt),)
    return tuple(_text_prompt(item) if isinstance(item, str) else _token_prompt(item) for item in prompt)


def _text_prompt(prompt: str) -> Prompt:
    if not prompt:
        raise wrong("The decoder prompt cannot be empty")
    return Prompt(prompt)


def _token_prompt(ids: list[int]) -> Prompt:
    if not ids:
        raise wrong("The decoder prompt cannot be empty")
    if max(ids) > MAX_TOKEN_ID:
        raise wrong(f"Token id {max(ids)} is out of vocabulary")
    return Prompt("", tuple(ids))


def check_length(prompt: Prompt, limit: int) -> None:
    """Refuse a prompt of more tokens than *limit*, in the words of vLLM."""
    if prompt.tokens <= limit:
        return
    start = f"This model's maximum context length is {limit} tokens. However, your prompt contains"
    end = "Please reduce the length of the input prompt."
    if prompt.ids is None:
        characters, bound = len(prompt.text), limit * text.CHARACTERS_PER_TOKEN
        raise wrong(
            f"{start} {characters} characters (more than {bound} characters, which is the upper bound "
            f"for {limit} input tokens). {end}",
            "input_text",
            characters,
        )
    raise wrong(
        f"{start} {prompt.tokens} input tokens, which exceeds this limit even without any output tokens. {end}",
        "input_tokens",
        prompt.tokens,
    )


def _check_sampling(body: Body, max_tokens: int) -> None:
    """Check sampling parameters in the order and words of vLLM's SamplingParams."""
    if body.n is not None and body.n < 1:
        raise wrong(f"n must be at least 1, got {body.n}.")
    for name, value in (("presence_penalty", body.presence_penalty), ("frequency_penalty", body.frequency_penalty)):
        if value is not None and not -2.0 <= value <= 2.0:
            raise wrong(f"{name} must be in [-2, 2], got {value}.")
    if (penalty := body.repetition_penalty) is not None and (not math.isfinite(penalty) or penalty <= 0.0):
        raise wrong(f"repetition_penalty must be greater than zero, got {penalty}.")
    if (temperature := body.temperature) is not None:
        if not math.isfinite(temperature):
            raise wrong(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
        if temperature < 0.0:
            raise wrong(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if temperature > 2.0:
            raise wrong(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise wrong(f"top_p must be in (0, 1], got {body.top_p}.", "top_p", body.top_p)
    if body.top_k is not None and body.top_k < -1:
        raise wrong(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.min_p is not None and not 0.0 <= body.min_p <= 1.0:
        raise wrong(f"min_p must be in [0, 1], got {body.min_p}.")
    if max_tokens < 1:
        raise wrong(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if body.min_tokens < 0:
        raise wrong(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > max_tokens:
        raise wrong(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.")
    if body.stop == "" or "" in (body.stop or ()):
        raise wrong("stop cannot contain an empty string.")
