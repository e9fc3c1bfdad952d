"""Pooling and tokenizing of an emulated server: vectors, scores and classes that depend on the text alone.

A text's vector is the sum of one random direction for each of its words, so texts that share words are similar, on every
server of the model alike. The engine computes each input as a prompt with a single token of output: it ends with its
prefill. Shapes, usage and the texts of errors are those of vLLM 0.32.
"""

import base64
import math
import uuid
import zlib
from collections.abc import Sequence as Inputs
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field

from scheduling.model_task import Task
from workers.emulator import text
from workers.emulator.answers import RequestAnswer, Sequence
from workers.emulator.bodies import INT64, NATURAL, ApiError, ContentPart, Message, PlainBody, entry, malformed, wrong
from workers.emulator.generation import Prompt, check_length, conversation
from workers.emulator.spec import InstanceSpec

Vector = NDArray[np.float32]
Path = str
"""Of `workers.vllm.tasks.PATHS`."""
MOST_WORDS = 512
"""Words of a text that its vector depends on."""
FORMATS = Literal["float", "base64", "bytes", "bytes_only"]
DTYPES = {"float32": "f4", "float16": "f2"}
ORDERS = {"native": "=", "big": ">", "little": "<"}
BYTES_TYPE = "application/octet-stream"
IDS = {
    "/v1/embeddings": "embd",
    "/v2/embed": "embd",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/rerank": "score",
}


class CohereInput(PlainBody):
    content: list[ContentPart]


class PoolingBody(PlainBody):
    """Fields of all pooling calls; those of one call are not read in others."""

    model: str | None = None
    priority: INT64 = 0
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    encoding_format: FORMATS = "float"
    embed_dtype: str = "float32"
    endianness: Literal["native", "big", "little"] = "native"
    dimensions: int | None = None
    task: str | None = None
    input: list[NATURAL] | list[list[NATURAL]] | str | list[str] | list[Message] | list[list[Message]] | None = None
    messages: list[Message] | list[list[Message]] | None = None
    # Cohere's
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[CohereInput] | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    # Of two sides that are scored
    query: str | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    top_n: NATURAL = 0


class TokenizeBody(PlainBody):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(PlainBody):
    model: str | None = None
    tokens: list[NATURAL]


@dataclass(frozen=True, slots=True)
class Pooling:
    """A checked request: a sequence for each of *prompts*. *ones* and *others* are the texts that are scored."""

    body: PoolingBody
    path: Path
    prompts: tuple[Prompt, ...]
    ones: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    n: int = 1

    @property
    def max_tokens(self) -> tuple[int, ...]:
        return (1,) * len(self.prompts)


def resolve(body: PoolingBody, path: Path, spec: InstanceSpec) -> Pooling:
    """Check values as vLLM does. Raises ApiError."""
    if path in ("/score", "/rerank"):
        return _scored(body, path, spec)
    if path == "/v2/embed":
        return _cohere(body, path, spec)
    if path == "/pooling":
        _check_task(body.task, spec)
    if body.dimensions is not None:
        raise wrong(
            "dimensions is currently not supported (parameter=dimensions)"
            if path == "/pooling"
            else f"Model '{spec.model}' does not support Matryoshka embeddings; dimensions must be unset (received "
            f"dimensions={body.dimensions})."
        )
    if body.embed_dtype not in DTYPES:
        raise ApiError(
            501, "NotImplementedError", "`embed_dtype` is not supported by the emulated server.", "embed_dtype"
        )
    given: Any = body.messages if body.messages is not None else body.input
    if given is None:
        raise malformed(
            [entry("missing", f"body.{name}", "Field required", {}) for name in ("input", "messages")], "body.input"
        )
    if isinstance(given, str):
        given = [given]
    if not given:
        raise wrong("You must pass at least one prompt")
    if isinstance(given[0], int | Message):
        given = [given]
    prompts = tuple(_bounded(_prompt(one), body, spec) for one in given)
    return Pooling(body, path, prompts)


