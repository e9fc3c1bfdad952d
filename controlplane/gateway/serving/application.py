"""The OpenAI-compatible API as a plain ASGI application: each path to what answers it, each error to an answer.

It reads no row and no array: keys are cached, models are as the dispatcher lists them, completions are `Completions`' work.
"""

import logging
from collections.abc import Callable
from typing import Any

from controlplane.gateway.admission.keys import Keys
from controlplane.gateway.admission.pace import Pace
from controlplane.gateway.admission.validation import Kind
from controlplane.gateway.errors import JSON_TYPE, STANDING_BY, STOPPING, ApiError
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.serving.catalog import Catalog
from controlplane.gateway.serving.completions import Completions
from controlplane.gateway.serving.http_request import HttpRequest
from controlplane.gateway.serving.responder import Responder

logger = logging.getLogger(__name__)
KINDS = {f"/v1/{kind}": kind for kind in Kind}


class Application:
    """*owns* says whether this process has the regions: otherwise another one serves."""

    def __init__(
        self,
        keys: Keys,
        catalog: Catalog,
        completions: Completions,
        records: Records,
        *,
        owns: Callable[[], bool],
        most_body_bytes: int,
    ) -> None:
        self.most_body_bytes = most_body_bytes
        self.keys = keys
        self.catalog = catalog
        self.completions = completions
        self.records = records
        self.owns = owns
        self.pace = Pace()
        self.active = 0  # requests between arrival and answer
        self.stopping = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        request = HttpRequest.of(scope, receive)
        responder = Responder(send, request.request_id, request.direct)
        self.active += 1
        try:
            await self._route(request, responder)
        except ApiError as error:
            self.records.count_error(error)
            await responder.error(error)
        except Exception:
            logger.exception("gateway: request %s failed", request.request_id)
            failure = ApiError(500, "Something failed on our side.", type="server_error", code="internal_error")
            self.records.count_error(failure)
            await responder.error(failure)
        finally:
            self.active -= 1

    async def _route(self, request: HttpRequest, responder: Responder) -> None:
        if self.stopping:
            raise STOPPING
        path, authorization = request.path, request.headers.get(b"authorization")
        if (kind := KINDS.get(path)) is not None:
            request.require("POST")
            grant = await self.keys.check(authorization)
            if not self.owns():
                raise STANDING_BY
            if (wait := self.pace.enter()) is not None:
                await wait
            raw = await request.body(self.most_body_bytes)
            await self.completions.complete(grant, raw, request, responder, kind)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            request.require("GET")
            await self.keys.check(authorization)
            name = path.removeprefix("/v1/models").strip("/")
            await responder.whole(200, JSON_TYPE[1], self.catalog.page(name))
        elif path == "/v1/embeddings":
            await self.keys.check(authorization)
            raise ApiError(
                404,
                "Embeddings are not served here: Pilothouse schedules text generation. "
                "Use /v1/chat/completions, /v1/responses or /v1/completions.",
                code="unsupported_endpoint",
            )
        elif path.startswith("/v1/responses/"):
            await self.keys.check(authorization)
            raise ApiError(
                404,
                "Responses are not stored here: they can be neither read again nor cancelled by name. "
                "Closing the connection stops one.",
                code="unsupported_endpoint",
            )
        else:
            raise ApiError(404, f"There is no {request.method} {path} here.", code="unknown_url")
