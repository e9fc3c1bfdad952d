"""Turns of conversations: roles and contents, as messages of a chat, items of a Responses call or Anthropic's messages."""

from typing import Any

import msgspec

from controlplane.gateway.errors import invalid

Turn = tuple[str, Any]
"""Role and content: text, a list of parts with a `text` each, or None."""


def chat_turns(body: dict[str, Any]) -> list[Turn]:
    """Return the messages of a chat *body*, their tool calls as separate turns. Raises ApiError 400."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("`messages` must be a list of at least one message.", "messages", "missing_required_parameter")
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            where = f"messages[{index}]"
            raise invalid(f"`{where}` must be an object with a `role`.", where, "invalid_type")
        content = message.get("content")
        turns.append((role, content if type(content) is str else _content(content, f"messages[{index}].content")))
        if message.get("tool_calls"):
            turns.append((role, msgspec.json.encode(message["tool_calls"]).decode()))
    return turns


def response_turns(body: dict[str, Any]) -> list[Turn]:
    """Return `instructions` and the items of `input` of a Responses *body*. Raises ApiError 400."""
    stored = next((name for name in ("previous_response_id", "conversation") if body.get(name) is not None), "")
    if stored:
        raise invalid(
            f"`{stored}` refers to what was stored, and responses are not stored here: send the whole conversation as "
            "`input`.",
            stored,
            "unsupported_parameter",
        )
    if body.get("background"):
        raise invalid(
            "`background` needs stored responses, which are not kept here: send the request without it, and stream.",
            "background",
            "unsupported_parameter",
        )
    instructions, items = body.get("instructions"), body.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid("`instructions` must be text.", "instructions", "invalid_type")
    turns: list[Turn] = [("system", instructions)] if instructions else []
    if items is None or items == []:
        raise invalid("`input` must hold text or a list of items.", "input", "missing_required_parameter")
    if isinstance(items, str):
        return [*turns, ("user", items)]
    if not isinstance(items, list):
        raise invalid("`input` must be text or a list of items.", "input", "invalid_type")
    return turns + [_item(item, f"input[{index}]") for index, item in enumerate(items)]


def message_turns(body: dict[str, Any]) -> list[Turn]:
    """Return `system` and the messages of a *body* of Anthropic's Messages API. Raises ApiError 400."""
    system, messages = body.get("system"), body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("`messages` must be a list of at least one message.", "messages", "missing_required_parameter")
    turns: list[Turn] = [("system", _blocks(system, "system"))] if system else []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"`{where}` must be an object with a `role`.", where, "invalid_type")
        turns.append((message["role"], _blocks(message.get("content"), f"{where}.content")))
    return turns


def _blocks(content: Any, where: str) -> str | list[Any] | None:
    """Return Anthropic's *content*; what calls of tools, their results and thoughts say is text too."""
    parts = _content(content, where)
    return [_block(part) for part in parts] if isinstance(parts, list) else parts


def _block(part: dict[str, Any]) -> dict[str, Any]:
    match part.get("type"):
        case "thinking":
            return {"text": part.get("thinking")}
        case "tool_use":
            return {"text": msgspec.json.encode([part.get("name"), part.get("input")]).decode()}
        case "tool_result":
            result = part.get("content")
            texts = [result] if isinstance(result, str) else result if isinstance(result, list) else []
            said = (each.get("text") if isinstance(each, dict) else each for each in texts)
            return {"text": "\n".join(text for text in said if isinstance(text, str))}
        case _:
            return part


def _item(item: Any, where: str) -> Turn:
    """Return one item of a Responses input: a message, a tool call, its output, reasoning, or another item of vLLM."""
    if not isinstance(item, dict):
        raise invalid(f"`{where}` must be an object.", where, "invalid_type")
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise invalid(
            f"`{where}` refers to a stored item, and items are not stored here: send the item itself.",
            where,
            "unsupported_parameter",
        )
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise invalid(f"`{where}` must be a message with a `role`, or have another `type`.", where, "invalid_type")
        return role, _content(item.get("content"), f"{where}.content")
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "tool", _content(item.get("output"), f"{where}.output")
    if kind == "reasoning":
        return "assistant", _content(item.get("content"), f"{where}.content")
    said = item.get("arguments") or item.get("input")
    return "assistant", said if isinstance(said, str) else None


def response_as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return model, conversation and functions of a Responses *body* as fields of a chat, as vLLM lays them out.

    Raises ApiError 400. Media are left out.
    """
    turns, messages = iter(response_turns(body)), []
    items = body["input"] if isinstance(body["input"], list) else []
    if body.get("instructions"):
        messages.append({"role": "system", "content": next(turns)[1]})
    for at, (role, content) in enumerate(turns):
        item = items[at] if items else {}
        said = _joined(content)
        if item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": said}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages.append({"role": role, "content": None, "tool_calls": [call]})
        else:
            called = {"tool_call_id": item.get("call_id")} if role == "tool" else {}
            messages.append({"role": role, "content": said, **called})
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages}
    tools = body.get("tools")
    functions = [one for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []
    functions = [one for one in functions if one.get("type") == "function"]
    if functions:
        chat["tools"] = [
            {"type": "function", "function": {name: value for name, value in one.items() if name != "type"}}
            for one in functions
        ]
    return chat


def _joined(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(text for part in parts if isinstance(text := part.get("text"), str))


def _content(content: Any, where: str) -> str | list[Any] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict | str) for part in content):
        return [part if isinstance(part, dict) else {"text": part} for part in content]  # vLLM takes bare text, too
    raise invalid(f"`{where}` must be text or a list of parts.", where, "invalid_type")


def characters(turns: list[Turn]) -> int:
    """Return the number of characters of text in *turns*."""
    size = 0
    for _, content in turns:
        if isinstance(content, str):
            size += len(content)
        elif content:
            size += sum(len(text) for part in content if isinstance(text := part.get("text"), str))
    return size