def _cohere(body: PoolingBody, path: Path, spec: InstanceSpec) -> Pooling:
    given = [one for one in (body.texts, body.images, body.inputs) if one is not None]
    if len(given) != 1 or not given[0]:
        words = "Value error, Exactly one of texts, images, or inputs must be provided, and it must be non-empty"
        raise malformed([entry("value_error", "body", words, {})], "body")
    if body.images:
        raise ApiError(501, "NotImplementedError", "`images` are not supported by the emulated server.", "images")
    mixed = (" ".join(part.text or "" for part in one.content) for one in body.inputs or ())
    return Pooling(body, path, tuple(_bounded(Prompt(one), body, spec) for one in body.texts or mixed))


def _check_task(task: str | None, spec: InstanceSpec) -> None:
    own = pooling_task(spec)
    supported = {"embed": ["embed", "token_embed"], "classify": ["classify", "token_classify"]}.get(own, [own])
    if task is None or task == own:
        return
    if task in supported:
        raise wrong(
            f"Try switching the model's pooling_task via --pooler-config.task {task}. (parameter=task)",
            "task",
            repeat=False,
        )
    raise wrong(f"Unsupported task: '{task}' Supported tasks: {supported} (parameter=task)", "task", repeat=False)


def pooling_task(spec: InstanceSpec) -> str:
    """Return vLLM's name of the server's task, which knows no score."""
    return "classify" if spec.task == Task.SCORE else spec.task.value


def _prompt(given: Any) -> Prompt:
    if isinstance(given, str):
        return Prompt(given)
    if given and isinstance(given[0], Message):
        return conversation(given)
    return Prompt("", tuple(given))


def _bounded(prompt: Prompt, body: PoolingBody, spec: InstanceSpec) -> Prompt:
    """Return *prompt*, cut where the caller asks for that; refuse what is longer than the context."""
    most = body.truncate_prompt_tokens
    if most is not None:
        most = spec.max_model_len if most == -1 else most
        if most > spec.max_model_len:
            raise wrong(
                "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
            )
        return Prompt(prompt.text[: most * text.CHARACTERS_PER_TOKEN], prompt.ids and prompt.ids[:most])
    check_length(prompt, spec.max_model_len)
    return prompt


SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _scored(body: PoolingBody, path: Path, spec: InstanceSpec) -> Pooling:
    pairs = (("query", "documents"),) if path == "/rerank" else SIDES
    sides = next(
        (
            (getattr(body, one), getattr(body, other))
            for one, other in pairs
            if getattr(body, one) is not None and getattr(body, other) is not None
        ),
        None,
    )
    if sides is None:
        missing = [name for pair in pairs for name in pair if getattr(body, name) is None]
        raise malformed(
            [entry("missing", f"body.{name}", "Field required", {}) for name in missing], f"body.{missing[0]}"
        )
    ones, others = ([side] if isinstance(side, str) else list(side) for side in sides)
    if len(ones) > 1 and len(ones) != len(others):
        raise wrong("Input lengths must be either 1:1, 1:N or N:N")
    for side, name in ((ones, "text"), (others, "text_pair")):
        if not side:
            raise wrong(f"At least one {name} element must be given")
    if spec.task == Task.SCORE:  # a cross-encoder reads each pair at once
        first = ones * len(others) if len(ones) == 1 else ones
        texts = [f"{one}\n{other}" for one, other in zip(first, others, strict=True)]
    else:
        texts = ones + others
    prompts = tuple(_bounded(Prompt(one), body, spec) for one in texts)
    return Pooling(body, path, prompts, tuple(ones), tuple(others))


