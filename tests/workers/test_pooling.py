"""Pooling and tokenizing of emulated servers. Statuses, shapes and texts were taken from vLLM 0.32 on CPU, with MiniLM."""

import base64
from typing import Any

import numpy as np
import pytest

from scheduling.model_task import Task
from tests.workers.conftest import Emulator
from workers.vllm.metrics import NO_CACHE, parse
from workers.vllm.serve import arguments
from workers.vllm.spec import LaunchSpec
from workers.vllm.tasks import INPUT_TOKENS, PATHS, SPEECH, TOKENIZER, task_of

USAGE = {"completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
NOT_FOUND = (404, {"detail": "Not Found"})


async def answer(emulator: Emulator, path: str, **body: Any) -> tuple[int, Any]:
    return await emulator.call("POST", f"/one{path}", body)


def refusal(message: str, param: str | None = None, kind: str = "BadRequestError", code: int = 400) -> tuple[int, Any]:
    return code, {"error": {"message": message, "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize("task", list(Task))
async def test_a_server_answers_the_paths_of_its_task_alone(emulator: Emulator, task: Task) -> None:
    await emulator.ready(task=task)
    every = {path for paths in PATHS.values() for path in paths} - {INPUT_TOKENS}  # which is ours
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
    assert list(said) == ["id", "object", "created", "model", "data", "usage"]
    assert said["id"].startswith("embd-")
    assert (said["object"], said["model"]) == ("list", "m")
    assert [(one["index"], one["object"], len(one["embedding"])) for one in said["data"]] == [
        (at, "embedding", 16) for at in range(3)
    ]
    tokens = 2 + 2 + 2  # four characters a token
    assert said["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} | USAGE
    first, second, third = (np.array(one["embedding"]) for one in said["data"])
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert first @ second == pytest.approx(1.0, abs=1e-5)
    assert abs(first @ third) < 0.9
    _, encoded = await answer(
        emulator, "/v1/embeddings", input="one two", encoding_format="base64", embed_dtype="float16"
    )
    half = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f2")
    assert np.allclose(half, first, atol=1e-3)
    _, ids = await answer(emulator, "/v1/embeddings", input=[[1, 2, 3], [4]])
    assert ids["usage"]["prompt_tokens"] == 4
    _, empty = await answer(emulator, "/v1/embeddings", input="")
    assert len(empty["data"]) == 1
    metrics = await emulator.metrics()
    assert (metrics.generation_tokens_total, metrics.prompt_tokens_total) == (0, 6 + 2 + 4)
    assert metrics.success_total["stop"] == 3 + 1 + 2 + 1


async def test_ranking_and_scoring(emulator: Emulator) -> None:
    await emulator.ready(task="embed")
    documents = ["the sun", "a cat is an animal", "a dog"]
    status, said = await answer(emulator, "/rerank", query="a cat", documents=documents)
    assert (status, list(said)) == (200, ["id", "model", "usage", "results"])
    assert said["id"].startswith("score-")
    assert said["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert said["results"][0]["index"] == 1
    assert said["results"][0]["document"] == {"text": documents[1], "multi_modal": None}
    _, best = await answer(emulator, "/v2/rerank", query="a cat", documents=documents, top_n=1)
    assert [one["index"] for one in best["results"]] == [1]
    _, scored = await answer(emulator, "/v1/score", text_1="a cat", text_2=["a cat", "the sun"])
    assert scored["data"][0] == {"index": 0, "object": "score", "score": pytest.approx(1.0, abs=1e-5)}
    assert scored["usage"] == {"prompt_tokens": 6, "total_tokens": 6} | USAGE


async def test_a_cross_encoder_reads_pairs(emulator: Emulator) -> None:
    await emulator.ready(task="score")
    _, said = await answer(emulator, "/score", queries="abcd", documents=["abc", "efg"])
    assert said["usage"]["prompt_tokens"] == 4  # "abcd\nabc" is two tokens
    assert all(0 < one["score"] < 1 for one in said["data"])
    _, classified = await answer(emulator, "/classify", input="abcd")
    assert classified["data"][0]["num_classes"] == 1


async def test_classes_and_tokens(emulator: Emulator) -> None:
    await emulator.ready(task="classify", num_labels=3)
    _, said = await answer(emulator, "/classify", input=["a", "b"])
    assert said["id"].startswith("classify-")
    (first, _) = said["data"]
    assert list(first) == ["index", "label", "probs", "num_classes"]
    assert first["label"] == f"LABEL_{int(np.argmax(first['probs']))}"
    assert sum(first["probs"]) == pytest.approx(1.0, abs=1e-5)
    _, tokens = await answer(emulator, "/tokenize", prompt="hello world", return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == 3
    assert (tokens["max_model_len"], tokens["token_strs"]) == (1024, ["hell", "o wo", "rld"])
    assert list((await answer(emulator, "/detokenize", tokens=[1, 2]))[1]) == ["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/embeddings", {"input": []}, refusal("You must pass at least one prompt")),
        (
            "/v1/embeddings",
            {"input": "a", "model": "nix"},
            refusal("The model `nix` does not exist.", None, "NotFoundError", 404),
        ),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 64},
            refusal(
                "Model 'm' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=64)."
            ),
        ),
        (
            "/v1/embeddings",
            {"input": [5] * 2000},
            refusal(
                "This model's maximum context length is 1024 tokens. However, your prompt contains 2000 input tokens, which "
                "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
                "(parameter=input_tokens, value=2000)",
                "input_tokens",
            ),
        ),
        ("/rerank", {"query": "q", "documents": []}, refusal("At least one text_pair element must be given")),
        (
            "/score",
            {"queries": ["a", "b"], "documents": ["a", "b", "c"]},
            refusal("Input lengths must be either 1:1, 1:N or N:N"),
        ),
        (
            "/pooling",
            {"input": "a", "task": "token_embed"},
            refusal(
                "Try switching the model's pooling_task via --pooler-config.task token_embed. (parameter=task)", "task"
            ),
        ),
        (
            "/pooling",
            {"input": "a", "task": "classify"},
            refusal("Unsupported task: 'classify' Supported tasks: ['embed', 'token_embed'] (parameter=task)", "task"),
        ),
        (
            "/tokenize",
            {"prompt": "a", "model": "nix"},
            refusal("The model `nix` does not exist. Valid aliases: m.", "model", "NotFoundError", 404),
        ),
        ("/v1/chat/completions", {"messages": []}, NOT_FOUND),
        ("/v1/pooling", {"input": "a"}, NOT_FOUND),
    ],
)
async def test_refusals_in_vllms_words(emulator: Emulator, path: str, body: dict[str, Any], expected: Any) -> None:
    await emulator.ready(task="embed")
    assert await answer(emulator, path, **body) == expected


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
