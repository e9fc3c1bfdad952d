"""What an instance says of a failure, without what the request said.

vLLM's errors quote the input that they refuse (`'input': …`), and prompts are never stored: see THREAT_MODEL.md.
"""

import re
from collections.abc import Iterator
from typing import Any

import orjson

LONGEST = 500  # characters kept of a message
WINDOW = 16  # characters in a row that the request also holds are taken for a quotation
LEFT_OUT = "…"
_QUOTES = re.compile(r"""['"]?input(?:_value)?['"]?\s*[:=].*""", re.DOTALL)
_NAMES = frozenset({"model", "role", "type", "name", "id"})  # fields that hold no words of the tenant's users


def message_of(answer: bytes, body: dict[str, Any]) -> str:
    """The message of *answer*, an error body in OpenAI's shape or plain text, without quotations of the request *body*."""
    try:
        error = orjson.loads(answer)
        error = error.get("error", error)
        message = error.get("message", "") if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, AttributeError):
        message = answer.decode("utf-8", "replace")
    return without_quotations(str(message), body)


def without_quotations(message: str, body: dict[str, Any]) -> str:
    message = _QUOTES.sub(LEFT_OUT, message[: 4 * LONGEST])
    texts = list(_texts(body))
    for text in texts:
        if 3 < len(text) <= len(message):
            message = message.replace(text, LEFT_OUT)
    whole = "\0".join(form for text in texts for form in dict.fromkeys((text, repr(text)[1:-1])))
    pieces = [message[at : at + WINDOW] for at in range(0, len(message), WINDOW)]
    quoted = [len(piece) == WINDOW and piece in whole for piece in pieces]
    kept = [
        LEFT_OUT if any(quoted[max(0, at - 1) : at + 2]) else piece  # a quotation begins and ends beside what was found
        for at, piece in enumerate(pieces)
    ]
    joined = re.sub(f"(?:{LEFT_OUT}\\s*){{2,}}", LEFT_OUT, "".join(kept))
    return " ".join(joined.split())[:LONGEST]


def _texts(value: Any) -> Iterator[str]:
    """Every text in *value*, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in _NAMES or not isinstance(part, str):
                yield from _texts(part)