class PooledAnswer(RequestAnswer[Pooling]):
    """The answer to a pooling request, computed when the last of its inputs is."""

    def __init__(self, pooling: Pooling, request_id: str, model: str, created_s: int, spec: InstanceSpec) -> None:
        super().__init__(pooling, request_id, model, created_s)
        self.spec = spec

    def sequences_of(self, arrival_s: float) -> list[Sequence]:
        """Return a sequence for each input, which ends with its prefill."""
        return [
            Sequence(
                engine_id=uuid.uuid4().hex,
                answer=self,
                index=index,
                prompt=prompt,
                max_tokens=1,
                output_tokens=1,
                offset=0,
                finish_reason="stop",
                stop_reason=None,
                pieces=None,
                arrival_s=arrival_s,
            )
            for index, prompt in enumerate(self.generation.prompts)
        ]

    def token(self, sequence: Sequence) -> None:
        """Nothing is generated."""

    def body(self) -> tuple[bytes, str, dict[str, str]]:
        """Return the answer, its content type and further headers."""
        given, path = self.generation.body, self.generation.path
        if path == "/rerank":
            return orjson.dumps(self._ranked()), JSON_TYPE, {}
        if path == "/score":
            data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(self._scores())]
            return orjson.dumps(self._list(data)), JSON_TYPE, {}
        if path == "/classify":
            data = [_classified(at, self._probabilities(prompt)) for at, prompt in enumerate(self.generation.prompts)]
            return orjson.dumps(self._list(data)), JSON_TYPE, {}
        values = [self._pooled(prompt) for prompt in self.generation.prompts]
        if path == "/v2/embed":
            return orjson.dumps(self._of_cohere(np.array(values))), JSON_TYPE, {}
        order = ORDERS[given.endianness] + DTYPES[given.embed_dtype]
        if given.encoding_format in ("bytes", "bytes_only"):
            return self._bytes([value.astype(order) for value in values])
        encoded = given.encoding_format == "base64"
        shown = [base64.b64encode(one.astype(order).tobytes()).decode() if encoded else one.tolist() for one in values]
        kind, field = ("embedding", "embedding") if path == "/v1/embeddings" else ("pooling", "data")
        return (
            orjson.dumps(self._list([{"index": at, "object": kind, field: one} for at, one in enumerate(shown)])),
            JSON_TYPE,
            {},
        )

    def _usage(self) -> dict[str, int]:
        tokens = sum(prompt.tokens for prompt in self.generation.prompts)
        return {"prompt_tokens": tokens, "total_tokens": tokens}

    def _list(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.request_id, "object": "list", "created": self.created_s, "model": self.model, "data": data}
        details = {"completion_tokens": 0, "prompt_tokens_details": None, "completion_tokens_details": None}
        return head | {"usage": self._usage() | details}

    def _of_cohere(self, values: NDArray[np.float32]) -> dict[str, Any]:
        bits = np.packbits(values >= 0, axis=-1)
        by_type: dict[str, Any] = {
            "float": values.tolist(),
            "binary": (bits.astype(np.int16) - 128).tolist(),
            "ubinary": bits.tolist(),
            "base64": [base64.b64encode(one.tobytes()).decode() for one in values],
        }
        given = self.generation.body
        answer: dict[str, Any] = {
            "id": self.request_id,
            "embeddings": {name: by_type[name] for name in given.embedding_types or ["float"]},
        }
        answer |= {"texts": given.texts} if given.texts is not None else {}
        units = {"input_tokens": self._usage()["prompt_tokens"], "image_tokens": 0}
        return answer | {
            "meta": {"api_version": {"version": "2"}, "billed_units": units},
            "response_type": "embeddings_by_type",
        }

    def _bytes(self, values: list[NDArray[Any]]) -> tuple[bytes, str, dict[str, str]]:
        given, items, at = self.generation.body, [], 0
        for index, value in enumerate(values):
            item = {"index": index, "embed_dtype": given.embed_dtype, "endianness": given.endianness, "start": at}
            at += value.nbytes
            items.append(item | {"end": at, "shape": list(value.shape)})
        metadata = {"id": self.request_id, "created": self.created_s, "model": self.model, "data": items}
        headers = {"metadata": orjson.dumps(metadata | {"usage": self._usage()}).decode()}
        whole = b"".join(value.tobytes() for value in values)
        return whole, BYTES_TYPE, headers if given.encoding_format == "bytes" else {}

    def _ranked(self) -> dict[str, Any]:
        scores = self._scores()
        results = [
            {
                "index": at,
                "document": {"text": self.generation.others[at], "multi_modal": None},
                "relevance_score": scores[at],
            }
            for at in sorted(range(len(scores)), key=lambda at: -scores[at])
        ]
        most = self.generation.body.top_n or len(results)
        return {"id": self.request_id, "model": self.model, "usage": self._usage(), "results": results[:most]}

    def _scores(self) -> list[float]:
        """Return the similarity of each pair; of a cross-encoder between 0 and 1."""
        ones, others = self.generation.ones, self.generation.others
        first = ones * len(others) if len(ones) == 1 else ones
        near = [float(self._vector(one) @ self._vector(other)) for one, other in zip(first, others, strict=True)]
        return [1.0 / (1.0 + math.exp(-4.0 * score)) for score in near] if self.spec.task == Task.SCORE else near

    def _vector(self, given: str) -> Vector:
        return embedding(self.spec.model, self.spec.embedding_dimensions, given.split()[:MOST_WORDS])

    def _pooled(self, prompt: Prompt) -> NDArray[np.float32]:
        """Return what the pooler of the server's task gives of *prompt*: a vector, or one for each of its tokens."""
        words = (
            prompt.text.split()[:MOST_WORDS] if prompt.ids is None else [str(one) for one in prompt.ids[:MOST_WORDS]]
        )
        match self.spec.task:
            case Task.EMBED:
                return embedding(self.spec.model, self.spec.embedding_dimensions, words)
            case Task.TOKEN_EMBED:
                rows = [embedding(self.spec.model, self.spec.embedding_dimensions, [word]) for word in words]
                return np.array(rows or [embedding(self.spec.model, self.spec.embedding_dimensions, [])])
            case Task.TOKEN_CLASSIFY:
                return np.array([_softmax(self.spec.model, self.spec.num_labels, word) for word in words or [""]])
        return self._probabilities(prompt)

    def _probabilities(self, prompt: Prompt) -> Vector:
        labels = 1 if self.spec.task == Task.SCORE else self.spec.num_labels
        return _softmax(self.spec.model, labels, prompt.text if prompt.ids is None else str(prompt.ids))


