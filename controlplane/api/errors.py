"""Errors of `/api`. All share one body: `{"error": {"code", "message", "field"}}`."""

from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI, Schema
from ninja.errors import AuthenticationError, HttpError
from ninja.errors import ValidationError as RequestError
from pydantic import ConfigDict

from controlplane.database import ERRORS, outage
from controlplane.dispatch.queues.commands import GatewaySilent
from controlplane.fleet.lifecycle.states import ActionError


class ErrorDetail(Schema):
    model_config = ConfigDict(use_attribute_docstrings=True)

    code: str
    """Machine-readable code, such as `not_found`."""
    message: str
    field: str | None = None
    """Field or parameter at fault, if any."""


class ErrorBody(Schema):
    error: ErrorDetail


class ApiError(Exception):
    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field


def body(code: str, message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "field": field}}


def install(api: NinjaAPI) -> None:
    """Register handlers for all exceptions that a route may raise."""

    def answer(request: HttpRequest, status: int, code: str, message: str, field: str | None = None) -> HttpResponse:
        return api.create_response(request, body(code, message, field), status=status)

    @api.exception_handler(ApiError)
    def refused(request: HttpRequest, error: ApiError) -> HttpResponse:
        return answer(request, error.status, error.code, error.message, error.field)

    @api.exception_handler(ActionError)
    def action_refused(request: HttpRequest, error: ActionError) -> HttpResponse:
        return answer(request, 409, "conflict", str(error))

    @api.exception_handler(GatewaySilent)
    def gateway_silent(request: HttpRequest, error: GatewaySilent) -> HttpResponse:
        return answer(request, 503, "no_gateway", f"{error}.")

    def database_error(request: HttpRequest, error: Any) -> HttpResponse:
        if not (why := outage(error)):
            raise error
        response = answer(request, 503, "database_unavailable", why)
        response.headers["Retry-After"] = "2"
        return response

    for kind in ERRORS:
        api.add_exception_handler(kind, database_error)

    @api.exception_handler(ValidationError)
    def invalid_row(request: HttpRequest, error: ValidationError) -> HttpResponse:
        messages = error.message_dict if hasattr(error, "error_dict") else {NON_FIELD_ERRORS: error.messages}
        field, (message, *_) = next(iter(messages.items()))
        return answer(request, 422, "invalid", message, None if field == NON_FIELD_ERRORS else field)

    @api.exception_handler(RequestError)
    def invalid_request(request: HttpRequest, error: RequestError) -> HttpResponse:
        first = error.errors[0]
        names = [str(part) for part in first.get("loc", ())]
        # ("body", "change", "title") and ("query", "limit"): the last part is the caller's name for it
        field = names[-1] if len(names) > 1 else None
        return answer(request, 422, "invalid", str(first.get("msg", "invalid")), field)

    @api.exception_handler(AuthenticationError)
    def not_signed_in(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
        response = answer(request, 401, "not_authenticated", "Sign in to the console, or send a valid API key.")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @api.exception_handler(Http404)
    def not_found(request: HttpRequest, error: Http404) -> HttpResponse:
        return answer(request, 404, "not_found", "Not found, or no access.")

    @api.exception_handler(HttpError)
    def other(request: HttpRequest, error: HttpError) -> HttpResponse:
        code = {400: "bad_request", 403: "forbidden"}.get(error.status_code, "error")
        return answer(request, error.status_code, code, str(error))
