"""The papers' length models: SSJF's formulations (section 3.1) and PreServe's request load predictor (section 4.2).

SSJF: classes have the percentiles of the training lengths as edges and stand for their median length. Where the paper
is silent, L1 and MSE are taken on lengths in units of their mean, and the prompts of a pair are read one by one: once
each, not once per comparison (the paper's pairs go through the encoder together, O(log N) times a request).

PreServe: prompt tokens are learned on an encoder that is frozen but for its last layer. Long answers are rare, so
samples go into evenly spaced buckets of length, and thin buckets are filled with copies in which some words are
replaced by synonyms. WordNet needs a download, so a synonym is one of the nearest words in the encoder's table of word
vectors. Where the paper is silent, the prompt tokens follow the first token, and the loss is L1.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.encoder import Encoder, stack
from forecasting.lengths.proxy import Array, Proxy, head_outputs, head_tensors
from forecasting.lengths.scoring import CLASSES, class_edges, classes

REFERENCES: Final = 64
"""Prompts of known length that the pairwise model compares a new one with."""


class _Regression(Proxy):
    error: ClassVar[str]
    """Torch's name of the loss."""

    def prepare(self, lengths: NDArray[np.float64]) -> None:
        self.facts = {"scale": float(lengths.mean())}

    def loss(self, torch: Any, outputs: Any, lengths: Any) -> Any:
        return getattr(torch.nn.functional, self.error)(outputs[:, 0], lengths / self.facts["scale"])

    def decode(self, states: Array, names: Array) -> NDArray[np.float64]:
        tokens: NDArray[np.float64] = head_outputs(self.head, states, names)[:, 0].astype(float) * self.facts["scale"]
        return tokens


class RegressionL1(_Regression):
    """REG (L1), which the paper's scheduler uses."""

    name, error = "ssjf-reg-l1", "l1_loss"


class RegressionMse(_Regression):
    """REG (MSE)."""

    name, error = "ssjf-reg-mse", "mse_loss"


