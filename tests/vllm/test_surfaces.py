"""Calls besides chats through the gateway, on a real vLLM that renders prompts."""

from typing import Any

import openai
import pytest

from tests.gateway.conftest import open_sdk
from tests.vllm.conftest import MODEL, VllmFleet
from tests.vllm.conftest import TOOLS as TOOL_FLAGS
from tests.vllm.gateway import gateway_before

pytestmark = pytest.mark.vllm

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def rendering(vllm_fleet: VllmFleet) -> str:
    """A server that renders prompts."""
    url = vllm_fleet.start("rendering", extra_args=("--enable-scale-out", *TOOL_FLAGS))
    vllm_fleet.wait("rendering", url)
    return url


@pytest.mark.django_db(transaction=True)
async def test_renders_and_batches(rendering: str) -> None:
    async with gateway_before({"rendering": rendering}, 4) as served, open_sdk(served, max_retries=0) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=4)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)

        async def both(path: str, body: dict[str, Any]) -> list[Any]:
            said = []
            for url in (served.url, rendering):
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
