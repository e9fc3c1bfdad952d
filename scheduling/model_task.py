"""Tasks of models, by vLLM's names: a model generates, transcribes or pools. Requests to one that pools are prefill alone.

As in vLLM 0.32 a server generates or pools (`--runner`), and a pooling server has one task (`ModelConfig.get_pooling_task`).
"""

from enum import StrEnum


class Task(StrEnum):
    """The task of a model. `SCORE` is vLLM's `classify` with a single label: only then may it score pairs of texts."""

    GENERATE = "generate"
    TRANSCRIPTION = "transcription"
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"  # noqa: S105
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105
    SCORE = "score"

    @property
    def pools(self) -> bool:
        """Whether its requests are prefill alone."""
        return self not in (Task.GENERATE, Task.TRANSCRIPTION)


POOLING_TASKS = tuple(task for task in Task if task.pools)
