"""Paths that a server of each task answers, and the task of a server by its paths."""

from collections.abc import Mapping, Set
from types import MappingProxyType

from scheduling.model_task import Task

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
