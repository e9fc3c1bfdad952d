"""`docs/tenants/as-vllm.md`: each route, field and behaviour of vLLM's API, as vLLM has it or otherwise.

`python -m tests.docs.as_vllm` writes the page again. `tests/gateway/test_as_vllm.py` holds the gateway to it, and
`tests/vllm/surface.json` says what the installed vLLM has.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from controlplane.gateway.admission.validation import PATH_KINDS, Kind
from tests.vllm.surface import RECORDED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tenants" / "as-vllm.md"
SURFACE: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())

SERVED = {
    "GET /health": "Of this server, with 503 while it does not serve; instances are on the console.",
    "GET /ping": "As `/health`.",
    "POST /ping": "As `/health`.",
    "GET /version": "Pilothouse's.",
    "GET /load": "Requests of your tenant that wait or run; needs a key.",
    "GET /metrics": "Pilothouse's; each instance's are read for it.",
    "GET /v1/models": "All models that are deployed, with their `task`, and adapters of all and of the tenant.",
}
"""Routes that are answered otherwise than by one instance's answer to the same call."""

OPERATORS = "For operators, who have the console and `/api`."
STORED = "Responses are not stored: 404."
NO_MODEL = "It names no model, so no instance can be chosen."
NOT_SERVED = {
    "GET /v1/responses/{response_id}": STORED,
    "POST /v1/responses/{response_id}/cancel": STORED,
    "GET /tokenizer_info": NO_MODEL,
    "GET /kv_event_sources": OPERATORS,
    "WEBSOCKET /metrics": "A mount of vLLM's metrics.",
    "WEBSOCKET /v1/realtime": "No websockets pass.",
    "POST /invocations": "SageMaker's form of the other calls.",
    "POST /v1/systemone": "It is new and of few models.",
    "POST /generative_scoring": "It is new and of few models.",
    "POST /v1/chat/completions/derender": "Its input is an engine's output.",
    "POST /v1/completions/derender": "Its input is an engine's output.",
    "POST /inference/v1/generate": "Between engines: disaggregated serving.",
    "POST /inference/v1/abort_requests": "Closing the connection stops a request.",
    "POST /v1/load_lora_adapter": "Pilothouse loads adapters where requests need them.",
    "POST /v1/unload_lora_adapter": "Pilothouse loads adapters where requests need them.",
} | {
    route: OPERATORS
    for route in SURFACE
    if re.search(
        r"/(reset_|collective_rpc|server_info|sleep|wake_up|is_|release_|pause|resume|abort_requests$|init_weight|shutdown_"
        r"|start_|finish_|update_|weight_|get_world|scale_elastic|fault_tolerance|stop_profile)",
        route,
    )
    and not route.startswith("POST /inference")
}
"""Routes that are answered with an error that says so, and why."""

ONLY_HERE = {
    "GET /v1/models/{model}": "One model.",
    "POST /v1/pooling": "`/pooling`, as OpenAI's SDKs build it; so are `/v1/classify`, `/v1/tokenize` and `/v1/detokenize`.",
    "POST /v1/files": "[Files and batches](batches.md).",
    "POST /v1/runs": "[Runs of applications](applications.md).",
}


class Field(NamedTuple):
    """A field that is not read as vLLM alone reads it. *check* shows that, given the gateway's payload or its error."""

    name: str
    kinds: tuple[Kind, ...]
    otherwise: str
    check: Callable[[Any], bool]


def refused(outcome: Any) -> bool:
    return getattr(outcome, "code", "") == "unsupported_parameter"


def changed(outcome: Any) -> bool:
    return isinstance(outcome, dict) and outcome["priority"] == 7777  # ours


