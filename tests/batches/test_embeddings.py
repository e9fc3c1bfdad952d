"""A batch of embeddings through a gateway with a model that embeds and one that generates."""

import json

from tests.batches.test_api import ended, here, upload  # noqa: F401 (a fixture)
from tests.gateway.conftest import open_sdk
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)

URL = "/v1/embeddings"


def lines(*models: str) -> bytes:
    given = (
        {"custom_id": f"{at}", "method": "POST", "url": URL, "body": {"model": model, "input": ["one", "two"]}}
        for at, model in enumerate(models)
    )
    return "".join(json.dumps(line) + "\n" for line in given).encode()


async def test_each_line_gets_its_vectors_and_prompts_are_counted(emulated):  # noqa: F811
    async with open_sdk(emulated, max_retries=0) as client:
        file = await upload(client, lines("e", "e", "e"))
        batch = await ended(
            client, await client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        )
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        answers = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert [len(answer["response"]["body"]["data"]) for answer in answers] == [2, 2, 2]
    assert all(len(one["embedding"]) == 32 for answer in answers for one in answer["response"]["body"]["data"])
    rows = await emulated.rows()
    assert [(row.surface, row.outcome, row.prompt_tokens, row.output_tokens) for row in rows] == [
        ("embeddings", "done", 2, 0)
    ] * 3


async def test_a_line_for_a_model_that_generates_is_in_the_error_file(emulated):  # noqa: F811
    async with open_sdk(emulated, max_retries=0) as client:
        file = await upload(client, lines("e", "m"))
        batch = await ended(
            client, await client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        )
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert (error.code, error.line, error.param) == ("unsupported_endpoint", 2, "body.model")
        assert "The model 'm' does not serve /v1/embeddings. It serves /v1/chat/completions" in error.message
        said = (await client.files.content(batch.error_file_id)).text
    assert json.loads(said)["error"]["line"] == 2
