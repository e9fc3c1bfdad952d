"""Resume an answer on another instance, exactly where the last one left off.

An instance that may have to give a request up is asked for the ids of the tokens it emits (`return_token_ids`), which the
tenant does not see. The next instance gets prompt and emitted tokens as one prompt of ids (`/v1/completions`, for a chat
too: its template was applied before), and so computes what the first one would have: text alone may be split into other
tokens than those sampled. Tokens whose text has not come out (parts of a character) are computed again.
"""

from dataclasses import dataclass, field
from typing import Any

from controlplane.gateway.admission.validation import Call, Kind

LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
SAMPLING = frozenset(
    {
        "allowed_token_ids", "bad_words", "ignore_eos", "logit_bias", "min_p", "repetition_penalty", "skip_special_tokens",
        "spaces_between_special_tokens", "stop_token_ids", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
"""Fields that apply to a continuation unchanged.

`presence_penalty` and `frequency_penalty` count emitted tokens, a seed's random numbers would start over, and a stop string
may span the boundary.
"""
HARMLESS = frozenset(
    {
        "chat_template", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens", "documents", "messages",
        "metadata", "model", "n", "priority", "prompt", "service_tier", "store", "stream", "stream_options", "user",
    }
)  # fmt: skip
"""Fields that a continuation does not need, or sets itself."""
CONTINUED = SAMPLING | HARMLESS | set(LIMITS)


def evictable(call: Call) -> bool:
    """Whether a partly streamed answer to *call* can be resumed on another instance without a difference to its tenant.

    Holds for a stream of one choice, to one prompt of text or ids, with an explicit limit and without anything that a
    continuation would do differently. Any other request can be evicted until it has emitted something.
    """
    body = call.body
    if (
        not call.stream
        or call.kind not in (Kind.CHAT, Kind.COMPLETION)
        or call.sequences != 1
        or call.max_tokens is None
    ):
        return False
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        return False
    if "return_token_ids" in body:
        return False
    if not {type(content) for _, content in call.turns} <= {str}:
        return False
    return not any(_asks_something(name, value) for name, value in body.items() if name not in CONTINUED)


def _asks_something(name: str, value: Any) -> bool:
    if value is None or value is False or value in ([], {}):
        return False
    return bool(value) or name not in ("presence_penalty", "frequency_penalty")


@dataclass(slots=True)
class Kept:
    """The part of a stream that is kept while it may be evicted."""

    prompt_ids: list[int] | None = None  # as the first instance returned them
    ids: list[int] = field(default_factory=list)  # of the emitted tokens
    shown: int = 0  # of those, up to the last one with text
    opened: bool = False  # something was sent to the tenant: the role, or a token
    head: dict[str, Any] = field(default_factory=dict)  # id and time of the first event
    whole: bool = False  # its last token has come
    lost_track: bool = False  # it emitted something without ids or text: it cannot be continued

    @property
    def resumable(self) -> bool:
        """Whether another instance can continue, or start."""
        return not self.whole and not self.lost_track and (not self.opened or self.prompt_ids is not None)

    def rewind(self) -> int:
        """Drop tokens that the tenant has seen nothing of; return the number of remaining tokens."""
        del self.ids[self.shown :]
        return len(self.ids)
