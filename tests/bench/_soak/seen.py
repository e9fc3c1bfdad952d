"""What a client saw of one request, and how exceptions of SDKs become that."""

import importlib
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import openai

# The SDK's HTTP library: httpx, in later versions httpx2. Of their errors the SDK passes some on as they are.
HTTP: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


class End(StrEnum):
    """How a request ended for its client."""

    DONE = "done"
    REFUSED = "refused"  # an error status with a body
    INTERRUPTED = "interrupted"  # an error event within a stream
    LEFT = "left"  # the client closed the connection, or gave up waiting
    NEVER_SENT = "never sent"  # the client closed the connection before its request was whole
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # there was no connection
    WRONG = "wrong"  # the answer is not one to what was asked


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. Times are epoch seconds; tokens are None where the answer did not say."""

    request_id: str
    kind: str
    expects: frozenset[int]  # statuses with which all is well
    sent_at: float = field(default_factory=time.time)
    ended_at: float = 0.0
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

    def done(self, usage: object = None, output_tokens: int | None = None) -> None:
        """It ended well; *usage* is the SDK's, *output_tokens* what the client counted itself."""
        self.end, self.status = End.DONE, 200
        self.output_tokens = output_tokens
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens  # type: ignore[attr-defined]
            self.output_tokens = usage.completion_tokens  # type: ignore[attr-defined]

    def left(self) -> None:
        self.end = End.LEFT

    def failed(self, error: BaseException) -> None:
        """It ended with *error*; one that neither a connection nor a server makes says that the answer is wrong."""
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
