"""Errors in OpenAI's shape, with the headers by which its SDKs decide whether and when to retry."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import orjson

JSON_TYPE = (b"content-type", b"application/json")
TYPES = {429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status, OpenAI's and Anthropic's."""
QUOTED_CHARS = 100


class ApiError(Exception):
    """An answer other than success: status, OpenAI error body, retry headers.

    `retry_after_s` also signals the SDKs that a retry makes sense; without it, that it does not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str = "",  # the value in OpenAI's error body; "": by the status
        param: str | None = None,
        retry_after_s: float | None = None,
        estimated_wait_s: float | None = None,
        earliest_at: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.type = type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.retry_after_s = retry_after_s
        self.estimated_wait_s = estimated_wait_s
        self.earliest_at = earliest_at  # epoch seconds
        self.extra_headers = headers
        self.by_instance = False  # an instance answered with an error

    def body(self, *, anthropic: bool = False) -> bytes:
        """Return OpenAI's error body, or Anthropic's, which has our code and the rest too."""
        if anthropic:
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return orjson.dumps({"type": "error", "error": self.fields() | {"type": kind}})
        return orjson.dumps({"error": self.fields()})

    def fields(self) -> dict[str, object]:
        """Return the fields of OpenAI's error body."""
        fields: dict[str, object] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.estimated_wait_s is not None:
            fields["estimated_wait_s"] = round(self.estimated_wait_s, 3)
        if self.earliest_at is not None:
            fields["earliest_at"] = datetime.fromtimestamp(self.earliest_at, UTC).isoformat(timespec="milliseconds")
        return fields

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [JSON_TYPE, *self.extra_headers]
        if self.estimated_wait_s is not None:
            headers.append((b"x-estimated-wait-s", b"%.3f" % self.estimated_wait_s))
        if self.retry_after_s is None:
            headers.append((b"x-should-retry", b"false"))
        else:
            headers += [
                (b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))),
                (b"retry-after-ms", b"%d" % max(1, math.ceil(self.retry_after_s * 1000))),
                (b"x-should-retry", b"true"),
            ]
        return headers

    def event(self, sequence_number: int | None = None, *, anthropic: bool = False) -> bytes:
        """Return the error as a server-sent event, for a stream whose status has already been sent.

        With a *sequence_number* it has the form of the Responses API, and also that of chats, by which its SDKs raise.
        """
        if anthropic:
            return b"event: error\ndata: " + self.body(anthropic=True) + b"\n\n"
        if sequence_number is None:
            return b"data: " + self.body() + b"\n\n"
        fields = self.fields()
        event = fields | {"type": "error", "sequence_number": sequence_number, "error": fields}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


def quoted(value: object) -> str:
    """Return *value* of a request, in quotes, for a message: its beginning, for callers send any length."""
    text = repr(value)
    return text if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]}…"


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def too_large(message: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> ApiError:
    return ApiError(413, message, code="request_too_large", headers=headers)


def invalid_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


KEY_ENDED = invalid_key(
    "The API key of this request has expired, was revoked or deleted, or its tenant is switched off."
)


def unknown_model(name: str) -> ApiError:
    return ApiError(
        404,
        f"The model {quoted(name)} does not exist here. `GET /v1/models` lists those that do.",
        code="model_not_found",
        param="model",
    )


def model_not_allowed(name: str) -> ApiError:
    """Return OpenAI's error for a model that a project has no access to."""
    return ApiError(
        403, f"This API key does not have access to model {quoted(name)}.", code="model_not_found", param="model"
    )


def not_served(model: str, path: str, served: Sequence[str]) -> ApiError:
    """Return the error for a call to *path* of a *model* that serves others, *served*."""
    return ApiError(
        404,
        f"The model {model!r} does not serve {path}. It serves {', '.join(served)}.",
        code="unsupported_endpoint",
        param="model",
    )


def too_many(message: str, *, code: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, code=code, retry_after_s=retry_after_s)


def unavailable(message: str, *, code: str, retry_after_s: float, status: int = 503) -> ApiError:
    return ApiError(status, message, code=code, retry_after_s=retry_after_s)


STOPPING = unavailable("This server is stopping; try again.", code="stopping", retry_after_s=1)
# The serving process is named in /readyz: a tenant need not know the machines.
STANDING_BY = unavailable("This process is standing by; another serves.", code="standing_by", retry_after_s=1)