PRIORITIZED = tuple(
    kind
    for kind in Kind
    if kind.computes and f"POST {kind.path}" in SURFACE and "priority" in SURFACE[f"POST {kind.path}"]
)
FIELDS = (
    Field(
        "priority",
        PRIORITIZED,
        "Steps back within your SLO class; vLLM gets the class's priority, and this in it.",
        changed,
    ),
    Field(
        "background", (Kind.RESPONSE,), "Refused: it would run behind its answer, where no limit counts it.", refused
    ),
    Field(
        "previous_response_id",
        (Kind.RESPONSE,),
        "Refused: there are several instances. Send the conversation whole.",
        refused,
    ),
    Field(
        "service_tier",
        (Kind.RESPONSE,),
        "Chooses the SLO class, by its tier or its name; vLLM gets a tier that it knows.",
        lambda outcome: outcome["service_tier"] in ("auto", "priority"),
    ),
    Field(
        "request_id",
        (Kind.RESPONSE,),
        "Not passed on: it would be the response's id, which may be that of another tenant's.",
        lambda outcome: "request_id" not in outcome,
    ),
)


class Behaviour(NamedTuple):
    """A difference that is of no single field. *tests* are the names of tests that show what happens here."""

    vllm: str
    here: str
    why: str
    tests: tuple[str, ...]


BEHAVIOURS = (
    Behaviour(
        "Keys are optional, one for all",
        "Each call but `/health`, `/ping` and `/version` needs a tenant's key, as `Authorization` or `x-api-key`",
        "Tenants",
        ("test_a_wrong_request_is_refused_in_openai_shape", "test_health_and_version_without_a_key"),
    ),
    Behaviour(
        "A call without `model` gets the only one",
        "400, `missing_required_parameter`",
        "There are several",
        ("test_a_wrong_body_is_refused_and_its_field_is_named",),
    ),
    Behaviour(
        "All are accepted, up to `--max-num-queued-reqs`",
        "Held in a queue by class; 429 beyond a tenant's limits, budgets or a full queue, with the wait",
        "Order and limits are ours",
        ("test_never_more_run_than_the_limit", "test_a_tenant_over_its_limit_is_refused_and_written_down"),
    ),
    Behaviour(
        "A dead engine ends its streams",
        "Continued on another instance if nothing differs, else an error event of the API's type",
        "Instances come and go",
        (
            "test_streams_of_an_instance_that_dies_continue_elsewhere",
            "test_an_sdk_sees_an_error_of_a_stream_of_responses",
        ),
    ),
    Behaviour(
        "A request that kills the engine kills the next one too",
        "422 `request_ends_engines` after two",
        "Others lose nothing",
        ("test_one_call_of_an_sdk_ends_two_or_three_engines",),
    ),
    Behaviour(
        "Silence before the first token, unless `--sse-keep-alive-interval` is set",
        "A comment line at least every 10 s",
        "Proxies cut silent streams",
        ("test_a_stream_whose_first_token_is_late_is_never_silent",),
    ),
    Behaviour(
        "No limit on the time to a first token",
        "504 `first_token_late` after many times what the prompt takes",
        "A hung request holds a slot",
        ("test_a_first_token_may_take_as_long_as_its_prompt_takes_many_times_over",),
    ),
    Behaviour(
        "Half of a surrogate pair stays one",
        "It becomes U+FFFD",
        "It is no valid text",
        ("test_half_a_character_is_passed_on_as_one_that_cannot_be_shown",),
    ),
    Behaviour(
        "NaN and infinities are numbers of JSON",
        "400 `invalid_json`",
        "No standard has them",
        ("test_a_wrong_body_is_refused_and_its_field_is_named",),
    ),
    Behaviour(
        "JSON may be as deep as Python's stack",
        "512 levels",
        "Bounded memory",
        ("test_schemas_of_tools_may_be_deep",),
    ),
    Behaviour(
        "Bodies of any size",
        "4 MiB (by default) without media and 32 MiB with them, 413 beyond",
        "Bounded memory",
        ("test_images_have_a_separate_limit",),
    ),
    Behaviour(
        "400 for more tokens than the context has",
        "The same, with `context_length_exceeded` as its `code`",
        "OpenAI's clients know it by that",
        ("test_more_tokens_than_the_context_has_are_refused_by_a_code_that_clients_know",),
    ),
    Behaviour(
        "Errors with `code` a number",
        "Our own have a word; vLLM's keep their number. `x-should-retry` says whether a retry makes sense",
        "SDKs obey it",
        ("test_a_refusal_is_in_openai_s_shape",),
    ),
    Behaviour(
        "`X-Request-Id` of any form",
        "One to 80 letters, digits or `. _ : -`; any other is replaced",
        "It is in logs and headers",
        ("test_an_id_that_is_none_is_replaced",),
    ),
    Behaviour(
        "Render calls answer 403 without `--enable-scale-out`",
        "404 `unsupported_endpoint`, with vLLM's words",
        "Not every instance has them",
        ("test_an_instance_that_renders_nothing_says_so",),
    ),
    Behaviour(
        "A busy server answers 429 or 503",
        "Another instance is tried; passed on with `Retry-After` if all are busy",
        "One may have room",
        ("test_a_busy_one_is_left_for_another_and_passed_on_when_all_are",),
    ),
    Behaviour(
        "A query such as `?beta=true` of Anthropic's SDK is ignored",
        "Accepted, and not passed on",
        "No call of these routes with a body reads one",
        ("test_claude_codes_own_fields_and_query_are_taken",),
    ),
    Behaviour(
        "Any page may call, by `--allowed-origins`",
        "Those of `PILOTHOUSE_CORS_ORIGINS`; none by default",
        "Keys are secrets",
        ("test_other_origins_are_off_by_default", "test_an_origin_that_is_named_may_call"),
    ),
)


