"""Pooling by an emulated server: vectors, scores and classes that depend on the text alone.

A text's vector is the sum of one random direction for each of its words, so texts that share words are similar, on every
server of the model alike. The engine computes each input as a prompt with a single token of output: it ends with its
prefill.
"""

import base64
import zlib
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from scheduling.model_task import Task
from workers.emulator import text
from workers.emulator.answers import Answer
from workers.emulator.calls import CheckedCall, Prompt, bad, check_fields, check_length, malformed, words_of
from workers.emulator.spec import InstanceSpec

Vector = NDArray[np.float32]
MAX_WORDS: Final = 512
"""Words of a text that its vector depends on."""
INPUTS: Final = ("input", "texts", "inputs", "messages", "prompt")
PAIRS: Final = (("query", "documents"), ("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"))
JSON_TYPE: Final = "application/json"


def read(path: str, body: dict[str, Any], spec: InstanceSpec) -> tuple[CheckedCall, list[str], list[str]]:
    """Return the request, and the two sides of its pairs where texts are scored. Raises ApiError."""
    check_fields("pooling", body)
    ones: list[str] = []
    others: list[str] = []
    if path in ("/score", "/rerank"):
        pair = next((pair for pair in PAIRS if all(body.get(name) for name in pair)), None)
        if pair is None:
            raise malformed("Field required", "body.query")
        ones, others = (_listed(body[name]) for name in pair)
        ones = ones * len(others) if len(ones) == 1 else ones
        if len(ones) != len(others):
            raise bad("Input lengths must be either 1:1, 1:N or N:N")
        prompts = [Prompt(f"{one}\n{other}") for one, other in zip(ones, others, strict=True)]
    else:
        given = next((body[name] for name in INPUTS if body.get(name) is not None), None)
        if given is None:
            raise malformed("Field required", "body.input")
        ids = isinstance(given, list) and bool(given) and all(type(each) is int for each in given)
        inputs = [given] if ids or not isinstance(given, list) else given
        if body.get("messages") is not None:
            inputs = [words_of(given)]
        if not inputs:
            raise bad("You must pass at least one prompt")
        prompts = [Prompt("", tuple(each)) if _is_ids(each) else Prompt(words_of(each)) for each in inputs]
    cut = body.get("truncate_prompt_tokens")
    if cut is not None:
        most = spec.max_model_len if cut == -1 else int(cut)
        prompts = [Prompt(one.text[: most * text.CHARACTERS_PER_TOKEN], one.ids and one.ids[:most]) for one in prompts]
    for prompt in prompts:
        check_length(prompt, spec.max_model_len)
    return CheckedCall("pooling", body, tuple(prompts), (1,) * len(prompts)), ones, others


def _listed(side: Any) -> list[str]:
    return [words_of(each) for each in side] if isinstance(side, list) else [words_of(side)]


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


class PooledAnswer(Answer):
    """The answer to a pooling request, computed when the last of its inputs is."""

    def __init__(self, path: str, body: dict[str, Any], request_id: str, created_s: int, spec: InstanceSpec) -> None:
        asked, self._ones, self._others = read(path, body, spec)
        super().__init__(asked, request_id, spec.model, created_s)
        self._path, self._spec = path, spec

    def token(self, sequence: object) -> None:
        """Nothing is generated."""

    @property
    def headers(self) -> dict[str, str]:
        """Return vLLM's description of an answer that is bytes."""
        if self.asked.get("encoding_format") != "bytes":
            return {}
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return {"metadata": orjson.dumps({"id": self.request_id, "data": [], "usage": usage}).decode()}

    def body(self) -> tuple[bytes, str]:
        """Return the answer and its content type."""
        prompts, path = self.asked.prompts, self._path
        if path == "/rerank":
            return orjson.dumps(self._ranked()), JSON_TYPE
        if path == "/score":
            return self._listed([{"object": "score", "score": score} for score in self._scores()])
        values = [self._values(prompt) for prompt in prompts]
        if path == "/classify":
            shown = [{"label": f"LABEL_{int(np.argmax(one))}", "probs": one.tolist()} for one in values]
            return self._listed([each | {"num_classes": one.size} for each, one in zip(shown, values, strict=True)])
        if path == "/v2/embed":
            units = {"input_tokens": self.prompt_tokens, "image_tokens": 0}
            meta = {"api_version": {"version": "2"}, "billed_units": units}
            embeddings = {"float": [one.tolist() for one in values]}
            answer = {"id": self.request_id, "embeddings": embeddings, "meta": meta}
            return orjson.dumps(answer | {"response_type": "embeddings_by_type"}), JSON_TYPE
        encoding = self.asked.get("encoding_format", "float")
        if encoding in ("bytes", "bytes_only"):
            return b"".join(one.tobytes() for one in values), "application/octet-stream"
        encoded = encoding == "base64"
        vectors = [base64.b64encode(one.tobytes()).decode() if encoded else one.tolist() for one in values]
        kind, field = ("embedding", "embedding") if path == "/v1/embeddings" else ("pooling", "data")
        return self._listed([{"object": kind, field: one} for one in vectors])

    def _listed(self, data: list[dict[str, Any]]) -> tuple[bytes, str]:
        data = [{"index": index} | each for index, each in enumerate(data)]
        head = {"id": self.request_id, "object": "list", "created": self.created_s, "model": self.model, "data": data}
        return orjson.dumps(head | {"usage": self.usage(0)}), JSON_TYPE

    def _ranked(self) -> dict[str, Any]:
        scores = self._scores()
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: self.asked.get("top_n") or len(scores)]
        results = [{"index": at, "document": {"text": self._others[at]}, "relevance_score": scores[at]} for at in order]
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        return {"id": self.request_id, "model": self.model, "usage": usage, "results": results}

    def _scores(self) -> list[float]:
        """Return the similarity of each pair, between -1 and 1."""
        pairs = zip(self._ones, self._others, strict=True)
        return [float(self._vector(one.split()) @ self._vector(other.split())) for one, other in pairs]

    def _vector(self, words: list[str]) -> Vector:
        return embedding(self._spec.model, self._spec.embedding_dimensions, words[:MAX_WORDS])

    def _values(self, prompt: Prompt) -> Vector:
        """Return the vector of *prompt*, one for each word, or its probabilities, by the server's task."""
        words = prompt.text.split() if prompt.ids is None else [str(each) for each in prompt.ids]
        match self._spec.task:
            case Task.EMBED:
                return self._vector(words)
            case Task.TOKEN_EMBED:
                return np.array([self._vector([word]) for word in words[:MAX_WORDS] or [""]])
        drawn = np.exp(_direction(self._spec.model, self._spec.num_labels, " ".join(words)))
        return np.asarray(drawn / drawn.sum(), np.float32)


def embedding(model: str, dimensions: int, words: list[str]) -> Vector:
    """Return a vector of length 1 for *words*."""
    total = np.sum([_direction(model, dimensions, word.lower()) for word in (words or [""])], axis=0)
    return np.asarray(total / max(float(np.linalg.norm(total)), 1e-9), np.float32)


@lru_cache(maxsize=4096)
def _direction(model: str, dimensions: int, word: str) -> Vector:
    return np.random.default_rng(zlib.crc32(f"{model}\0{word}".encode())).standard_normal(dimensions, np.float32)
