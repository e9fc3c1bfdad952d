"""A student's network as NumPy trains it, against torch: what it says, its gradients, and the steps of the optimiser."""

from typing import Any

import numpy as np
import pytest

from forecasting.lengths.query import QUANTILES
from forecasting.lengths.student import MEDIAN, Weights
from forecasting.lengths.student_training import (
    DECAY,
    LONG_COUNT_MORE,
    Bags,
    Optimiser,
    TrainingRows,
    backward,
    forward,
    gradients,
)

COUNT, MEASURES, HIDDEN, WIDTH, NAME_WIDTH, TABLE = 17, 5, 6, 3, 2, 11
HEADS = len(QUANTILES)


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def some_weights(generator: np.random.Generator) -> Weights:
    inputs = MEASURES + 2 * WIDTH + 2 * NAME_WIDTH
    shapes = {
        "table": (TABLE, WIDTH), "models": (3, NAME_WIDTH), "tenants": (4, NAME_WIDTH),
        "first": (inputs, HIDDEN), "first_bias": (HIDDEN,), "second": (HIDDEN, HIDDEN), "second_bias": (HIDDEN,),
        "heads": (HIDDEN, HEADS), "straight": (inputs, HEADS), "heads_bias": (HEADS,),
    }  # fmt: skip
    return {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def some_rows(generator: np.random.Generator) -> TrainingRows:
    return TrainingRows(
        generator.normal(0, 1, (COUNT, MEASURES)).astype(np.float32),
        generator.integers(0, 3, COUNT),
        generator.integers(0, 4, COUNT),
        generator.normal(0, 2, COUNT).astype(np.float32),
        generator.random(COUNT) < 0.4,
    )


def some_bags(generator: np.random.Generator) -> list[Bags]:
    """With empty prompts, and an id that comes twice."""
    rows = [[generator.integers(0, TABLE, generator.integers(0, 6)) for _ in range(COUNT)] for _ in range(2)]
    rows[0][0] = np.array([2, 2, 5])
    rows[1][1] = np.zeros(0, np.int64)
    return [Bags([row.astype(np.int32) for row in each], TABLE) for each in rows]


def torch_loss(torch: Any, tensors: dict[str, Any], rows: TrainingRows, bags: list[Any]) -> tuple[Any, Any]:
    """(log-quantiles, loss) as torch has them, written from the description alone."""
    text = [torch.tensor(bag.toarray()) @ tensors["table"] for bag in bags]
    models, tenants = tensors["models"][torch.tensor(rows.models)], tensors["tenants"][torch.tensor(rows.tenants)]
    row = torch.cat([torch.tensor(rows.measures), *text, models, tenants], dim=1)
    hidden = torch.relu(row @ tensors["first"] + tensors["first_bias"])
    hidden = torch.relu(hidden @ tensors["second"] + tensors["second_bias"])
    heads = hidden @ tensors["heads"] + row @ tensors["straight"] + tensors["heads_bias"]
    steps = torch.nn.functional.softplus(heads)
    columns = [heads[:, MEDIAN]]
    for index in range(MEDIAN - 1, -1, -1):
        columns.insert(0, columns[0] - steps[:, index])
    for index in range(MEDIAN + 1, HEADS):
        columns.append(columns[-1] + steps[:, index])
    logs = torch.stack(columns, dim=1)
    miss = torch.tensor(rows.target)[:, None] - logs
    miss = torch.where(torch.tensor(rows.cut)[:, None], miss.clamp(min=0.0), miss)
    weights = (LONG_COUNT_MORE * logs[:, MEDIAN].detach()).exp()
    levels = torch.tensor(QUANTILES)
    loss = (torch.maximum(levels * miss, (levels - 1.0) * miss).mean(dim=1) * weights).sum() / weights.sum()
    return logs, loss


def test_answers_and_gradients_are_those_of_torch(generator: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    weights, rows = some_weights(generator), some_rows(generator)
    bags = [bag.batch(np.arange(COUNT)) for bag in some_bags(generator)]
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    logs, loss = torch_loss(torch, tensors, rows, bags)
    loss.backward()
    assert forward(weights, rows, bags).logs == pytest.approx(logs.detach().numpy(), abs=1e-5)
    made = gradients(weights, rows, bags)
    assert made.keys() == weights.keys()
    for name, gradient in made.items():
        assert gradient.dtype == np.float32
        assert gradient == pytest.approx(tensors[name].grad.numpy(), abs=1e-5), name


def test_gradients_under_dropout_are_those_of_small_differences(generator: np.random.Generator) -> None:
    weights, rows = some_weights(generator), some_rows(generator)
    bags = [bag.batch(np.arange(COUNT)) for bag in some_bags(generator)]
    precise = {name: value.astype(np.float64) for name, value in weights.items()}
    towards = forward(weights, rows, bags).logs.mean() - 1.0  # any smooth function of the answers will do

    def far(moved: Weights) -> float:
        logs = forward(moved, rows, bags, np.random.default_rng(7)).logs
        return float(((logs - towards) ** 2).sum() / 2)

    made = forward(precise, rows, bags, np.random.default_rng(7))  # type: ignore[arg-type]
    back = backward(made, made.logs - towards)
    for name, gradient in back.items():
        place = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        up, down = ({**precise, name: precise[name].copy()} for _ in range(2))
        up[name][place] += 1e-6
        down[name][place] -= 1e-6
        measured = (far(up) - far(down)) / 2e-6  # type: ignore[arg-type]
        assert gradient[place] == pytest.approx(measured, rel=1e-4), name


def test_the_optimiser_moves_as_torch_does(generator: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    weights = {"one": generator.normal(0, 1, (4, 3)).astype(np.float32)}
    tensor = torch.tensor(weights["one"], requires_grad=True)
    theirs = torch.optim.AdamW([tensor], lr=4e-3, weight_decay=DECAY)
    plan = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=4e-3, total_steps=21)
    ours = Optimiser(weights, 4e-3, 21)
    for _ in range(20):
        gradient = generator.normal(0, 1, (4, 3)).astype(np.float32)
        tensor.grad = torch.tensor(gradient)
        theirs.step()
        plan.step()
        ours.move({"one": gradient})
        assert weights["one"] == pytest.approx(tensor.detach().numpy(), abs=1e-6)


def test_a_batch_of_bags_has_the_prompts_asked_for(generator: np.random.Generator) -> None:
    bags = Bags([np.array([1, 1, 4], np.int32), np.array([], np.int32), np.array([0], np.int32)], 5)
    batch = bags.batch(np.array([2, 1, 0])).toarray()
    third = 1 / np.sqrt(3)
    assert batch.tolist() == pytest.approx(np.array([[1, 0, 0, 0, 0], [0] * 5, [0, 2 * third, 0, 0, third]]))
    dropped = bags.batch(np.array([0]), generator, 1.0)
    assert dropped.nnz == 0
