"""The base of length models on a fine-tuned encoder: a two-layer head on the first token's state, its fitting and its file.

The head is SSJF's (section 3.1; names join as in its authors' code): the state through one layer, joined by the served
model and the tenant, then two more layers. Fitting has two phases, as there: encoder and head together on a part of the
samples, then the head alone, on states that the encoder computes once per prompt. `Fitting` bounds both phases, since a
small encoder reads fifty prompts a second on a core.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.encoder import Encoder
from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions, Sample

BANDS: Final = 5  # of predictions from short to long, each with its spread
LEAST_IN_BAND: Final = 20


class Spread:
    """Log-ratios of real to predicted lengths, by bands of the predicted one."""

    def __init__(self) -> None:
        self.edges: NDArray[np.float64] = np.zeros(0)
        self.steps: NDArray[np.float64] = np.zeros((1, len(QUANTILES)))

    def fit(self, real: ArrayLike, predicted: ArrayLike) -> Self:
        """Learn from predictions for samples outside the fit, if there are any."""
        truth, guess = np.asarray(real, float), np.maximum(np.asarray(predicted, float), 1.0)
        bands = max(1, min(BANDS, len(truth) // LEAST_IN_BAND))
        self.edges = (
            np.unique(np.percentile(guess, np.linspace(0, 100, bands + 1)[1:-1])) if len(guess) else np.zeros(0)
        )
        ratios = np.log(np.maximum(truth, 1.0) / guess)
        place = np.searchsorted(self.edges, guess, side="right")
        whole = np.quantile(ratios, QUANTILES) if len(ratios) else np.zeros(len(QUANTILES))
        self.steps = np.stack(
            [
                np.quantile(ratios[place == band], QUANTILES) if (place == band).sum() >= LEAST_IN_BAND else whole
                for band in range(len(self.edges) + 1)
            ]
        )
        return self

    def around(self, tokens: ArrayLike, queries: Sequence[LengthQuery]) -> Predictions:
        """Return predictions within the limits of *queries*; *tokens* stay the single figure."""
        guess = np.maximum(np.asarray(tokens, float), 1.0)
        steps = self.steps[np.searchsorted(self.edges, guess, side="right")]
        return bounded(guess, guess[:, None] * np.exp(steps), queries)

    def state(self) -> dict[str, Any]:
        return {"edges": self.edges, "steps": self.steps}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        spread = cls()
        spread.edges, spread.steps = np.asarray(state["edges"]), np.asarray(state["steps"])
        return spread


Array = NDArray[np.float32]
Weights = dict[str, Array]

HIDDEN: Final = 128
HEAD_RATE: Final = 1e-3
HEAD_BATCH: Final = 64
LAST_RATE_TUNED: Final = 0.05
"""Learning rate at the end of the first phase, as a share of the first; `LAST_RATE` is that of the second."""
LAST_RATE: Final = 0.02
HELD_OUT: Final = 0.1
"""Share of the samples held out for the spread of the quantiles."""
UNSEEN_NAME: Final = 0.1
"""Chance that a name is hidden in training, so that unknown ones are answered sensibly."""


class Names:
    """One-hot rows of the served model and the tenant."""

    def __init__(self, models: Sequence[str] = (), tenants: Sequence[str] = ()) -> None:
        self.models, self.tenants = list(models), list(tenants)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        return cls(
            sorted({sample.query.model for sample in samples}), sorted({sample.query.tenant for sample in samples})
        )

    def __len__(self) -> int:
        return len(self.models) + len(self.tenants)

    def rows(self, queries: Sequence[LengthQuery]) -> Array:
        models = {name: column for column, name in enumerate(self.models)}
        tenants = {name: column + len(self.models) for column, name in enumerate(self.tenants)}
        rows: Array = np.zeros((len(queries), len(self)), np.float32)
        for row, query in zip(rows, queries, strict=True):
            if query.model in models:
                row[models[query.model]] = 1.0
            if query.tenant in tenants:
                row[tenants[query.tenant]] = 1.0
        return rows


def new_head(width: int, names: int, outputs: int, seed: int) -> Weights:
    generator = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> Array:
        drawn: Array = (np.sqrt(1.0 / rows) * generator.standard_normal((rows, columns))).astype(np.float32)
        return drawn

    return {
        "first": normal(width, HIDDEN),
        "first_bias": np.zeros(HIDDEN, np.float32),
        "second": normal(HIDDEN + names, HIDDEN),
        "second_bias": np.zeros(HIDDEN, np.float32),
        "last": normal(HIDDEN, outputs),
        "last_bias": np.zeros(outputs, np.float32),
    }


def head_outputs(weights: Weights, states: Array, names: Array) -> Array:
    """Return the head's outputs (n, outputs), in NumPy; as `head_tensors`."""
    hidden = np.maximum(states @ weights["first"] + weights["first_bias"], 0.0)
    hidden = np.maximum(np.concatenate([hidden, names], axis=1) @ weights["second"] + weights["second_bias"], 0.0)
    outputs: Array = hidden @ weights["last"] + weights["last_bias"]
    return outputs


