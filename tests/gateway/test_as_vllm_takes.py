"""The gateway accepts everything that vLLM does: fields as its models read them, JSON as its parser does, images."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.admission.validation import MAX_COUNTED, Call, Kind, with_prompt
from controlplane.gateway.errors import ApiError
from controlplane.gateway.serving.prefixes import leading_hashes
from controlplane.gateway.upstream.bodies import payload
from controlplane.gateway.upstream.continuation import evictable
from forecasting.lengths import LengthQuery
from tests.vllm.acceptance import RECORDED, cases

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_every_field_that_vllm_takes_is_taken():
    """C69."""
    recorded = json.loads(RECORDED.read_text())
    assert [[kind, body] for kind, body, _ in recorded] == [list(case) for case in json.loads(json.dumps(cases()))]
    refused = []
    for kind, body, taken in recorded:
        try:
            call = Call.read(json.dumps(body).encode(), Kind(kind), max_depth=32)
            assert json.loads(b"".join(payload(call, 3)))["priority"] == 3
        except ApiError as error:
            if taken:
                refused.append((kind, body, error.message))
    assert refused == []
    assert 200 < sum(taken for *_, taken in recorded) < len(recorded) - 100


def test_numbers_as_text_are_counted_as_numbers():
    """C69."""
    body = CHAT | {
        "max_tokens": "100",
        "min_tokens": 3.0,
        "n": "2",
        "stream": "true",
        "ignore_eos": "yes",
        "priority": "7",
    }
    call = Call.read(json.dumps(body).encode(), Kind.CHAT, max_depth=32)
    assert (call.max_tokens, call.min_tokens, call.sequences, call.stream, call.ignore_eos) == (100, 3, 2, True, True)
    assert call.priority == 7
    ids = Call.read(b'{"model":"m","prompt":[1.0,"2",3]}', Kind.COMPLETION, max_depth=32)
    assert ids.prompt_tokens == 3
    scored = Call.read(b'{"model":"m","prompt":"x","echo":"true","max_tokens":0}', Kind.COMPLETION, max_depth=32)
    assert scored.max_tokens == 1
    assert json.loads(b"".join(payload(scored, 0)))["max_tokens"] == 0


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\ude00 cut", "\ufffd cut"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ude00\ud83dx", "\ufffd\ufffdx"),
        (rb"whole \ud83d\ude00", "whole \U0001f600"),
        (b"raw \xed\xa0\xbd half", "raw \ufffd half"),
        (rb"key", "key"),
    ],
)
@pytest.mark.parametrize("more", [b"", b',"priority":1', b',"x\\udfff":1'])
def test_half_a_character_is_passed_on_as_one_that_cannot_be_shown(said, passed, more):
    """C03."""
    raw = b'{"model":"m","messages":[{"role":"user","content":"' + said + b'"}]' + more + b"}"
    call = Call.read(raw, Kind.CHAT, max_depth=32)
    sent = json.loads(b"".join(payload(call, 0)))
    assert sent["messages"][0]["content"] == call.turns[0][1] == passed


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_any_encoding_of_unicode(encoding):
    """E5."""
    raw = json.dumps(
        CHAT | {"messages": [{"role": "user", "content": "gr\u00fc\u00df \U0001f600"}]}, ensure_ascii=False
    )
    call = Call.read(raw.encode(encoding), Kind.CHAT, max_depth=32)
    assert json.loads(b"".join(payload(call, 0)))["messages"] == call.body["messages"]
    assert call.turns == [("user", "gr\u00fc\u00df \U0001f600")]


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9)
    | st.sampled_from(["1", "0.5", "true", "-1", "NaN", " 7 ", "\ud83d", "auto", "m"])
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=9,
)
PARTS = st.fixed_dictionaries({"type": SCALARS, "text": SCALARS}, optional={"image_url": ANYTHING})
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": SCALARS, "content": SCALARS | st.lists(PARTS | ANYTHING, max_size=3)}), max_size=3
)
REFUSALS = {
    "invalid_json", "json_too_deep", "missing_required_parameter", "unsupported_parameter", "invalid_type",
}  # fmt: skip
READ = (
    "stream", "n", "min_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p",
    "priority", "stop", "ignore_eos", "echo", "tools", "instructions", "service_tier", "stream_options", "prompt_embeds",
)  # fmt: skip

SCORED = ("query", "queries", "documents", "items", "text_1", "text_2", "tokens", "data")


@given(
    kind=st.sampled_from(list(Kind)),
    said=st.fixed_dictionaries({"messages": MESSAGES | ANYTHING, "input": MESSAGES | ANYTHING, "prompt": ANYTHING}),
    fields=st.dictionaries(st.sampled_from(READ), ANYTHING, max_size=5),
    sides=st.dictionaries(st.sampled_from(SCORED), ANYTHING, max_size=3),
    cut=st.integers(0, 5),
)
def test_any_body_is_read_or_refused_in_words(kind, said, fields, sides, cut):
    """Any body gives a 400 of ours, or a body that an instance can be sent and whose prompt can be read."""
    raw = json.dumps({"model": "m"} | said | fields | sides).encode("utf-8", "surrogatepass")
    try:
        call = Call.read(raw[: len(raw) - cut], kind, max_depth=32, most_bytes=10_000)
    except ApiError as refused:
        refusal = json.loads(refused.body())["error"]
    else:
        refusal = None
    if refusal is not None:
        assert refusal["code"] in REFUSALS
        return
    sent = json.loads(b"".join(payload(call, 3, {"return_token_ids": True})))
    assert (sent.get("priority"), sent["model"]) == (3 if kind.computes else call.body.get("priority"), "m")
    assert 0 <= call.min_tokens <= MAX_COUNTED
    assert call.sequences >= 1
    with_prompt(call, LengthQuery("", 1))
    leading_hashes(call, 100)
    evictable(call)


def nested(levels: int, with_lists: bool) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        inner = {"anyOf": [schema, {"type": "null"}]} if with_lists else schema
        schema = {"type": "object", "properties": {"a": inner}}
    return schema


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
async def test_schemas_of_tools_may_be_deep(served, endpoint):
    """C06."""
    for schema in (nested(12, True), nested(16, False), nested(100, True), nested(240, False)):
        function = {"name": "f", "parameters": schema}
        tool = {"type": "function", "function": function} if endpoint[0] == "c" else {"type": "function"} | function
        said = {"messages": CHAT["messages"]} if endpoint[0] == "c" else {"input": "hi"}
        body = {"model": "m", "tools": [tool], "stream": True, "priority": 3, **said}
        async with served.post(f"/v1/{endpoint}", body) as response:
            assert response.status == 200, await response.text()
            await response.read()
        assert served.backends[0].bodies[-1]["tools"] == [tool]


async def test_images_have_a_separate_limit(served):
    """C18."""

    async def status(kind: str, image_bytes: int, text: str = "what is it?") -> int:
        url = "data:image/png;base64," + "A" * (image_bytes // 6)
        image = (
            {"type": "image_url", "image_url": {"url": url}}
            if kind[0] == "c"
            else {"type": "input_image", "image_url": url}
        )
        said = [{"role": "user", "content": [{"type": "text", "text": text}, *[image] * 6]}]
        body = {"model": "m", "stream": True, "messages" if kind[0] == "c" else "input": said}
        data = io.BytesIO(json.dumps(body).encode())
        async with served.http.post(f"{served.url}/v1/{kind}", data=data, headers=served.headers) as response:
            if response.status == 413:
                error = (await response.json())["error"]
                assert (error["code"], set(error)) == ("request_too_large", {"message", "type", "param", "code"})
            else:
                await response.read()
            return response.status

    for kind in ("chat/completions", "responses"):
        assert await status(kind, 9_000_000) == 200
        assert await status(kind, 600_000, text="x" * 5_000_000) == 413
    assert await status("chat/completions", 60_000_000) == 413
    assert len(served.backends[0].bodies) == 2


async def test_what_an_unknown_tier_of_openai_means(served):
    assert (await served.chat(service_tier="scale")).status == 200
    assert (await served.rows())[-1].slo_class == "interactive"


async def test_a_trace_continues_at_the_instance(served):
    """E5."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await served.chat(headers={"traceparent": parent, "tracestate": "vendor=1"})
    await served.chat(headers={"traceparent": "00-none", "tracestate": "vendor=1"})
    first, second = served.backends[0].headers
    assert (first["traceparent"], first["tracestate"]) == (parent, "vendor=1")
    assert "traceparent" not in second
    assert "tracestate" not in second
