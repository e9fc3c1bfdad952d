"""Outcome of one request as its client saw it, and the mapping from SDK exceptions."""

import importlib
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import openai

# The SDK's HTTP library: httpx, in later versions httpx2. The SDK passes some of their errors on unchanged.
HTTP: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


class End(StrEnum):
    """End of a request from the client's point of view."""

    DONE = "done"
    REFUSED = "refused"  # an error status with a body
    INTERRUPTED = "interrupted"  # an error event within a stream
    LEFT = "left"  # the client closed the connection or timed out
    NEVER_SENT = "never sent"  # the client closed the connection before its request was whole
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # no connection
    WRONG = "wrong"  # the answer does not fit the request


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Times are epoch seconds; tokens are None where the answer had none."""

    request_id: str
    kind: str
    expects: frozenset[int]  # statuses of success
    sent_at: float = field(default_factory=time.time)
    ended_at: float = 0.0
    first_at: float = 0.0  # its first token, where that is recorded
    end: End = End.CUT
    status: int = 0
    code: str = ""
    model: str = ""
    slo_class: str = ""
    attempts: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    why: str = ""
    unread: bool = False  # its client may have left before the gateway had read the request
    key_ends: bool = False  # its key is revoked meanwhile

    def done(self, usage: object = None, output_tokens: int | None = None) -> None:
        """Record success; *usage* is the SDK's, *output_tokens* the client's own count."""
        self.end, self.status = End.DONE, 200
        self.output_tokens = output_tokens
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens  # type: ignore[attr-defined]
            self.output_tokens = usage.completion_tokens  # type: ignore[attr-defined]

    def left(self) -> None:
        self.end = End.LEFT

    def failed(self, error: BaseException) -> None:
        """Record *error*; one from neither connection nor server means a wrong answer."""
        self.why = f"{type(error).__name__}: {error}"[:200]
        match error:
            case openai.APIStatusError():
                self.end, self.status, self.code = End.REFUSED, error.status_code, str(error.code or "")
            case openai.APITimeoutError():
                self.end = End.LEFT
            case openai.APIConnectionError():
                refused = isinstance(error.__cause__, (HTTP.ConnectError, HTTP.ConnectTimeout))
                self.end = End.UNREACHED if refused else End.CUT
            case openai.APIError():  # an event within the stream
                self.end, self.code = End.INTERRUPTED, str(error.code or "")
            case ConnectionRefusedError():
                self.end = End.UNREACHED
            case OSError() | EOFError():
                self.end = End.CUT
            case _ if isinstance(error, HTTP.TransportError):
                self.end = End.CUT
            case _:
                self.end = End.WRONG
