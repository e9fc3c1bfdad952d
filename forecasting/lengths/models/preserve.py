"""PreServe's request load predictor (section 4.2): prompt tokens learned on an encoder frozen but for its last layer.

Long answers are rare, so samples are parted into evenly spaced buckets of length, and buckets with fewer than mu times the
fullest one's samples are filled up with copies in which 15 % of the words are replaced by synonyms. There is no WordNet
without a download: a synonym is one of the nearest words in the encoder's own table of word vectors. What the paper leaves
open: the prompt tokens stand right after the first token (so their positions never change), and the loss is L1.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.ssjf import RegressionL1
from forecasting.lengths.text.encoder import Encoder, stack

PROMPT_TOKENS: Final = 10
BUCKETS: Final = 10
FILLED_TO: Final = 0.25
"""The paper's mu."""
REPLACED: Final = 0.15
SYNONYMS: Final = 5
MOST_COPIES: Final = 20
"""Of one sample: a bucket with a single answer is not worth hundreds."""


class PreServe(RegressionL1):
    """SSJF's L1 regression, with prompt tokens learned in the place of the encoder's weights."""

    name = "preserve"
    _prompt_tensor: Any = None

    def room(self) -> int:
        return PROMPT_TOKENS

    def tuned_weights(self) -> list[Any]:
        """The last layer's parameters and the prompt; all others are frozen."""
        import torch

        module = self.encoder.module
        for weight in module.parameters():
            weight.requires_grad_(False)
        last = list(stack(module)[-1].parameters())
        for weight in last:
            weight.requires_grad_(True)
        generator = np.random.default_rng(self.fitting.seed)
        words = module.get_input_embeddings().weight.detach().numpy()
        start = words[generator.integers(0, len(words), PROMPT_TOKENS)]
        self._prompt_tensor = torch.tensor(start, requires_grad=True)
        return [*last, self._prompt_tensor]

    def hidden(self, ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        import torch

        numbers, mask = self.encoder.padded(ids)
        words = self.encoder.module.get_input_embeddings()(numbers)
        prompt = self._prompt_tensor.expand(len(ids), -1, -1)
        full = torch.cat([words[:, :1], prompt, words[:, 1:]], dim=1)
        seen = torch.cat([mask[:, :1].expand(-1, prompt.shape[1] + 1), mask[:, 1:]], dim=1)
        return self.encoder.module(inputs_embeds=full, attention_mask=seen).last_hidden_state, seen

    def augmented(
        self, ids: list[list[int]], lengths: NDArray[np.float64]
    ) -> tuple[list[list[int]], NDArray[np.int64]]:
        generator = np.random.default_rng(self.fitting.seed)
        source = over_sampled(lengths, generator)
        swap = Synonyms(self.encoder)
        copies = [swap.perturbed(ids[index], generator) for index in source[len(ids) :]]
        return ids + copies, source

    def more_state(self) -> dict[str, Any]:
        return {"prompt": self._prompt_tensor.detach().numpy()}

    def take_state(self, state: dict[str, Any]) -> None:
        import torch

        self._prompt_tensor = torch.tensor(state["prompt"])


def over_sampled(lengths: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.int64]:
    """Each sample once, then those that fill up thin buckets: all as indices into *lengths*."""
    low, high = float(lengths.min()), float(lengths.max())
    edges = np.linspace(low, high, BUCKETS + 1)[1:-1]
    place = np.searchsorted(edges, lengths, side="right")
    counts = np.bincount(place, minlength=BUCKETS)
    wanted = int(np.ceil(FILLED_TO * counts.max()))
    more = []
    for bucket in range(BUCKETS):
        members = np.flatnonzero(place == bucket)
        if 0 < len(members) < wanted:
            missing = min(wanted - len(members), MOST_COPIES * len(members))
            more.append(generator.choice(members, missing))
    return np.concatenate([np.arange(len(lengths)), *more]).astype(np.int64)


class Synonyms:
    """Nearest words in an encoder's table of word vectors."""

    def __init__(self, encoder: Encoder) -> None:
        table = encoder.module.get_input_embeddings().weight.detach().numpy()
        self._words = np.array(sorted(encoder.tokenizer.words()), np.int64)
        vectors = table[self._words]
        self._vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        self._place = {int(word): place for place, word in enumerate(self._words)}
        self._known: dict[int, NDArray[np.int64]] = {}

    def of(self, word: int) -> NDArray[np.int64]:
        """The ids of the words nearest to *word*, itself not among them; none if it is no whole word."""
        if word not in self._known:
            place = self._place.get(word)
            if place is None:
                self._known[word] = np.zeros(0, np.int64)
            else:
                near = self._vectors @ self._vectors[place]
                near[place] = -np.inf
                self._known[word] = self._words[np.argpartition(-near, SYNONYMS)[:SYNONYMS]]
        return self._known[word]

    def perturbed(self, ids: Sequence[int], generator: np.random.Generator) -> list[int]:
        """*ids* with 15 % of the words replaced; the marks at both ends stay."""
        changed = list(ids)
        words = [place for place in range(1, len(ids) - 1) if ids[place] in self._place]
        for place in generator.permutation(words)[: round(REPLACED * len(words))]:
            changed[place] = int(generator.choice(self.of(ids[place])))
        return changed
