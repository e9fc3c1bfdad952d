"""The gateway's `/v1` as an OpenAPI document: what of OpenAI's API is answered here, and what is ours in it.

Bodies are OpenAI's and pass through to vLLM; fields that the gateway reads are described.
"""

from typing import Any

KEY: list[dict[str, list[str]]] = [{"KeyCaller": []}]


def document(model: str) -> dict[str, Any]:
    """The document, with *model* in its examples."""
    messages = [{"role": "user", "content": "Hello"}]
    return {
        "paths": {
            "/v1/chat/completions": {
                "post": _call(
                    "create_chat_completion",
                    "Create a chat completion",
                    "Streamed (`stream: true`, server-sent events) or whole. A request is held while instances are busy; "
                    "a waiting stream gets a comment line every 15 seconds. Tools, `json_schema` and fields that only vLLM "
                    "knows pass through.",
                    CHAT,
                    ["model", "messages"],
                    {"model": model, "messages": messages, "stream": True},
                )
            },
            "/v1/responses": {
                "post": _call(
                    "create_response",
                    "Create a response",
                    "OpenAI's Responses API, on vLLM's own. Nothing is stored: the conversation comes whole as `input`, and "
                    "`previous_response_id`, `conversation` and `background` are refused with 400.",
                    RESPONSE,
                    ["model", "input"],
                    {"model": model, "input": "Hello"},
                )
            },
            "/v1/completions": {
                "post": _call(
                    "create_completion",
                    "Create a completion",
                    "Text, token ids, or a list of either.",
                    COMPLETION,
                    ["model", "prompt"],
                    {"model": model, "prompt": "Hello", "max_tokens": 64},
                )
            },
            "/v1/models": {
                "get": _read(
                    "list_models", "List models", "Those that are served: `max_model_len` is the context in tokens."
                )
            },
            "/v1/models/{model}": {
                "get": _read("get_model", "Get a model", "404 `model_not_found` for one that is not served.")
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": TEXT}]}
            },
        },
        "components": {"schemas": {"Error": ERROR}},
    }


def _call(
    name: str, summary: str, description: str, fields: dict[str, Any], required: list[str], example: dict[str, Any]
) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": MODEL | fields | SHARED}
    return {
        "operationId": name,
        "tags": [TAG],
        "summary": summary,
        "description": description,
        "security": KEY,
        "parameters": HEADERS,
        "requestBody": {"content": {"application/json": {"schema": schema, "example": example}}},
        "responses": {
            "200": {"description": "OpenAI's and vLLM's answer, byte for byte; `usage` counts the tokens."},
            "400": {"description": "The body is wrong (`param` names the field), or `unknown_slo_class`.", **ERRORS},
            "401": {"description": "`invalid_api_key`: no key, or one that is unknown, revoked or expired."},
            "403": {"description": "`slo_class_not_allowed`: the tenant may not use this class."},
            "404": {"description": "`model_not_found`, or `unsupported_endpoint`."},
            "413": {"description": "`request_too_large`."},
            "429": {
                "description": "`rate_limit_exceeded`, `concurrency_limit_exceeded`, `queue_full`: wait as `Retry-After` "
                "(seconds) and `retry-after-ms` say; `error.estimated_wait_s` and the header "
                "`x-estimated-wait-s` are how long one more request would wait."
            },
            "502": {
                "description": "`upstream_failed`, `upstream_interrupted`: instances failed; trying again makes sense."
            },
            "503": {
                "description": "`model_unavailable`, `hold_expired`, `standing_by`, `stopping`: with `Retry-After`."
            },
            "504": {"description": "`first_token_late`: no token came for many times what the prompt takes."},
        },
    }


def _read(name: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "tags": [TAG],
        "summary": summary,
        "description": description,
        "security": KEY,
        "responses": {
            "200": {"description": "As OpenAI and vLLM describe a model."},
            "401": {"description": "`invalid_api_key`."},
        },
    }


TAG = "Inference"
TEXT = {"type": "string"}
NATURAL = {"type": "integer", "minimum": 1}
MODEL = {"model": {"type": "string", "description": "One of `GET /v1/models`."}}
SHARED = {
    "stream": {"type": "boolean", "default": False, "description": "Server-sent events as tokens come."},
    "service_tier": {
        "type": "string",
        "default": "auto",
        "description": "The SLO class by its tier or name, where no header names one; auto and default mean the "
        "tenant's default.",
    },
    "priority": {
        "type": "integer",
        "description": "0 to 499: a step back behind your own requests of the same class; never ahead of other tenants.",
    },
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
}
TOOLS = {
    "tools": {
        "type": "array",
        "items": {"type": "object"},
        "description": "Functions that may be called; they count as prompt. vLLM chooses tools by itself where its "
        "deployment has --enable-auto-tool-choice and --tool-call-parser.",
    },
    "tool_choice": {"description": "none, auto, required, or a named function."},
}
CHAT = {
    "messages": {
        "type": "array",
        "items": {"type": "object"},
        "description": "With roles system, user, assistant and tool.",
    },
    "max_completion_tokens": NATURAL | {"description": "max_tokens is read too."},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stream_options": {"type": "object", "description": "include_usage: the last event has usage."},
    "response_format": {"type": "object", "description": "json_schema or json_object."},
    **TOOLS,
}
RESPONSE = {
    "input": {
        "anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}],
        "description": "Text, or items: messages, calls of tools and their outputs.",
    },
    "instructions": {"type": "string", "description": "The system message."},
    "max_output_tokens": NATURAL,
    "text": {"type": "object", "description": "format: json_schema or json_object."},
    "store": {"type": "boolean", "description": "Has no effect."},
    **TOOLS,
}
COMPLETION = {
    "prompt": {"description": "Text, token ids, or a list of either."},
    "max_tokens": NATURAL | {"description": "vLLM's default is 16."},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stream_options": {"type": "object", "description": "include_usage: the last event has usage."},
}
HEADERS = [
    {"name": name, "in": "header", "required": False, "schema": TEXT, "description": description}
    for name, description in (
        ("X-SLO-Class", "The SLO class; before service_tier and the tenant's default."),
        ("X-Request-Id", "Yours, 1 to 80 letters, digits or . _ : -; it is in the answer and in the ledger."),
        ("X-Region", "Where the caller is; that region is preferred."),
        ("X-Application, X-Run, X-Unit", "Names kept in the ledger, to find these requests again."),
    )
]
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"anyOf": [TEXT, {"type": "null"}], "description": "The field at fault."},
                "code": {"type": "string", "description": "A word for programs."},
                "estimated_wait_s": {"type": "number", "description": "Of a queue that is full."},
            },
        }
    },
}
ERRORS = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
