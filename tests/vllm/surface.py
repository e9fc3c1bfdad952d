"""What vLLM serves: its routes, and the fields of each body with a value that it takes.

Run by vLLM's Python, it prints `{"METHOD PATH": {field: value}}`. `tests/docs/as_vllm.py` holds the gateway to what
`tests/vllm/test_surface.py` has recorded.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDED = Path(__file__).with_name("surface.json")


def main() -> None:
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # their routes too
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from pydantic import TypeAdapter
    from vllm.entrypoints.launchers.api_server.routers import register_api_routers
    from vllm.entrypoints.pooling.classify.api_router import router as classify
    from vllm.entrypoints.pooling.embed.api_router import router as embed
    from vllm.entrypoints.pooling.pooling.api_router import router as pooling
    from vllm.entrypoints.pooling.scoring.api_router import router as scoring

    app = FastAPI(openapi_url=None)
    app.state.args = SimpleNamespace(
        enable_tokenizer_info_endpoint=True, enable_scale_out=True, enable_fault_tolerance=True, tokens_only=False
    )
    register_api_routers(app.state.args, app, ("generate", "transcription", "realtime"), None)
    for router in (classify, embed, pooling, scoring):
        app.include_router(router)
    routes: dict[str, dict[str, Any]] = {}
    for route in app.routes:
        fields: dict[str, Any] = {}
        if isinstance(route, APIRoute):
            for given in route.dependant.body_params:
                fields |= fields_of(TypeAdapter(given.field_info.annotation).json_schema())
        for method in sorted(getattr(route, "methods", None) or {"WEBSOCKET"} - {"HEAD"}):
            routes[f"{method} {route.path}"] = fields
    print(json.dumps(routes))


def fields_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object, or of each of several, with a value for each."""
    root = schema
    names: dict[str, Any] = {}
    for one in (schema, *schema.get("anyOf", ())):
        declared = referred(one, root).get("properties", {})
        names |= {name: value_of(inner, root) for name, inner in sorted(declared.items())}
    return names


def referred(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref", "")
    return root["$defs"][reference.rpartition("/")[2]] if reference else schema


def value_of(schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> Any:
    """Return a value that fits *schema*: small, and other than the default where that is easy."""
    schema = referred(schema, root)
    for branch in ("anyOf", "oneOf", "allOf"):
        if branch in schema:
            chosen = [one for one in schema[branch] if one.get("type") != "null"] or schema[branch]
            return value_of(chosen[0], root, depth)
    if "enum" in schema:
        return schema["enum"][-1]
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "integer":
            return max(1, schema.get("minimum", 1))
        case "number":
            return 0.5
        case "boolean":
            return schema.get("default") is not True
        case "array":
            return [value_of(schema.get("items", {}), root, depth + 1)] if depth < 4 else []
        case "object":
            named = schema.get("properties", {})
            return {name: value_of(named[name], root, depth + 1) for name in schema.get("required", ()) if depth < 4}
        case _:
            return "x"


if __name__ == "__main__":
    main()
