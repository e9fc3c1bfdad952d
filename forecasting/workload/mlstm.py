"""PreServe's workload predictor: a multiplicative LSTM over the last k windows, trained again every day.

The cell is that of Krause, Lu, Murray and Renals, "Multiplicative LSTM for sequence modelling" (2016). From input x, last
output h and cell state c, with * element by element:

    m = (Wmx x) * (Wmh h)
    a = tanh(Wax x + Wam m + ba)          what could enter the cell
    i, f, o = sigmoid(W.x x + W.m m + b.) for each gate
    c' = f * c + i * a
    h' = o * tanh(c')

After k windows a linear layer makes the next window from h. As in PreServe (section 4.1) rates are min-max normalised,
prompt and output tokens have a model each (a forecaster holds one series), and further windows are found stepwise: a
prediction becomes the last input of the next. PreServe names neither k nor sizes; ours are below.

torch trains; predictions are made by the NumPy cell here, which is all that a stored forecaster needs.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

from forecasting import models_extra
from forecasting.workload.forecaster import Forecaster, PointModel, filled
from forecasting.workload.series import LEAST_RATE, Values

WINDOWS: Final = 24  # k
HIDDEN: Final = 32
EPOCHS: Final = 40
EPOCHS_AGAIN: Final = 10  # of daily training, which continues from the last weights
BATCH: Final = 64
LEARNING_RATE: Final = 5e-3
LARGEST_GRADIENT: Final = 1.0
TRAIN_WINDOWS: Final = 2016  # the last ones
SEED: Final = 20260  # of first weights and of the order of samples: the same data gives the same model

GATES: Final = 4  # a, i, f, o
Weights = dict[str, Values]
"""With H hidden: `mx` (H,), `mh` (H, H), `x` (4 H,), `m` (4 H, H), `bias` (4 H,), `out` (H,), `shift` ()."""


def sigmoid(x: Values) -> Values:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def cell(weights: Weights, x: Values, h: Values, c: Values) -> tuple[Values, Values]:
    """Compute one step of the cell for inputs *x* (batch,) and states (batch, hidden); return the next h and c."""
    m = x[:, None] * weights["mx"] * (h @ weights["mh"].T)
    a, i, f, o = np.split(x[:, None] * weights["x"] + m @ weights["m"].T + weights["bias"], GATES, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(a)
    return sigmoid(o) * np.tanh(c), c


def run(weights: Weights, inputs: Values) -> Values:
    """Return the next value after each row of *inputs* (batch, k), normalised: (batch,)."""
    h = c = np.zeros((len(inputs), len(weights["mx"])))
    for x in inputs.T:
        h, c = cell(weights, x, h, c)
    return np.asarray(h @ weights["out"] + weights["shift"])


class MlstmModel(PointModel):
    reach: ClassVar[int] = 6  # every further window costs k more steps of the cell

    def __init__(self) -> None:
        self.weights: Weights = {}
        self.low, self.span = 0.0, 1.0
        self.last: Values = np.zeros(WINDOWS)  # normalised, newest last

    @classmethod
    def least(cls, season: int) -> int:
        return 8 * WINDOWS

    def fit(self, values: Values, season: int) -> None:
        y = filled(values)[-TRAIN_WINDOWS:]
        known = ~np.isnan(values[-TRAIN_WINDOWS:])
        low, high = float(y.min()), float(y.max())
        span = high - low if high - low > LEAST_RATE else max(high, 1.0)
        if self.weights:
            self._rescale(low, span)
        self.low, self.span = low, span
        y = (y - low) / span
        targets = np.arange(WINDOWS, len(y))
        targets = targets[known[targets]]  # a bridged gap is input enough, never something to learn to predict
        inputs = y[targets[:, None] - np.arange(WINDOWS, 0, -1)]
        self.weights = train(inputs, y[targets], self.weights)
        self.last = y[-WINDOWS:].copy()

    def prepare(self) -> None:
        models_extra.require("The forecaster mlstm")
        import torch  # noqa: F401

    def append(self, value: float) -> None:
        """Move on by one window; a gap is bridged by the model's own expectation."""
        fresh = float(run(self.weights, self.last[None])[0]) if np.isnan(value) else (value - self.low) / self.span
        self.last = np.append(self.last[1:], fresh)

    def path(self, horizon: int) -> Values:
        last, path = self.last, np.empty(horizon)
        for step in range(horizon):
            path[step] = run(self.weights, last[None])[0]
            last = np.append(last[1:], path[step])
        return path * self.span + self.low

    def tried(self) -> Sequence[str]:
        return (f"k = {WINDOWS}, {HIDDEN} hidden",)

    def _rescale(self, low: float, span: float) -> None:
        """Rescale the output so that weights learned under another normalisation hold under the new one."""
        ratio = self.span / span
        self.weights = {
            **self.weights,
            "out": self.weights["out"] * ratio,
            "shift": self.weights["shift"] * ratio + (self.low - low) / span,
        }


def train(inputs: Values, targets: Values, weights: Weights) -> Weights:
    """Return weights that predict *targets* (n,) from *inputs* (n, k), by Adam on the squared error, from *weights* if
    any.

    Raises ModelsExtraMissing.
    """
    models_extra.require("The forecaster mlstm")
    import torch

    generator = torch.Generator().manual_seed(SEED)
    again = bool(weights)
    parameters = {
        name: torch.tensor(value, dtype=torch.float32, requires_grad=True)
        for name, value in (weights or first_weights()).items()
    }
    x = torch.tensor(inputs, dtype=torch.float32)
    y = torch.tensor(targets, dtype=torch.float32)
    epochs = EPOCHS_AGAIN if again else EPOCHS
    steps = epochs * -(-len(x) // BATCH)
    optimiser = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE)
    done = 0
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for batch in order.split(BATCH):  # type: ignore[no-untyped-call]
            for group in optimiser.param_groups:  # down to a twentieth, along a cosine
                group["lr"] = LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * done / steps)))
            loss = torch.mean((_torch_run(parameters, x[batch]) - y[batch]) ** 2)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters.values(), LARGEST_GRADIENT)
            optimiser.step()
            done += 1
    return {name: value.detach().numpy().astype(np.float64) for name, value in parameters.items()}


def first_weights(hidden: int = HIDDEN, seed: int = SEED) -> Weights:
    """Return random weights of variance 1 / fan-in; forget gates start open."""
    random = np.random.default_rng(seed)
    bias = np.zeros(GATES * hidden)
    bias[2 * hidden : 3 * hidden] = 1.0
    return {
        "mx": random.normal(1.0, 0.3, hidden),
        "mh": random.normal(0.0, hidden**-0.5, (hidden, hidden)),
        "x": random.normal(0.0, 0.5, GATES * hidden),
        "m": random.normal(0.0, hidden**-0.5, (GATES * hidden, hidden)),
        "bias": bias,
        "out": random.normal(0.0, hidden**-0.5, hidden),
        "shift": np.zeros(()),
    }


def _torch_run(weights: dict[str, Any], inputs: Any) -> Any:
    """Compute `run` on tensors."""
    import torch

    h = c = inputs.new_zeros(len(inputs), len(weights["mx"]))
    for x in inputs.T:
        m = x[:, None] * weights["mx"] * (h @ weights["mh"].T)
        gates = torch.addmm(weights["bias"] + x[:, None] * weights["x"], m, weights["m"].T)
        a, i, f, o = gates.chunk(GATES, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(a)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h @ weights["out"] + weights["shift"]


class Mlstm(Forecaster):
    slow_to_fit = True
    needs_models_extra = True
    name = "mlstm"
    model_class = MlstmModel
