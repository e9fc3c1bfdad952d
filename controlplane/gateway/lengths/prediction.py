"""What was predicted of one request, and what a length model is asked."""

import math
from typing import Any, Final

from msgspec import Struct

from controlplane.gateway.admission.validation import Call, prompt_text
from controlplane.gateway.lengths.answering import Answerer
from controlplane.lengths.selectors import CACHE, EMBEDDING, LEXICAL, PRIOR
from forecasting.lengths import LengthQuery, OutputQuery
from forecasting.lengths.service.cache import CacheKey
from forecasting.lengths.service.online import Righted
from forecasting.lengths.service.predictor import Answer

FORCED: Final = "forced"
SOURCES: Final = {CACHE: "cache", LEXICAL: "lexical", EMBEDDING: "embedding", PRIOR: "prior", FORCED: FORCED}
"""Names of sources in the published summary; whatever else answers is `model`."""


class Prediction(Struct):
    """What was said of one request; tokens are of all its sequences, `Answer`s of one."""

    tokens: int
    upper_tokens: int
    source: str
    served: Answer
    why: str = ""
    """Why the version that was to answer did not."""
    seen: int = 0
    """Lengths that the cache's answer stands on."""
    raw: Answer | None = None
    """What the length model said, before it was put right."""
    righted: Righted | None = None
    by: Answerer | None = None
    """Whose answer it is, unless a cache's or the prior's."""
    asked: tuple[Answerer, int] | None = None
    """Whose process was asked, and by which number it knows the request: it learns what the request came to."""
    late: bool = False
    """The version that was to answer would have come too late."""
    query: LengthQuery | None = None
    key: CacheKey | None = None

    def explained(self) -> dict[str, object]:
        """For the ledger's decision trace."""
        traced: dict[str, object] = {"tokens": self.tokens, "upper_tokens": self.upper_tokens, "source": self.source}
        if self.why:
            traced["why"] = self.why
        if self.seen:
            traced["seen"] = self.seen
        return traced


def query_of(call: Call, tenant: str, asked: OutputQuery, prompt_tokens: int) -> LengthQuery:
    """What a length model is asked about *call*."""
    text, turns, conversation = prompt_text(call)
    tools = call.body.get("tools")
    return LengthQuery(
        text, prompt_tokens, asked.model, tenant, asked.slo_class, asked.max_tokens, turns, conversation,
        len(tools) if isinstance(tools, list) else 0,
    )  # fmt: skip


def bounded(asked: OutputQuery, answer: Answer, source: str, **more: Any) -> Prediction:
    """*answer* within what the request allows and demands."""
    least, most = float(max(1, asked.min_tokens)), float(asked.max_tokens or math.inf)
    tokens_each, quantiles = answer.tokens, answer.quantiles
    if min(tokens_each, *quantiles) < least or max(tokens_each, *quantiles) > most:
        tokens_each = min(max(tokens_each, least), most)
        quantiles = tuple(min(max(quantile, least), most) for quantile in quantiles)
    served = Answer(tokens_each, quantiles)
    tokens = max(1, round(served.tokens)) * asked.sequences
    upper = max(tokens, math.ceil(served.quantiles[-1]) * asked.sequences)
    return Prediction(tokens, upper, source, served, **more)
