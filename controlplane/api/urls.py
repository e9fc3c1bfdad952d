"""Operator and tenant REST API. OpenAPI document: `/api/openapi.json`.

Inference is served on `/v1`, in OpenAI's format.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from django.http import HttpRequest
from ninja import NinjaAPI, Router
from ninja.openapi.schema import OpenAPISchema
from ninja.operation import Operation

from controlplane.api import errors
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.routers import (
    accounts,
    alerts,
    capacity,
    lengths,
    planning,
    records,
    settings,
    system,
    usage,
    waiting,
    what_ifs,
)
from controlplane.api.routers.fleet import deploy, instances, inventory

INFERENCE = Path(__file__).with_name("inference.json")
"""OpenAPI of the gateway's `/v1`: bodies are OpenAI's and pass through to vLLM; only what the gateway reads is described."""


class PilothouseApi(NinjaAPI):
    """API whose operations are named after their functions (`list_instances`) instead of module paths."""

    def get_openapi_operation_id(self, operation: Operation) -> str:
        return operation.view_func.__name__

    def get_openapi_schema(
        self, *, path_prefix: str | None = None, path_params: dict[str, Any] | None = None
    ) -> OpenAPISchema:
        """Return Ninja's document with `/v1` added; cached by path prefix, since it takes 0.16 s."""
        prefix = self.get_root_path(path_params or {}) if path_prefix is None else path_prefix
        if prefix not in self._documents:
            self._documents[prefix] = self._document(prefix)
        return self._documents[prefix]

    @functools.cached_property
    def _documents(self) -> dict[str, OpenAPISchema]:
        return {}

    def _document(self, path_prefix: str) -> OpenAPISchema:
        schema = super().get_openapi_schema(path_prefix=path_prefix)
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["summary"] = operation["summary"].capitalize()
                operation["responses"]["default"] = {"description": "An error", "content": content}
        inference = json.loads(INFERENCE.read_text())
        common = inference["call"]  # of all calls that instances answer
        calls = {
            path: {"post": common | call | {"responses": common["responses"] | call["responses"]}}
            for path, call in inference["calls"].items()
        }
        schema["paths"] = calls | inference["paths"] | schema["paths"]
        for kind, parts in inference["components"].items():
            schema["components"][kind] = schema["components"].get(kind, {}) | parts
        return schema


api = PilothouseApi(
    title="Pilothouse",
    version="1",
    description="Inference, and what the console shows and does: fleet, keys, usage, the request ledger, plans, what-ifs. "
    'Errors have one body: `{"error": {"code", "message", "field"}}`.',
    urls_namespace="api",
    docs_url=None,
)
errors.install(api)
ROUTERS = (
    *(instances.router, inventory.router, deploy.router, accounts.router),
    *(records.router, planning.router, lengths.router, settings.router),
    *(system.router, alerts.router, usage.router, usage.prices, waiting.router, what_ifs.router, capacity.router),
)


def only_known(operation: Operation) -> Callable[..., Any]:
    """Return the function of *operation*, which refuses parameters that it does not have: a mistyped one filters nothing."""
    view: Callable[..., Any] = operation.view_func
    query = [model for model in operation.models if model.__ninja_param_source__ == "query"]
    known = sorted(name for model in query for name in model.__ninja_flatten_map__)

    @functools.wraps(view)
    def answer(request: HttpRequest, **given: Any) -> Any:
        for name in request.GET:
            if name not in known:
                those = f"It takes {', '.join(known)}." if known else "It takes none."
                raise ApiError(422, "invalid", f"This path has no parameter {name!r}. {those}", name)
        return view(request, **given)

    return answer


for router in ROUTERS:
    for path_view in router.path_operations.values():
        for operation in path_view.operations:
            operation.view_func = only_known(operation)
    api.add_router("", router)


rest_of_paths = Router()


@rest_of_paths.api_operation(
    ["GET", "POST", "PUT", "PATCH", "DELETE"],
    "/{path:rest}",
    auth=None,
    include_in_schema=False,
    response={404: ErrorBody},
)
def nothing_here(request: HttpRequest, rest: str) -> NoReturn:
    raise ApiError(404, "not_found", "There is no such path. The paths are listed in /api/openapi.json.")


api.add_router("", rest_of_paths)  # last: a catch-all for the remaining paths
