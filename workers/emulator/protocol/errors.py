"""vLLM's error bodies, in its own words.

vLLM validates with pydantic and prints its error entries, so does the emulator: kinds and texts of most errors are equal
to the letter, except that for messages of a wrong form vLLM lists each message type that it tried.
"""

from typing import Any

import orjson

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
    """vLLM's 400 for a value that it understood and cannot accept; it repeats parameter and value in the text."""
    if param is not None and repeat:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return ApiError(400, "BadRequestError", message, param)


def entry(kind: str, location: str, message: str, value: object, context: dict[str, Any] | None = None) -> str:
    """One validation error as vLLM prints it: a Python dictionary."""
    fields = {"type": kind, "loc": location, "msg": message, "input": _summary(value)}
    return str({**fields, "ctx": context} if context else fields)


def _summary(value: object) -> object:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    shown = str(value)
    return shown if len(shown) <= MAX_INPUT_CHARACTERS else shown[:MAX_INPUT_CHARACTERS] + "...[truncated]"


def malformed(entries: list[str], param: str | None) -> ApiError:
    """vLLM's 400 for a body that it could not read."""
    count = len(entries)
    label = "error" if count == 1 else "errors"
    lines = [f"{count} validation {label}:", *(f"  {entry}" for entry in entries[:MAX_REPORTED_ERRORS])]
    if count > MAX_REPORTED_ERRORS:
        lines.append(f"  ...and {count - MAX_REPORTED_ERRORS} more {label}")
    return ApiError(400, "Bad Request", "\n".join(lines), param)