JSON_TYPE = "application/json"


def _classified(index: int, probabilities: Vector) -> dict[str, Any]:
    label = f"LABEL_{int(np.argmax(probabilities))}"
    return {"index": index, "label": label, "probs": probabilities.tolist(), "num_classes": probabilities.size}


def embedding(model: str, dimensions: int, words: Inputs[str]) -> Vector:
    """Return a vector of length 1 for *words*."""
    total = np.sum([_direction(model, dimensions, word.lower()) for word in (words or [""])], axis=0)
    return np.asarray(total / max(float(np.linalg.norm(total)), 1e-9), np.float32)


@lru_cache(maxsize=4096)
def _direction(model: str, dimensions: int, word: str) -> Vector:
    return np.random.default_rng(zlib.crc32(f"{model}\0{word}".encode())).standard_normal(dimensions, np.float32)


def _softmax(model: str, labels: int, given: str) -> Vector:
    """Return probabilities of *labels* classes; of a single one, a probability by itself, as vLLM's sigmoid gives."""
    drawn = np.random.default_rng(zlib.crc32(f"{model}\0{given}".encode())).standard_normal(labels)
    if labels == 1:
        return np.asarray(1.0 / (1.0 + np.exp(-drawn)), np.float32)
    weights = np.exp(drawn - drawn.max())
    return np.asarray(weights / weights.sum(), np.float32)
