"""Tasks of models by vLLM's names, and the paths that a server of each answers.

As in vLLM 0.32 a server generates or pools (`--runner`), and a pooling server has one task (`ModelConfig.get_pooling_task`).
"""

from collections.abc import Mapping, Set
from enum import StrEnum
from types import MappingProxyType


class Task(StrEnum):
    """The task of a model. `SCORE` is vLLM's `classify` with a single label: only then may it score pairs of texts."""

    GENERATE = "generate"
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"  # noqa: S105
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105
    SCORE = "score"

    @property
    def pools(self) -> bool:
        """Whether its requests are prefill alone."""
        return self is not Task.GENERATE


EMBEDDINGS, POOLING, CLASSIFY = "/v1/embeddings", "/pooling", "/classify"
GENERATION = ("/v1/chat/completions", "/v1/responses", "/v1/completions")
SCORING = ("/rerank", "/score")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
TOKENIZER = ("/tokenize", "/detokenize")
PATHS: Mapping[Task, tuple[str, ...]] = MappingProxyType(
    {
        Task.GENERATE: (*GENERATION, *MESSAGES, *TOKENIZER),
        Task.EMBED: (EMBEDDINGS, POOLING, *SCORING, *TOKENIZER),
        Task.TOKEN_EMBED: (POOLING, *SCORING, *TOKENIZER),
        Task.CLASSIFY: (CLASSIFY, POOLING, *TOKENIZER),
        Task.TOKEN_CLASSIFY: (POOLING, *TOKENIZER),
        Task.SCORE: (*SCORING, CLASSIFY, POOLING, *TOKENIZER),
    }
)
"""Paths by task (`vllm/entrypoints/pooling/factories.py`)."""


def task_of(paths: Set[str]) -> Task | None:
    """Return the task of a server that answers *paths*, the keys of its `/openapi.json`; None if they fit none.

    Of tasks whose paths it all answers, the one with most: an embedding server may have further routes.
    """
    # Older servers have no Messages API.
    fitting = [task for task in Task if set(PATHS[task]) <= paths | set(MESSAGES)]
    return max(fitting, key=lambda task: len(PATHS[task]), default=None)
