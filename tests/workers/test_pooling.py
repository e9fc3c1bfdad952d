"""Pooling and tokenizing of emulated servers, and what a server of each task answers."""

import base64
from typing import Any

import numpy as np
import pytest

from scheduling.model_task import Task
from tests.workers.conftest import Emulator
from workers.vllm.metrics import NO_CACHE, parse
from workers.vllm.serve import arguments
from workers.vllm.spec import LaunchSpec
from workers.vllm.tasks import PATHS, SPEECH, TOKENIZER, task_of


async def answer(emulator: Emulator, path: str, **body: Any) -> tuple[int, Any]:
    return await emulator.call("POST", f"/one{path}", body)


@pytest.mark.parametrize("task", list(Task))
async def test_a_server_answers_the_paths_of_its_task_alone(emulator: Emulator, task: Task) -> None:
    await emulator.ready(task=task)
    every = {path for paths in PATHS.values() for path in paths}
    for path in sorted(every):
        status, _ = await answer(emulator, path)
        assert (status == 404) == (path not in PATHS[task]), path
    _, document = await emulator.call("GET", "/one/openapi.json")
    assert task_of(document["paths"].keys()) is task


def test_the_task_of_the_real_server_is_read_from_its_paths() -> None:
    minilm = {"/pooling", "/rerank", "/score", "/tokenize", "/detokenize", "/v1/embeddings", "/v2/embed", "/v1/models"}
    assert task_of(minilm) is Task.EMBED
    assert task_of({*SPEECH, *TOKENIZER, "/v1/models"}) is Task.TRANSCRIPTION
    assert task_of({*PATHS[Task.GENERATE], *SPEECH}) is Task.GENERATE
    assert task_of({"/v1/models", "/health"}) is None


async def test_embeddings(emulator: Emulator) -> None:
    await emulator.ready(task="embed", embedding_dimensions=16)
    status, said = await answer(emulator, "/v1/embeddings", model="m", input=["one two", "two one", "three"])
    assert status == 200
    assert [(one["index"], len(one["embedding"])) for one in said["data"]] == [(at, 16) for at in range(3)]
    assert said["usage"]["prompt_tokens"] == said["usage"]["total_tokens"] == 6  # four characters a token
    first, second, third = (np.array(one["embedding"]) for one in said["data"])
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert first @ second == pytest.approx(1.0, abs=1e-5)
    assert abs(first @ third) < 0.9
    _, encoded = await answer(emulator, "/v1/embeddings", input="one two", encoding_format="base64")
    assert np.allclose(np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4"), first, atol=1e-6)
    _, ids = await answer(emulator, "/v1/embeddings", input=[[1, 2, 3], [4]])
    assert ids["usage"]["prompt_tokens"] == 4
    metrics = await emulator.metrics()
    assert (metrics.generation_tokens_total, metrics.prompt_tokens_total) == (0, 6 + 2 + 4)


async def test_ranking_and_scoring(emulator: Emulator) -> None:
    await emulator.ready(task="embed")
    documents = ["the sun", "a cat is an animal", "a dog"]
    _, best = await answer(emulator, "/v2/rerank", query="a cat", documents=documents, top_n=1)
    assert [(one["index"], one["document"]["text"]) for one in best["results"]] == [(1, documents[1])]
    _, scored = await answer(emulator, "/v1/score", text_1="a cat", text_2=["a cat", "the sun"])
    assert scored["data"][0] == {"index": 0, "object": "score", "score": pytest.approx(1.0, abs=1e-5)}


async def test_classes(emulator: Emulator) -> None:
    await emulator.ready(task="classify", num_labels=3)
    _, said = await answer(emulator, "/classify", input=["a", "b"])
    (first, _) = said["data"]
    assert first["label"] == f"LABEL_{int(np.argmax(first['probs']))}"
    assert sum(first["probs"]) == pytest.approx(1.0, abs=1e-5)


async def test_tokens(emulator: Emulator) -> None:
    await emulator.ready()
    _, tokens = await answer(emulator, "/tokenize", prompt="hello world")
    assert (tokens["count"], len(tokens["tokens"]), tokens["max_model_len"]) == (3, 3, 1024)
    assert list((await answer(emulator, "/detokenize", tokens=[1, 2]))[1]) == ["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"input": []}, 400),
        ("/v1/embeddings", {"input": "a", "model": "nix"}, 404),
        ("/v1/embeddings", {"input": [5] * 2000}, 400),
        ("/rerank", {"query": "q", "documents": []}, 400),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, 400),
        ("/v1/chat/completions", {"messages": []}, 404),
    ],
)
async def test_refusals(emulator: Emulator, path: str, body: dict[str, Any], status: int) -> None:
    await emulator.ready(task="embed")
    assert (await answer(emulator, path, **body))[0] == status


async def test_a_prompt_is_cut_where_the_caller_asks(emulator: Emulator) -> None:
    await emulator.ready(task="embed")
    _, said = await answer(emulator, "/v1/embeddings", input=[5] * 2000, truncate_prompt_tokens=-1)
    assert said["usage"]["prompt_tokens"] == 1024


def test_a_pooling_server_is_started_as_one() -> None:
    spec = LaunchSpec(name="e", model="e", source="/e", task=Task.EMBED)
    flags = arguments("/no/python", spec, 8000)
    assert flags[flags.index("--runner") + 1] == "pooling"
    own = LaunchSpec(name="e", model="e", source="/e", task=Task.EMBED, extra_args=("--runner", "auto"))
    assert arguments("/no/python", own, 8000).count("--runner") == 1
    assert "--runner" not in arguments("/no/python", LaunchSpec(name="m", model="m", source="/m"), 8000)


def test_an_encoder_has_no_kv_cache_whatever_its_blocks_say() -> None:
    line = 'vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="%s",num_gpu_blocks="1"} 1.0\n'
    assert parse(line % NO_CACHE).kv_cache_size_tokens == 0
    assert parse(line % "0").kv_cache_size_tokens == 128
    assert parse(line % "512").kv_cache_size_tokens == 512
