import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.workload import mlstm
from forecasting.workload.mlstm import WINDOWS, MlstmModel, cell, first_weights, run, train


def plain_cell(weights, x, h, c):
    """Compute the equations of the paper, number by number, for one sequence."""
    size = len(h)

    def sigmoid(value):
        return 1.0 / (1.0 + math.exp(-value))

    m = [weights["mx"][j] * x * sum(weights["mh"][j][k] * h[k] for k in range(size)) for j in range(size)]
    gate = [
        weights["x"][j] * x + sum(weights["m"][j][k] * m[k] for k in range(size)) + weights["bias"][j]
        for j in range(4 * size)
    ]
    next_h, next_c = [], []
    for j in range(size):
        a, i, f, o = (gate[part * size + j] for part in range(4))
        next_c.append(sigmoid(f) * c[j] + sigmoid(i) * math.tanh(a))
        next_h.append(sigmoid(o) * math.tanh(next_c[j]))
    return next_h, next_c


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4))
def test_the_cell_is_that_of_the_paper(seed, hidden, batch):
    random = np.random.default_rng(seed)
    weights = first_weights(hidden, seed)
    weights["bias"] = random.normal(0, 1, 4 * hidden)
    x, h, c = random.normal(0, 1, batch), random.normal(0, 1, (batch, hidden)), random.normal(0, 1, (batch, hidden))
    found_h, found_c = cell(weights, x, h, c)
    for row in range(batch):
        expected_h, expected_c = plain_cell(weights, x[row], h[row], c[row])
        assert np.allclose(found_h[row], expected_h)
        assert np.allclose(found_c[row], expected_c)


@pytest.mark.nightly
@pytest.mark.gate
def test_torch_runs_the_same_network():
    import torch

    random = np.random.default_rng(1)
    weights = first_weights(8, 1)
    inputs = random.uniform(0, 1, (5, 10))
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in weights.items()}
    with torch.no_grad():
        by_torch = mlstm._torch_run(tensors, torch.tensor(inputs, dtype=torch.float64)).numpy()
    assert np.allclose(by_torch, run(weights, inputs), atol=1e-6)


def wave(count, season=48):
    return 1000 + 800 * np.sin(2 * np.pi * np.arange(count) / season)


@pytest.fixture(scope="module")
def taught():
    """Return a briefly trained network: enough if only the arithmetic matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlstm, "EPOCHS", 2)
        model = MlstmModel()
        model.fit(wave(216), 48)
        yield model


@pytest.mark.nightly
def test_it_learns_a_wave():
    model = MlstmModel()
    model.fit(wave(432), 48)
    truth = wave(434)[432:]
    assert np.abs(model.path(2) - truth).max() < 0.25 * abs(truth[1] - wave(432)[-1])


def test_training_lowers_the_error(taught):
    inputs = np.array([taught.last])
    assert np.isfinite(run(taught.weights, inputs)).all()
    values = (wave(216) - taught.low) / taught.span
    samples = np.array([values[end - WINDOWS : end] for end in range(WINDOWS, 216)])
    before = np.mean((run(first_weights(), samples) - values[WINDOWS:]) ** 2)
    after = np.mean((run(taught.weights, samples) - values[WINDOWS:]) ** 2)
    assert after < 0.7 * before


def test_further_windows_come_stepwise(taught):
    """A prediction becomes the last input of the next, as in PreServe's two-step look-ahead."""
    first, second = taught.path(2)
    twin = MlstmModel()
    twin.restore(taught.state())
    twin.append(first)
    assert twin.path(1)[0] == pytest.approx(second)
    other = MlstmModel()
    other.restore(taught.state())
    other.append(math.nan)
    assert other.path(1)[0] == pytest.approx(second)


def test_another_normalisation_changes_no_prediction(taught):
    twin = MlstmModel()
    twin.restore(taught.state())
    inputs = np.random.default_rng(0).uniform(0, 1, (1, WINDOWS))
    before = run(twin.weights, inputs)[0] * twin.span + twin.low
    low, span = twin.low - 50, twin.span * 1.7
    twin._rescale(low, span)
    # The output means the same rate; its inputs come in the new scale, to which daily training gets used.
    assert run(twin.weights, inputs)[0] * span + low == pytest.approx(before)


def test_the_same_data_gives_the_same_model(monkeypatch):
    monkeypatch.setattr(mlstm, "EPOCHS", 2)
    random = np.random.default_rng(2)
    inputs, targets = random.uniform(0, 1, (100, WINDOWS)), random.uniform(0, 1, 100)
    one, two = train(inputs, targets, {}), train(inputs, targets, {})
    assert all(np.array_equal(one[name], two[name]) for name in one)
    again = train(inputs, targets, one)
    assert not np.array_equal(again["m"], one["m"])


def test_gaps_are_never_learned_to_be_predicted(monkeypatch):
    seen = []
    monkeypatch.setattr(
        mlstm, "train", lambda inputs, targets, weights: (seen.append((inputs, targets)), first_weights())[1]
    )
    values = wave(240)
    values[100:110] = np.nan
    MlstmModel().fit(values, 48)
    inputs, targets = seen[0]
    assert len(targets) == 240 - WINDOWS - 10
    assert np.isfinite(inputs).all()
    assert inputs.min() >= 0.0
    assert inputs.max() <= 1.0
