"""What a request body must look like before anything is queued for it.

Only what we act on, and what would otherwise fail late or cost much, is checked; every other field passes through to
vLLM untouched. Each error names the field, as `param` in the OpenAI error body.
"""

from enum import StrEnum
from typing import Any

import orjson
from msgspec import Struct, field

from controlplane.gateway.admission.turns import Turn, characters, chat_turns, response_turns
from controlplane.gateway.errors import ApiError, invalid
from forecasting.lengths.query import Conversation
from forecasting.lengths.text.conversation import MOST_TURNS_READ, joined, read_turns

MAX_CHOICES = 128
MAX_PRIORITY = 2**31


class Kind(StrEnum):
    """A call that instances answer; its value is the path below `/v1/`."""

    CHAT = "chat/completions"
    COMPLETION = "completions"
    RESPONSE = "responses"


class Call(Struct):
    """A checked request body and what the dispatcher needs to know of it."""

    body: dict[str, Any]
    model: str
    stream: bool
    include_usage: bool  # the tenant gets usage at the end of a stream
    sequences: int  # prompts x choices: what vLLM runs at once for this request
    prompt_tokens: int | None  # exact when the prompt came as token ids
    prompt_characters: int  # of text and of tools, when it did not
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    kind: Kind = Kind.COMPLETION
    turns: list[Turn] = field(default_factory=list)  # of a conversation


def parse(raw: bytes, kind: Kind, *, max_depth: int) -> Call:
    """Check the body *raw* of a call. Raises ApiError with status 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > max_depth:  # no body is deeper than it has brackets
        _check_depth(body, max_depth)

    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("`model` must be the name of a model.", "model", "missing_required_parameter")
    stream = _boolean(body, "stream")
    choices, min_tokens, turns = 1, 0, []
    if kind is Kind.RESPONSE:  # usage is in its last event, asked for or not
        include_usage, prompts, prompt_tokens, turns = True, 1, None, response_turns(body)
        max_tokens = _integer(body, "max_output_tokens", least=1)
    else:
        include_usage = _stream_options(body, stream)
        choices = _integer(body, "n", least=1, most=MAX_CHOICES) or 1
        min_tokens = _integer(body, "min_tokens", least=0) or 0
        max_tokens = _integer(body, "max_tokens", least=1)
    if kind is Kind.CHAT:
        max_tokens = _integer(body, "max_completion_tokens", least=1) or max_tokens
        prompts, prompt_tokens, turns = 1, None, chat_turns(body)
    elif kind is Kind.COMPLETION:
        prompts, prompt_tokens, prompt_characters = _prompt(body)
    if turns:
        tools = _typed(body, "tools", (list,), "a list") if "tools" in body else None
        prompt_characters = characters(turns) + (len(orjson.dumps(tools)) if tools else 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"`min_tokens` ({min_tokens}) is larger than `max_tokens` ({max_tokens}).", "min_tokens")
    _number(body, "temperature", least=0.0, most=2.0)
    _number(body, "top_p", least=0.0, most=1.0)
    _integer(body, "priority", least=-MAX_PRIORITY, most=MAX_PRIORITY)
    _stop(body)
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
        turns=turns,
    )


def _check_depth(body: dict[str, Any], max_depth: int) -> None:
    """Walk level by level, so that a deep body costs no recursion."""
    level: list[Any] = [body]
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or (type(child) is list and child and type(child[0]) is not int)
        ]
        if not level:
            return
    raise invalid(f"The request body is nested deeper than {max_depth} levels.", code="json_too_deep")


def _typed(body: dict[str, Any], name: str, kinds: tuple[type, ...], words: str) -> Any:
    value = body[name]
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise invalid(f"`{name}` must be {words}, not {type(value).__name__}.", name, "invalid_type")
    return value


def _boolean(body: dict[str, Any], name: str) -> bool:
    return name in body and bool(_typed(body, name, (bool,), "true or false"))


def _integer(body: dict[str, Any], name: str, *, least: int, most: int | None = None) -> int | None:
    if name not in body:
        return None
    value: int | None = _typed(body, name, (int,), "an integer")
    if value is not None and (value < least or (most is not None and value > most)):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise invalid(f"`{name}` must be {bounds}, not {value}.", name, "integer_out_of_range")
    return value


def _number(body: dict[str, Any], name: str, *, least: float, most: float) -> None:
    if name not in body:
        return
    value = _typed(body, name, (int, float), "a number")
    if value is not None and not least <= value <= most:
        raise invalid(f"`{name}` must be between {least:g} and {most:g}, not {value}.", name, "decimal_out_of_range")


def _stream_options(body: dict[str, Any], stream: bool) -> bool:
    if "stream_options" not in body:
        return False
    options = _typed(body, "stream_options", (dict,), "an object")
    if options is None:
        return False
    if not stream:
        raise invalid("`stream_options` is only allowed when `stream` is true.", "stream_options")
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise invalid(
            "`stream_options.include_usage` must be true or false.", "stream_options.include_usage", "invalid_type"
        )
    return bool(include_usage)


def _stop(body: dict[str, Any]) -> None:
    if "stop" not in body:
        return
    stop = _typed(body, "stop", (str, list), "a string or a list of strings")
    if isinstance(stop, list) and not all(isinstance(word, str) for word in stop):
        raise invalid("`stop` must be a string or a list of strings.", "stop", "invalid_type")


def _prompt(body: dict[str, Any]) -> tuple[int, int | None, int]:
    """(prompts, exact tokens or None, bytes of text) of a string, token ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return 1, None, len(prompt)
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        if isinstance(first, int):
            _token_ids(prompt, "prompt")
            return 1, len(prompt), 0
        if isinstance(first, str) and all(isinstance(text, str) for text in prompt):
            return len(prompt), None, sum(map(len, prompt))
        if isinstance(first, list):
            for index, ids in enumerate(prompt):
                _token_ids(ids, f"prompt[{index}]")
            return len(prompt), sum(map(len, prompt)), 0
    if prompt is None or prompt in ("", []):
        raise _missing_prompt()
    raise invalid("`prompt` must be text, token ids, or a list of either.", "prompt", "invalid_type")


def _missing_prompt() -> ApiError:
    return invalid("`prompt` must hold text or token ids.", "prompt", "missing_required_parameter")


def _token_ids(ids: Any, param: str) -> None:
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
        raise invalid(f"`{param}` must be a list of token ids (integers from 0).", param, "invalid_type")


def prompt_text(call: Call) -> tuple[str, int, Conversation | None]:
    """(text, turns, conversation) of *call*: what its length is predicted from, as `read_turns` bounds it.

    Prompts of a batch come one after the other, and are no conversation. Token ids have no text.
    """
    if call.turns:
        read = [(role, _content(content)) for role, content in call.turns[-MOST_TURNS_READ:]]
        text, conversation = read_turns(read, _content(call.turns[0][1]))
        return text, len(call.turns), conversation
    prompt = call.body.get("prompt")
    turns = [_content(each) for each in (prompt[-MOST_TURNS_READ:] if isinstance(prompt, list) else [prompt])]
    return joined(turns, turns[0] if turns else ""), 1, None


def _content(turn: Any) -> str:
    """The text of one message or prompt."""
    if isinstance(turn, str):
        return turn
    if not isinstance(turn, list):
        return ""
    parts = (part.get("text") for part in turn[-MOST_TURNS_READ:] if isinstance(part, dict))
    return "\n".join(text for text in parts if isinstance(text, str))
