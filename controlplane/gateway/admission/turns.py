"""Turns of conversations: roles and contents, as messages of a chat, items of a Responses call or Anthropic's messages.

What has another form is left out: vLLM says what is wrong with it.
"""

from typing import Any

import msgspec

from controlplane.gateway.errors import invalid

Turn = tuple[str, Any]
"""Role and content: text, a list of parts, which are objects, or None."""
STORED = {
    "previous_response_id": "responses are not stored here: send the whole conversation as `input`.",
    "conversation": "conversations are not stored here: send the whole conversation as `input`.",
    "background": "responses are not stored here: send the request without it, and stream.",
}
"""Fields of a Responses call that refer to what is stored, and what to do without them."""


def chat_turns(body: dict[str, Any]) -> list[Turn]:
    """Return the messages of a chat *body*, their tool calls as separate turns."""
    turns: list[Turn] = []
    for message in _objects(body.get("messages")):
        turns.append((_text(message.get("role")), _content(message.get("content"))))
        if message.get("tool_calls"):
            turns.append((turns[-1][0], msgspec.json.encode(message["tool_calls"]).decode()))
    return turns


def response_turns(body: dict[str, Any]) -> list[Turn]:
    """Return `instructions` and the items of `input` of a Responses *body*. Raises ApiError 400 for a field of `STORED`."""
    for name, why in STORED.items():
        if body.get(name):
            raise invalid(f"`{name}` is not supported, as {why}", name, "unsupported_parameter")
    instructions, items = body.get("instructions"), body.get("input")
    turns: list[Turn] = [("system", _content(instructions))] if instructions else []
    if isinstance(items, str):
        return [*turns, ("user", items)]
    return turns + [_item(item) for item in _objects(items)]


def message_turns(body: dict[str, Any]) -> list[Turn]:
    """Return `system` and the messages of a *body* of Anthropic's Messages API."""
    system = body.get("system")
    turns: list[Turn] = [("system", _blocks(system))] if system else []
    return turns + [
        (_text(message.get("role")), _blocks(message.get("content"))) for message in _objects(body.get("messages"))
    ]


def _blocks(content: Any) -> str | list[Any] | None:
    """Return Anthropic's *content*; what calls of tools, their results and thoughts say is text too."""
    parts = _content(content)
    return [_block(part) for part in parts] if isinstance(parts, list) else parts


def _block(part: dict[str, Any]) -> dict[str, Any]:
    match part.get("type"):
        case "thinking":
            return {"text": part.get("thinking")}
        case "tool_use":
            return {"text": msgspec.json.encode([part.get("name"), part.get("input")]).decode()}
        case "tool_result":
            result = _content(part.get("content"))
            texts = result if isinstance(result, list) else [{"text": result}]
            return {"text": "\n".join(text for each in texts if isinstance(text := each.get("text"), str))}
        case _:
            return part


def _item(item: dict[str, Any]) -> Turn:
    """Return one item of a Responses input: a message, a tool call, its output, reasoning, or another item of vLLM."""
    match item.get("type", "message"):
        case "message":
            return _text(item.get("role")), _content(item.get("content"))
        case "function_call_output" | "custom_tool_call_output":
            return "tool", _content(item.get("output"))
        case "reasoning":
            return "assistant", _content(item.get("content"))
        case _:
            return "assistant", _text(item.get("arguments") or item.get("input")) or None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _content(content: Any) -> str | list[Any] | None:
    if isinstance(content, list):  # vLLM takes bare text among the parts, too
        return [part if isinstance(part, dict) else {"text": part} for part in content if isinstance(part, dict | str)]
    return content if isinstance(content, str) else None


def characters(turns: list[Turn]) -> int:
    """Return the number of characters of text in *turns*."""
    size = 0
    for _, content in turns:
        if isinstance(content, str):
            size += len(content)
        elif content:
            size += sum(len(text) for part in content if isinstance(text := part.get("text"), str))
    return size
