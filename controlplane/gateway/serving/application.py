"""The OpenAI-compatible API as a plain ASGI application: routes paths to handlers, and converts errors to answers.

It reads no row and no array: keys are cached, models are listed by the dispatcher, `Completions` handles completions.
"""

import logging
from dataclasses import dataclass
from typing import Any

from controlplane.gateway.admission.validation import PATH_KINDS, Kind
from controlplane.gateway.errors import JSON_TYPE, STANDING_BY, STOPPING, ApiError
from controlplane.gateway.serving.completions import Completions
from controlplane.gateway.serving.http import HttpRequest, Responder

logger = logging.getLogger(__name__)
SERVED = f"Served are POST {', '.join(kind.path for kind in Kind)}, and GET /v1/models."
NOT_SERVED = {
    "Cohere's chats are": ("cohere/v2/chat", "cohere/v2/chat/render"),
    "Tokenizers' settings are": ("tokenizer_info",),
    "Spoken answers and conversations are": ("audio/speech", "realtime"),
    "Compacted responses are": ("responses/compact",),
    "Scores by generation and structured decisions are": ("generative_scoring", "systemone"),
    "Token ids without a prompt are": (
        "inference/v1/generate",
        "chat/completions/derender",
        "completions/derender",
    ),
    "Images are": ("images/generations", "images/edits", "images/variations"),
    "Moderation is": ("moderations",),
    "vLLM's own control paths are": ("invocations", "server_info", "sleep", "wake_up", "is_sleeping"),
}
"""Other paths of OpenAI and vLLM, under `/v1/` or without it, where vLLM has some of them."""
PATHS_NOT_SERVED = {
    f"{prefix}/{path}": what for what, paths in NOT_SERVED.items() for path in paths for prefix in ("/v1", "")
}
EXPOSED = (
    b"x-request-id, x-served-model, x-model-rule, x-queue-position, x-estimated-wait-s, "
    b"retry-after, retry-after-ms, x-should-retry"
)
"""Headers of an answer that a page of another origin may read."""


@dataclass(eq=False)
class Application:
    """The ASGI application. Pages of *origins* may call it."""

    completions: Completions
    origins: frozenset[str] = frozenset()
    active: int = 0  # requests between arrival and answer
    stopping: bool = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        request = HttpRequest.of(scope, receive)
        if self.origins and (origin := request.headers.get(b"origin")):
            request.direct, send = None, self._for_origin(origin, send)
        await self.answer(request, Responder(send, request.request_id, request.direct))

    async def answer(self, request: HttpRequest, responder: Responder) -> None:
        """Answer *request* by *responder*, errors too."""
        self.active += 1
        try:
            await self._route(request, responder)
        except ApiError as error:
            self.completions.records.count_error(error)
            await responder.error(error)
        except Exception:
            logger.exception("gateway: request %s failed", request.request_id)
            failure = ApiError(500, "Something failed on our side.", code="internal_error")
            self.completions.records.count_error(failure)
            await responder.error(failure)
        finally:
            self.active -= 1

    def _for_origin(self, origin: bytes, send: Any) -> Any:
        """Return *send*, adding the headers that let a page of *origin* read the answer, if it may."""
        headers = [(b"vary", b"Origin")]
        if "*" in self.origins or origin.decode("latin-1") in self.origins:
            headers += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]

        async def send_to_page(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        return send_to_page

    async def _preflight(self, request: HttpRequest, responder: Responder) -> None:
        """List what a page may send. Which pages may is in the headers of every answer."""
        wanted = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
        responder.more_headers = lambda: [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"600"),
        ]
        await responder.start(204, JSON_TYPE[1])  # which has no length
        await responder.finish()

    async def _route(self, request: HttpRequest, responder: Responder) -> None:
        if request.method == "OPTIONS" and self.origins and b"access-control-request-method" in request.headers:
            await self._preflight(request, responder)
            return
        if self.stopping:
            raise STOPPING
        path, keys, admission = request.path, self.completions.keys, self.completions.admission
        if (kind := PATH_KINDS.get(path)) is not None:
            await self.completions.answer(request, responder, kind)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            request.require("GET")
            grant = await keys.check(request.authorization)
            name = path.removeprefix("/v1/models").strip("/")
            await responder.whole(200, JSON_TYPE[1], admission.catalog.page(name, grant))
        elif path == "/load":
            request.require("GET")
            grant = await keys.check(request.authorization)
            if not self.completions.serves():
                raise STANDING_BY
            load = await admission.entries.sequences(grant.tenant_id)
            await responder.whole(200, JSON_TYPE[1], b'{"server_load":%d}' % load)
        elif what := PATHS_NOT_SERVED.get(path, ""):
            raise ApiError(404, f"{what} not served here. {SERVED}", code="unsupported_endpoint")
        else:
            raise ApiError(404, f"There is no {request.method} {path} here. {SERVED}", code="unknown_url")
