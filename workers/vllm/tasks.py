"""Paths that a server of each task answers, and the task of a server by its paths."""

from collections.abc import Mapping, Set
from types import MappingProxyType

from scheduling.model_task import Task

EMBEDDINGS, COHERE_EMBED, POOLING, CLASSIFY = "/v1/embeddings", "/v2/embed", "/pooling", "/classify"
GENERATION = ("/v1/chat/completions", "/v1/responses", "/v1/completions")
CHAT_BATCH = "/v1/chat/completions/batch"
SCORING = ("/rerank", "/score")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
TOKENIZER = ("/tokenize", "/detokenize")
RENDERING = tuple(f"{path}/render" for path in (*GENERATION, "/v1/messages"))
PATHS: Mapping[Task, tuple[str, ...]] = MappingProxyType(
    {
        Task.GENERATE: (*GENERATION, *MESSAGES, CHAT_BATCH, *RENDERING, *TOKENIZER),
        Task.TRANSCRIPTION: (*SPEECH, *TOKENIZER),
        Task.EMBED: (EMBEDDINGS, COHERE_EMBED, POOLING, *SCORING, *TOKENIZER),
        Task.TOKEN_EMBED: (POOLING, *SCORING, *TOKENIZER),
        Task.CLASSIFY: (CLASSIFY, POOLING, *TOKENIZER),
        Task.TOKEN_CLASSIFY: (POOLING, *TOKENIZER),
        Task.SCORE: (*SCORING, CLASSIFY, POOLING, *TOKENIZER),
    }
)
"""Paths by task (`vllm/entrypoints/launchers/api_server/routers.py`)."""
NOT_ALWAYS = frozenset({*MESSAGES, CHAT_BATCH, *RENDERING, COHERE_EMBED})
"""Paths of a task that older servers do not answer."""
MAY_ANSWER: Mapping[Task, tuple[str, ...]] = MappingProxyType({Task.GENERATE: SPEECH})
"""Further paths that some models of a task serve: those that generate from sound too."""


def missing_paths(task: Task, paths: Set[str]) -> list[str]:
    """Return the paths that each server of *task* answers and that are not in *paths*."""
    return sorted(set(PATHS[task]) - paths - NOT_ALWAYS)


def task_of(paths: Set[str]) -> Task | None:
    """Return the task of a server that answers *paths*, the keys of its `/openapi.json`; None if they fit none.

    Of tasks whose paths it all answers, the one with most: an embedding server may have further routes.
    """
    fitting = [task for task in Task if not missing_paths(task, paths)]
    return max(fitting, key=lambda task: len(PATHS[task]), default=None)