def calls() -> list[tuple[str, Kind]]:
    """Return the routes that are calls to instances, with their kinds."""
    return [
        (route, PATH_KINDS[route.removeprefix("POST ")])
        for route in SURFACE
        if route.removeprefix("POST ") in PATH_KINDS
    ]


def differing(kind: Kind) -> dict[str, Field]:
    return {field.name: field for field in FIELDS if kind in field.kinds}


def _paths(field: Field) -> str:
    """Return the paths of the calls that have *field*; vLLM reads it as it is in others."""
    paths = dict.fromkeys(kind.path for route, kind in calls() if kind in field.kinds and field.name in SURFACE[route])
    return ", ".join(f"`{path}`" for path in paths)


def page() -> str:
    lines = [
        "# As vLLM, or otherwise",
        "",
        "What vLLM serves passes through Pilothouse with the same answer, except for what is listed here.",
        "`python -m tests.docs.as_vllm` writes this page from the routes and fields of vLLM 0.32, and tests check it.",
        "",
        "## Routes",
        "",
        "| route | |",
        "|---|---|",
    ]
    asked = {route for route, _ in calls()}
    lines.append(f"| {', '.join(f'`{route}`' for route in SURFACE if route in asked)} | as vLLM |")
    lines += [f"| `{route}` | {words} |" for route, words in SERVED.items()]
    lines += [f"| `{route}` | not in vLLM. {words} |" for route, words in ONLY_HERE.items()]
    groups: dict[str, list[str]] = {}
    for route, words in NOT_SERVED.items():
        groups.setdefault(words, []).append(f"`{route}`")
    lines += [f"| {', '.join(routes)} | not served. {words} |" for words, routes in groups.items()]
    lines += [
        "",
        "## Fields",
        "",
        "All other fields pass unchanged, also those that vLLM does not know.",
        "",
        "| field | of | otherwise |",
        "|---|---|---|",
    ]
    lines += [f"| `{field.name}` | {_paths(field)} | {field.otherwise} |" for field in FIELDS]
    lines += ["", "## Behaviour", "", "| vLLM alone | here | why |", "|---|---|---|"]
    lines += [f"| {one.vllm} | {one.here} | {one.why} |" for one in BEHAVIOURS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
