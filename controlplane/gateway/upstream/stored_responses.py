"""Responses that instances keep: which instance made which, so that it can be asked for them again.

A vLLM keeps the responses that it made, in memory, if it was started with `VLLM_ENABLE_RESPONSES_API_STORE=1`. Its answer
says whether it was.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import aiohttp

from controlplane.dispatch.port import Placed
from controlplane.gateway.errors import ApiError, unavailable
from controlplane.gateway.upstream import answers

MOST_RESPONSES: Final = 50_000
"""Responses remembered, about 10 MB; the oldest is forgotten first."""
ANSWER_S: Final = 10.0


class StoredResponses:
    """Asks instances for the latest responses. *session* provides the connections."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._session = session
        self._made: OrderedDict[str, tuple[int, Placed]] = OrderedDict()

    def note(self, response_id: str, tenant_id: int, placed: Placed) -> None:
        """Remember that the instance of *placed* made a response."""
        self._made[response_id] = tenant_id, placed
        if len(self._made) > MOST_RESPONSES:
            self._made.popitem(last=False)

    async def ask(self, method: str, response_id: str, what: str, tenant_id: int) -> bytes:
        """Return the answer of the instance that made a response. Raises ApiError, 404 if it does not have it.

        *what* follows the id in the path: "" or "/cancel".
        """
        owner, placed = self._made.get(response_id, (None, None))
        if placed is None or owner != tenant_id:
            raise _not_kept(response_id)
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


def _not_kept(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no stored response {response_id[:80]!r}. A response is kept by the instance that made it, until that "
        "stops, and only if its deployment sets VLLM_ENABLE_RESPONSES_API_STORE=1.",
        code="response_not_found",
        param="response_id",
    )