class _Classes(Proxy):
    count: ClassVar[int] = CLASSES

    def prepare(self, lengths: NDArray[np.float64]) -> None:
        """Note the edges of the classes, and the median length in each."""
        edges = class_edges(lengths, self.count)
        members = [lengths[classes(lengths, edges) == each] for each in range(self.count)]
        medians = [float(np.median(some if len(some) else lengths)) for some in members]
        self.facts = {"edges": edges.tolist(), "medians": medians}

    def labels(self, torch: Any, lengths: Any) -> Any:
        """Return the class of each length."""
        return torch.from_numpy(classes(lengths.numpy(), self.facts["edges"]))

    def medians_of(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the median length of each of the *chosen* classes."""
        tokens: NDArray[np.float64] = np.asarray(self.facts["medians"], float)[chosen]
        return tokens


class Classification(_Classes):
    """CLS: five classes, cross entropy."""

    name = "ssjf-cls"
    outputs = CLASSES

    def loss(self, torch: Any, outputs: Any, lengths: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, self.labels(torch, lengths))

    def decode(self, states: Array, names: Array) -> NDArray[np.float64]:
        return self.medians_of(head_outputs(self.head, states, names).argmax(axis=1))


class BinaryClassification(Classification):
    """Bin. CLS: below and above the median length."""

    name = "ssjf-binary"
    outputs = count = 2


class _Ordinal(_Classes):
    error: ClassVar[str]
    """Torch's name of the loss."""

    def loss(self, torch: Any, outputs: Any, lengths: Any) -> Any:
        return getattr(torch.nn.functional, self.error)(outputs[:, 0], self.labels(torch, lengths).float())

    def decode(self, states: Array, names: Array) -> NDArray[np.float64]:
        chosen = np.clip(np.rint(head_outputs(self.head, states, names)[:, 0]), 0, self.count - 1)
        return self.medians_of(chosen.astype(int))


class OrdinalL1(_Ordinal):
    """Ord. CLS (L1): the class as a number, rounded."""

    name, error = "ssjf-ordinal-l1", "l1_loss"


class OrdinalMse(_Ordinal):
    """Ord. CLS (MSE)."""

    name, error = "ssjf-ordinal-mse", "mse_loss"


class Pairwise(Proxy):
    """Predicts which of two prompts is answered at greater length; its rank among known prompts gives a figure."""

    name = "ssjf-pairwise"
    states_a_row = 2

    def prepare(self, lengths: NDArray[np.float64]) -> None:
        self.facts = {"lengths": np.percentile(lengths, np.linspace(0, 100, REFERENCES + 1)).tolist()}
        self._references: tuple[Array, Array] | None = None

    def loss(self, torch: Any, outputs: Any, lengths: Any) -> Any:
        raise NotImplementedError("Pairs have a separate loss.")

    def batch_loss(
        self, torch: Any, head: dict[str, Any], states: Any, names: Any, lengths: Any, generator: np.random.Generator
    ) -> Any:
        other = torch.from_numpy(generator.permutation(len(states)))
        pairs, both = torch.cat([states, states[other]], dim=1), torch.cat([names, names[other]], dim=1)
        outputs = head_tensors(torch, head, pairs, both)[:, 0]
        longer = (lengths > lengths[other]).float()
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, longer)

    def _fit_head(self, torch: Any, states: Array, samples: Any, taken: Any, generator: np.random.Generator) -> None:
        super()._fit_head(torch, states, samples, taken, generator)
        lengths = np.array([sample.output_tokens for sample in samples], float)
        order = np.flatnonzero(taken)[np.argsort(lengths[taken], kind="stable")]
        chosen = order[np.linspace(0, len(order) - 1, min(REFERENCES, len(order))).astype(int)]
        self._references = (states[chosen], self.names.rows([samples[index].query for index in chosen]))
        self.facts = {"lengths": np.sort(lengths[chosen]).tolist()}

    def decode(self, states: Array, names: Array) -> NDArray[np.float64]:
        assert self._references is not None
        known, known_names = self._references
        wins = np.zeros(len(states))
        for state, name in zip(known, known_names, strict=True):
            pair = np.concatenate([states, np.broadcast_to(state, states.shape)], axis=1)
            both = np.concatenate([names, np.broadcast_to(name, names.shape)], axis=1)
            wins += head_outputs(self.head, pair, both)[:, 0] > 0
        lengths = np.asarray(self.facts["lengths"])
        tokens: NDArray[np.float64] = np.interp(wins, np.arange(len(lengths)) + 0.5, lengths)
        return tokens

    def more_state(self) -> dict[str, Any]:
        assert self._references is not None
        return {"reference_states": self._references[0], "reference_names": self._references[1]}

    def take_state(self, state: dict[str, Any]) -> None:
        self._references = (state["reference_states"], state["reference_names"])


FORMULATIONS: Final = (
    *(RegressionL1, RegressionMse, Classification, OrdinalL1, OrdinalMse, BinaryClassification),
    Pairwise,
)


PROMPT_TOKENS: Final = 10
BUCKETS: Final = 10
FILLED_TO: Final = 0.25
"""The paper's mu."""
REPLACED: Final = 0.15
SYNONYMS: Final = 5
MOST_COPIES: Final = 20
"""Most copies of one sample: a bucket with a single answer is not worth hundreds."""


class PreServe(RegressionL1):
    """SSJF's L1 regression, with prompt tokens learned in place of the encoder's weights."""

    name = "preserve"
    _prompt_tensor: Any = None

    def room(self) -> int:
        return PROMPT_TOKENS

    def tuned_weights(self) -> list[Any]:
        """Return the last layer's parameters and the prompt; all others are frozen."""
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
    """Return each sample once, then those that fill up thin buckets, as indices into *lengths*."""
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
        """Return the ids of the words nearest to *word*, without itself; none if it is no whole word."""
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
        """Return *ids* with 15 % of the words replaced; the marks at both ends stay."""
        changed = list(ids)
        words = [place for place in range(1, len(ids) - 1) if ids[place] in self._place]
        for place in generator.permutation(words)[: round(REPLACED * len(words))]:
            changed[place] = int(generator.choice(self.of(ids[place])))
        return changed
