"""The prior that every length prediction falls back to: what this model's and this tenant's requests did lately.

Two quantities are learned online, each as an exponentially weighted mean with a bias-free start:

- characters of text per prompt token, by model (from the usage that instances report);
- output tokens, by (model, tenant, SLO class), falling back to (model, class), then to the model.

A prediction never exceeds what the request allows (`max_tokens`), nor falls below what it demands (`min_tokens`).
"""

from dataclasses import dataclass

from forecasting.lengths.query import LengthQuery
from forecasting.lengths.service.recently_used import RecentlyUsed

CHARACTERS_PER_TOKEN = 4.0  # English text under the tokenizers of Llama and GPT; only until the first answer
OUTPUT_TOKENS = 256.0  # until the first answer
ENOUGH = 20.0  # answers after which a narrower mean is trusted by itself


@dataclass(slots=True)
class _Mean:
    """Exponentially weighted mean of the last few hundred values; `weight` counts them up to 1 / RATE."""

    RATE = 0.01
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * (1.0 - self.RATE) + 1.0
        self.value += (value - self.value) / self.weight


class LengthPrior:
    def __init__(self) -> None:
        self._characters: RecentlyUsed[str, _Mean] = RecentlyUsed(_Mean)
        self._output: RecentlyUsed[tuple[str, ...], _Mean] = RecentlyUsed(_Mean)

    def prompt_tokens(self, model: str, characters: int) -> int:
        """Tokens of a prompt of *characters*; at least 1."""
        mean = self._characters.get(model)
        per_token = mean.value if mean else CHARACTERS_PER_TOKEN
        return max(1, round(characters / per_token))

    def output_tokens(self, query: LengthQuery) -> int:
        """Expected output tokens over all sequences of the request; at least one a sequence."""
        if query.ignore_eos and query.max_tokens:
            return query.max_tokens * query.sequences
        estimate = OUTPUT_TOKENS
        for key in self._keys(query):  # from wide to narrow: each narrower mean weighs in by what it has seen
            mean = self._output.get(key)
            if mean:
                trust = min(1.0, mean.weight / ENOUGH)
                estimate += trust * (mean.value - estimate)
        if query.max_tokens:
            estimate = min(estimate, query.max_tokens)
        return max(1, query.min_tokens, round(estimate)) * query.sequences

    def learn(self, query: LengthQuery, output_tokens: int, characters: int, prompt_tokens: int) -> None:
        """Take in one finished request; *characters* is 0 when its prompt came as token ids."""
        if characters and prompt_tokens:
            self._characters[query.model].add(characters / prompt_tokens)
        if query.ignore_eos or not output_tokens:
            return  # a forced length says nothing of what the model would do
        for key in self._keys(query):
            self._output[key].add(output_tokens / query.sequences)

    @staticmethod
    def _keys(query: LengthQuery) -> tuple[tuple[str, ...], ...]:
        return (
            (query.model,),
            (query.model, query.slo_class),
            (query.model, query.tenant, query.slo_class),
        )
