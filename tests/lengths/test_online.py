"""What is learned of a model while it answers: a tenant's correction, within bounds, then the calibration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import LengthQuery, bundled
from forecasting.lengths.online import MIN_WEIGHT, MOST_CORRECTION, START_WEIGHT, WEIGHT_STEP, Adaptation, Online

READER = bundled()
REGRET, REGRET_EACH = -math.log(1.0 - START_WEIGHT) / WEIGHT_STEP, MIN_WEIGHT / (1.0 - MIN_WEIGHT)


def test_a_correction_is_learned_from_measures() -> None:
    dice, adaptation = np.random.default_rng(1), Adaptation()
    assert adaptation.correction(np.ones(8, np.float32)) == 0.0
    for _ in range(2000):
        row = dice.standard_normal(8).astype(np.float32)
        adaptation.learn(row, 0.6 * row[2] + dice.normal(0, 0.3) - adaptation.correction(row))
    one = np.zeros(8, np.float32)
    one[2] = 1.0
    assert abs(adaptation.correction(one) - 0.6) < 0.15
    one[2], one[5] = 0.0, 1.0
    assert abs(adaptation.correction(one)) < 0.1


def test_no_request_moves_much_and_no_tenant_far() -> None:
    dice, adaptation = np.random.default_rng(2), Adaptation()
    row = 4 * np.ones(48, np.float32)
    adaptation.learn(row, 1000.0)
    assert abs(adaptation.correction(row)) <= MOST_CORRECTION
    assert abs(adaptation.correction(dice.standard_normal(48).astype(np.float32))) < 0.2
    for _ in range(5_000):
        each = dice.uniform(-4, 4, 48).astype(np.float32)
        adaptation.learn(each, dice.choice([-1e9, 1e9]))
        assert abs(adaptation.correction(each)) <= MOST_CORRECTION
    assert math.isfinite(adaptation.correction(row))


def test_a_model_that_misjudges_a_tenant_is_corrected() -> None:
    online, dice = Online(READER), np.random.default_rng(3)
    errors = {"raw": [], "right": []}
    for number in range(600):
        code = number % 2 == 0
        text = f"def f{number}(x): return x\n```\n" if code else f"Is {number} prime?"
        query = LengthQuery(text, len(text) // 4, "m", "acme")
        real = (400 if code else 40) * dice.lognormal(0, 0.2)
        corrected = online.correct(query, 100.0, [50.0, 70.0, 100.0, 150.0, 200.0])
        assert list(corrected.quantiles) == sorted(corrected.quantiles)
        errors["raw"].append(abs(100.0 - real))
        errors["right"].append(abs(corrected.tokens - real))
        online.learn(query, corrected, real)
    assert np.mean(errors["right"][300:]) < 0.6 * np.mean(errors["raw"][300:])
    other = LengthQuery("Is 7 prime?", 3, "m", "other")
    assert online.correct(other, 100.0, [100.0] * 5).calibrated == 100.0


def errors_after(online, dice, tenant, spread, knows, requests=200):
    """Return mean absolute errors in the second half: of `ours`, of the median, of the model alone (`calibrated`)."""
    reals, ours, model = [], [], []
    for number in range(requests):
        query = LengthQuery(f"Question {number % 7}?", 3, "m", tenant, "chat")
        real = 200.0 * dice.lognormal(0, spread)
        said = real * dice.lognormal(0, 0.1) if knows else 200.0 * dice.lognormal(0, 1.0)
        corrected = online.correct(query, said, [said] * 5)
        reals.append(real)
        ours.append(abs(corrected.tokens - real))
        model.append(abs(corrected.calibrated - real))
        online.learn(query, corrected, real)
    half = requests // 2
    constant = np.abs(np.array(reals[half:]) - np.median(reals[:half])).mean()
    return np.mean(ours[half:]), constant, np.mean(model[half:])


@pytest.mark.parametrize("spread", [0.3, 0.8])
def test_a_model_earns_its_weight_by_tenant(spread) -> None:
    online, dice = Online(READER), np.random.default_rng(4)
    ours, constant, model = errors_after(online, dice, "unknown", spread, knows=False)
    assert ours < 1.1 * constant < 0.9 * model
    ours, constant, model = errors_after(online, dice, "known", spread, knows=True)
    assert ours < 0.5 * constant
    assert ours < 1.2 * model


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1, 1e5) | st.sampled_from(["usual", "beyond"])), max_size=120))
def test_no_moment_is_worse_than_the_usual_length_by_more_than_the_regret(requests) -> None:
    """Whatever the model says, and also where an adversary who knows both predictions chooses the length."""
    online, over = Online(READER), 0.0
    query = LengthQuery("Tell me.", 2, "m", "acme", "chat")
    for count, (said, drawn) in enumerate(requests, 1):
        corrected = online.correct(query, said, [said] * 5)
        usual, model = corrected.usual, corrected.calibrated
        real = {"usual": usual, "beyond": usual * (0.5 if model > usual else 2.0)}.get(drawn, drawn)
        over += (abs(corrected.tokens - real) - abs(usual - real)) / max(usual, model)
        assert over <= REGRET + count * REGRET_EACH + 1e-9
        online.learn(query, corrected, real)


@pytest.mark.parametrize("knows", [False, True])
def test_a_new_tenant_starts_where_the_others_of_its_class_say(knows) -> None:
    online, dice = Online(READER), np.random.default_rng(5)
    first = LengthQuery("Tell me.", 2, "m", "first", "chat")
    assert online.correct(first, 900.0, [900.0] * 5).tokens == pytest.approx(900.0)  # there is nothing else
    for number in range(10):
        errors_after(online, dice, f"tenant {number}", 0.5, knows, requests=20)
    new = online.correct(LengthQuery("Tell me.", 2, "m", "new", "chat"), 900.0, [900.0] * 5).tokens
    assert new == pytest.approx(0.2 * 900.0 + 0.8 * 200.0, rel=0.15)
    other = LengthQuery("Tell me.", 2, "m", "new", "batch")
    assert online.correct(other, 900.0, [900.0] * 5).tokens == pytest.approx(900.0)


def test_quantiles_keep_what_they_promise_where_the_model_weighs_little() -> None:
    online, dice, below = Online(READER), np.random.default_rng(6), []
    for number in range(2_000):
        query, real = LengthQuery("Go on.", 2, "m", "acme", "chat"), 200.0 * dice.lognormal(0, 0.5)
        said = 200.0 * dice.lognormal(0, 1.0)
        corrected = online.correct(query, said, [said * factor for factor in (0.5, 0.7, 1.0, 1.4, 2.0)])
        if number >= 500:
            below.append([real <= end for end in corrected.quantiles])
        online.learn(query, corrected, real)
    assert np.mean(below, axis=0) == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.05)


def test_a_cut_answer_moves_nothing_down() -> None:
    online, query = Online(READER), LengthQuery("Tell me all.", 3, "m", "acme", max_tokens=10)
    for _ in range(50):
        online.learn(query, online.correct(query, 100.0, [100.0] * 5), 10.0, cut=True)
    assert online.correct(query, 100.0, [100.0] * 5).tokens == pytest.approx(100.0)
