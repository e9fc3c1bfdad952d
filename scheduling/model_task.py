"""Tasks of models, by vLLM's names. A model generates or pools: requests to one that pools end with their prefill.

As in vLLM 0.32 a server generates or pools (`--runner`), and a pooling server has one task (`ModelConfig.get_pooling_task`).
"""

from enum import StrEnum


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
