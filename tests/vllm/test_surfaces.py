"""Calls besides chats through the gateway, on a real vLLM that renders prompts and stores responses."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.gateway.conftest import open_sdk
from tests.gateway.test_responses import TOOLS
from tests.vllm.conftest import CONTRACT, MODEL, Server, VllmFleet
from tests.vllm.conftest import TOOLS as TOOL_FLAGS
from tests.vllm.gateway import gateway_before

pytestmark = pytest.mark.vllm

HELLO = [{"role": "user", "content": "hello"}]
CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'}
ASKED: list[dict[str, Any]] = [
    {"input": "Is it windy?"},
    {"input": HELLO, "instructions": "Be brief."},
    {"input": HELLO, "tools": TOOLS},
    {"input": [*HELLO, CALLED, {"type": "function_call_output", "call_id": "c", "output": "9 m/s"}], "tools": TOOLS},
]


@pytest.fixture(scope="module")
def storing(vllm_fleet: VllmFleet, monkeypatch_module: pytest.MonkeyPatch) -> str:
    """A server that renders prompts and stores responses."""
    monkeypatch_module.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    url = vllm_fleet.start("storing", extra_args=("--enable-scale-out", *TOOL_FLAGS))
    vllm_fleet.wait("storing", url)
    return url


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.django_db(transaction=True)
async def test_tokens_renders_batches_and_stored_responses(storing: str) -> None:
    async with gateway_before({"storing": storing}, 4) as served, open_sdk(served, max_retries=0) as client:
        for asked in ASKED:
            counted = await client.responses.input_tokens.count(model=MODEL, **asked)
            made = await client.responses.create(model=MODEL, max_output_tokens=4, **asked)
            assert counted.input_tokens == made.usage.input_tokens, asked
        again = await client.responses.retrieve(made.id)
        assert again.to_dict() == made.to_dict()
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            await client.responses.cancel(made.id)
        with pytest.raises(openai.NotFoundError, match="does not serve DELETE"):
            await client.responses.delete(made.id)

        async def both(path: str, body: dict[str, Any]) -> list[Any]:
            said = []
            for url in (served.url, storing):
                async with served.http.post(
                    f"{url}{path}", json={"model": MODEL, **body}, headers=served.headers
                ) as answer:
                    assert answer.status == 200, (path, await answer.text())
                    said.append(await answer.json())
            return said

        for path, body in (
            ("/v1/chat/completions/render", {"messages": HELLO}),
            ("/v1/responses/render", {"input": "hello"}),
            ("/v1/messages/render", {"messages": HELLO, "max_tokens": 3}),
        ):
            through, direct = await both(path, body)
            assert through["token_ids"] == direct["token_ids"], path
            assert through.keys() == direct.keys()
        through, direct = await both("/v1/completions/render", {"prompt": ["a b", "c"]})
        assert [one["token_ids"] for one in through] == [one["token_ids"] for one in direct]
        body = {"messages": [HELLO, HELLO], "max_tokens": 4, "temperature": 0.0}
        through, direct = await both("/v1/chat/completions/batch", body)
        assert through["choices"] == direct["choices"]
        assert through["usage"] == direct["usage"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100_000)
        assert refused.value.code == "context_length_exceeded"
        rows = [row for row in await served.rows() if row.surface == "chat/completions/batch"]
        assert [row.output_tokens for row in rows] == [through["usage"]["completion_tokens"]]


@pytest.mark.django_db(transaction=True)
async def test_a_conversation_continues_its_last_response(storing: str, vllm_server: Server) -> None:
    """Of two servers one stores responses; what it says next is what it says when it is asked itself."""
    servers = {"storing": storing, CONTRACT: vllm_server.url}
    async with gateway_before(servers, 4) as served, open_sdk(served, max_retries=0) as client:
        given = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}
        asked = (client.responses.create(input=f"Is it windy in {at}?", **given) for at in range(8))
        made = await asyncio.gather(*asked)
        where = {row.instance for row in await served.rows()}
        assert where == servers.keys()
        continued = 0
        for each in made:
            again = {"input": "And tomorrow?", "previous_response_id": each.id, **given}
            async with served.http.post(f"{storing}/v1/responses", json=again) as answer:
                status, direct = answer.status, await answer.json()
            if status == 404:
                with pytest.raises(openai.NotFoundError) as missing:
                    await client.responses.create(**again)
                assert missing.value.code == "previous_response_not_found"
                continue
            for stream in (False, True):
                through = await client.responses.create(**again, stream=stream)
                if stream:
                    (through,) = [event.response async for event in through if event.type == "response.completed"]
                assert through.output_text == direct["output"][0]["content"][0]["text"]
                assert through.usage.input_tokens == direct["usage"]["input_tokens"] > each.usage.total_tokens
                assert (await served.rows())[-1].instance == "storing"
            continued += 1
        assert 0 < continued < len(made)