def head_tensors(torch: Any, weights: dict[str, Any], states: Any, names: Any) -> Any:
    relu = torch.nn.functional.relu
    hidden = relu(states @ weights["first"] + weights["first_bias"])
    hidden = relu(torch.cat([hidden, names], dim=1) @ weights["second"] + weights["second_bias"])
    return hidden @ weights["last"] + weights["last_bias"]


class Proxy(LengthModel):
    """A length model on an encoder. Subclasses define the head's outputs, their loss, and how they become tokens."""

    version = 2
    on_encoder = True
    outputs: ClassVar[int] = 1
    states_a_row: ClassVar[int] = 1
    """States that one row of the head takes: two for pairs."""

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.encoder = Encoder(fitting.encoder, fitting.most_tokens, fitting.layers)
        self.names = Names()
        self.head: Weights = {}
        self.facts: dict[str, Any] = {}
        """Facts about the training lengths that decoding needs."""
        self.spread = Spread()

    # What a sub-class defines.

    @abstractmethod
    def prepare(self, lengths: NDArray[np.float64]) -> None:
        """Fill `facts` from the training lengths."""

    @abstractmethod
    def loss(self, torch: Any, outputs: Any, lengths: Any) -> Any:
        """Return the loss of the head's *outputs* (n, outputs) for real *lengths* (n)."""

    @abstractmethod
    def decode(self, states: Array, names: Array) -> NDArray[np.float64]:
        """Return the tokens of n queries."""

    # What all share.

    @property
    def fitted(self) -> bool:
        return bool(self.head)

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        states = self._read(queries)
        return self.spread.around(self.decode(states, self.names.rows(queries)), queries)

    def quantise(self) -> None:
        self.encoder.quantise()

    def state(self) -> dict[str, Any]:
        return {
            "encoder": self.encoder.setting, "most_tokens": self.encoder.most_tokens, "layers": self.encoder.layers,
            "encoder_weights": self.encoder.weights(), "models": self.names.models, "tenants": self.names.tenants,
            "head": self.head, "facts": self.facts, "spread": self.spread.state(), **self.more_state(),
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls(Fitting(state["encoder"], most_tokens=state["most_tokens"], layers=state["layers"]))
        model.encoder.set_weights(state["encoder_weights"])
        model.names = Names(state["models"], state["tenants"])
        model.head, model.facts, model.spread = state["head"], state["facts"], Spread.of(state["spread"])
        model.take_state(state)
        return model

    def more_state(self) -> dict[str, Any]:
        """Return the further state of a subclass."""
        return {}

    def take_state(self, state: dict[str, Any]) -> None:
        """Restore what `more_state` returned."""

    def hidden(self, ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Return (last hidden states, mask) of a batch, as tensors that gradients can flow through."""
        return self.encoder.hidden(ids)

    def tuned_weights(self) -> list[Any]:
        """Return the encoder's parameters that the first phase moves."""
        return list(self.encoder.module.parameters())

    def room(self) -> int:
        """Return the positions of the encoder that are reserved."""
        return 0

    def augmented(
        self, ids: list[list[int]], lengths: NDArray[np.float64]
    ) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Return the rows of the first phase: their ids, and the sample that each comes from."""
        return ids, np.arange(len(ids))

    def _read(self, queries: Sequence[LengthQuery]) -> Array:
        """Return states of the first token, (n, width), without gradients; each text is read once."""
        texts = sorted({query.text for query in queries})
        places = {text: place for place, text in enumerate(texts)}
        rows = self.encoder.states(texts, hidden=self.hidden, room=self.room())
        return rows[[places[query.text] for query in queries]]

    def _fit(self, samples: Sequence[Sample]) -> None:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.fitting.seed)
            self._fit_both(torch, samples)

    def _fit_both(self, torch: Any, samples: Sequence[Sample]) -> None:
        """Run both phases, then fit the spread on prompts held out of the second."""
        fitting, generator = self.fitting, np.random.default_rng(self.fitting.seed)
        order = generator.permutation(len(samples))
        self.names = Names.of(samples)
        self.prepare(np.array([sample.output_tokens for sample in samples], float))
        self.head = new_head(
            self.encoder.width * self.states_a_row, len(self.names) * self.states_a_row, self.outputs, fitting.seed
        )
        self._fit_encoder(torch, [samples[index] for index in order[: fitting.tuned]], generator)
        texts: dict[str, None] = {}
        for index in order:
            if len(texts) == fitting.read:
                break
            texts.setdefault(samples[index].query.text)
        chosen = [samples[index] for index in order if samples[index].query.text in texts]
        states = self._read([sample.query for sample in chosen])
        held_texts = {text for place, text in enumerate(texts) if place < HELD_OUT * len(texts)}
        held = np.array([sample.query.text in held_texts for sample in chosen])
        self._fit_head(torch, states, chosen, ~held, generator)
        judged = held if held.any() else ~held
        truth = np.array([sample.output_tokens for sample in chosen], float)[judged]
        names = self.names.rows([sample.query for sample in chosen])[judged]
        self.spread.fit(truth, self.decode(states[judged], names))

    def _fit_encoder(self, torch: Any, samples: Sequence[Sample], generator: np.random.Generator) -> None:
        """Run the first phase: fit encoder and head."""
        fitting, module = self.fitting, self.encoder.module
        lengths = np.array([sample.output_tokens for sample in samples], float)
        ids, source = self.augmented(self.encoder.ids([sample.query.text for sample in samples], self.room()), lengths)
        names = self.names.rows([sample.query for sample in samples])
        tuned = self.tuned_weights()
        batches = (batch for _ in range(fitting.epochs) for batch in _batches(ids, fitting.batch, generator))
        module.train()
        self._descend(
            torch,
            batches,
            fitting.epochs * -(-len(ids) // fitting.batch),
            lambda batch: self.hidden([ids[index] for index in batch])[0][:, 0],
            names[source],
            lengths[source].astype(np.float32),
            generator,
            tuned,
        )
        module.eval()
        self.encoder.set_weights(self.encoder.weights())  # as precise as the file that they are kept in

    def _fit_head(
        self,
        torch: Any,
        states: Array,
        samples: Sequence[Sample],
        taken: NDArray[np.bool_],
        generator: np.random.Generator,
    ) -> None:
        """Run the second phase: fit the head alone, on *states* of those *samples* that are *taken*."""
        lengths = np.array([sample.output_tokens for sample in samples], np.float32)[taken]
        names = self.names.rows([sample.query for sample in samples])[taken]
        states = states[taken]
        starts, rounds = range(0, len(states), HEAD_BATCH), self.fitting.head_epochs
        orders = (generator.permutation(len(states)) for _ in range(rounds))
        batches = (order[start : start + HEAD_BATCH] for order in orders for start in starts)
        self._descend(
            torch,
            batches,
            rounds * len(starts),
            lambda batch: torch.from_numpy(states[batch]),
            names,
            lengths,
            generator,
        )

    def _descend(
        self,
        torch: Any,
        batches: Iterable[NDArray[np.int64]],
        steps: int,
        states_of: Callable[[NDArray[np.int64]], Any],
        names: Array,
        lengths: Array,
        generator: np.random.Generator,
        tuned: Sequence[Any] = (),
    ) -> None:
        """Move the head, and the *tuned* weights of the encoder, one step for each of *batches*."""
        head = {name: torch.tensor(value, requires_grad=True) for name, value in self.head.items()}
        groups = [{"params": list(head.values()), "lr": HEAD_RATE}]
        if tuned:
            groups.insert(0, {"params": list(tuned), "lr": self.fitting.rate})
        optimiser = torch.optim.AdamW(groups)
        last_rate = LAST_RATE_TUNED if tuned else LAST_RATE
        plan = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, last_rate, max(steps, 1))
        for batch in batches:
            rows, real = torch.from_numpy(names[batch]), torch.from_numpy(lengths[batch])
            loss = self.batch_loss(torch, head, states_of(batch), rows, real, generator)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if tuned:
                torch.nn.utils.clip_grad_norm_(tuned, 1.0)
            optimiser.step()
            plan.step()
        self.head = {name: value.detach().numpy() for name, value in head.items()}

    def batch_loss(
        self,
        torch: Any,
        head: dict[str, Any],
        states: Any,
        names: Any,
        lengths: Any,
        generator: np.random.Generator,
    ) -> Any:
        """Return the loss of one batch; names are hidden at random."""
        kept = torch.from_numpy((generator.random((len(names), 1)) >= UNSEEN_NAME).astype(np.float32))
        return self.loss(torch, head_tensors(torch, head, states, names * kept), lengths)


def _batches(ids: Sequence[Sequence[int]], size: int, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return batches of rows of similar length, which need little padding, in a random order."""
    noisy = np.array([len(each) for each in ids]) * generator.uniform(0.8, 1.2, len(ids))
    order = np.argsort(noisy)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [batches[index] for index in generator.permutation(len(batches))]
