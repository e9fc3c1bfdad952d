"""Responses that instances keep: which instance made which, so that it can be asked for them again and continue them.

A vLLM keeps the responses that it made, in memory, if it was started with `VLLM_ENABLE_RESPONSES_API_STORE=1`. Its answer
says whether it was.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import aiohttp
from msgspec import Struct

from controlplane.dispatch.port import Placed
from controlplane.gateway.errors import ApiError, invalid, unavailable
from controlplane.gateway.serving.open_requests import Ticket
from controlplane.gateway.upstream import answers

MOST_RESPONSES: Final = 50_000
"""Responses remembered, about 10 MB; the oldest is forgotten first."""
ANSWER_S: Final = 10.0


class Made(Struct, frozen=True):
    """A response: whose it is, the instance that made it, and what it was made of."""

    tenant_id: int
    placed: Placed
    model: str  # that answered
    base: str  # that model, or the one that an adapter adapts
    asked_model: str  # that its tenant named
    model_rule: str  # why another answered
    tokens: int  # of the conversation so far


class StoredResponses:
    """Asks instances for the latest responses. *session* provides the connections."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._session = session
        self._made: OrderedDict[str, Made] = OrderedDict()

    def note(self, ticket: Ticket, placed: Placed, tokens: int) -> None:
        """Remember the response of *ticket*, which the instance of *placed* made; its conversation has *tokens* by then."""
        asked, model = ticket.asked, ticket.call.model
        asked_model = ticket.asked_model or model
        made = Made(ticket.grant.tenant_id, placed, model, asked.model, asked_model, ticket.model_rule, tokens)
        self._made[ticket.response_id] = made
        if len(self._made) > MOST_RESPONSES:
            self._made.popitem(last=False)

    def continued(self, body: dict[str, Any], tenant_id: int) -> Made | None:
        """Return the response that a *body* of the Responses API continues; None if it begins a conversation.

        Raises ApiError: 404 for one that is not known, or of another tenant.
        """
        response_id = body.get("previous_response_id")
        if response_id is None:
            return None
        if not isinstance(response_id, str):
            raise invalid("`previous_response_id` must be text.", "previous_response_id", "invalid_type")
        made = self._made.get(response_id)
        if made is None or made.tenant_id != tenant_id:
            raise not_continued(response_id)
        return made

    async def ask(self, method: str, response_id: str, what: str, tenant_id: int) -> bytes:
        """Return the answer of the instance that made a response. Raises ApiError, 404 if it does not have it.

        *what* follows the id in the path: "" or "/cancel".
        """
        made = self._made.get(response_id)
        if made is None or made.tenant_id != tenant_id:
            raise _not_kept(response_id)
        placed = made.placed
        headers = {"Authorization": f"Bearer {placed.api_key}"} if placed.api_key else {}
        url = f"{placed.url.rstrip('/')}/v1/responses/{quote(response_id, safe='')}{what}"
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._session().request(method, url, headers=headers, timeout=limit) as answer:
                status, body = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            message = "The instance that has this response does not answer."
            raise unavailable(message, code="upstream_failed", retry_after_s=1, status=502) from error
        if status == 200:
            return body
        if status == 405:
            message = f"The server that has this response does not serve {method} for it."
            raise ApiError(404, message, code="unsupported_endpoint")
        if status == 404:
            raise _not_kept(response_id)
        if (refusal := answers.refusal(status, body)) is not None:
            raise refusal
        message = f"The instance that has this response answered with status {status}."
        raise unavailable(message, code="upstream_failed", retry_after_s=1, status=502)


KEPT = (
    "A response is kept by the instance that made it, until that stops, and only if its deployment sets "
    "VLLM_ENABLE_RESPONSES_API_STORE=1."
)


def _not_kept(response_id: str) -> ApiError:
    message = f"There is no stored response {response_id[:80]!r}. {KEPT}"
    return ApiError(404, message, code="response_not_found", param="response_id")


def not_continued(response_id: object, why: str = KEPT) -> answers.Refusal:
    """Return the error of a request that continues a response which no instance has for it, with OpenAI's code."""
    message = f"Previous response with id '{str(response_id)[:80]}' not found. {why}"
    return answers.Refusal(
        404,
        message,
        type="invalid_request_error",
        param="previous_response_id",
        code="previous_response_not_found",
        number=None,
    )
