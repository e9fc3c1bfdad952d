"""Every length model keeps the one interface; those on an encoder run on a tiny random one."""

from pathlib import Path

import numpy as np
import pytest

from forecasting.files import write_state
from forecasting.lengths import MODELS, Fitting, LengthModel, LengthQuery, Sample, student_training
from forecasting.lengths.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.encoder import TINY
from forecasting.lengths.proxy import Spread
from forecasting.lengths.query import QUANTILES
from forecasting.lengths.student import Student
from forecasting.trees import Ensemble
from tests.examples import at_night_but
from tests.forecasting.lengths.made import samples

SMALL = Fitting(TINY, tuned=48, read=60, head_epochs=3, most_tokens=24, trees=10)


def new(name: str) -> LengthModel:
    return MODELS[name](SMALL)


@pytest.mark.parametrize("name", at_night_but(["student", "ssjf-cls", "preserve", "trees", "ours"], MODELS))
def test_every_model_fits_predicts_and_comes_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_training, "LEAST_STEPS", 10)  # how well it predicts is another test's business
    model = new(name).fit(samples(150))
    queries = [sample.query for sample in samples(30, seed=2)]
    queries += [
        LengthQuery("", 7, max_tokens=3),
        LengthQuery("unseen " * 900, 900, model="nobody", tenant="none", max_tokens=1),
    ]
    predictions = model.predict(queries)
    assert predictions.tokens.shape == (len(queries),)
    assert predictions.quantiles.shape == (len(queries), len(QUANTILES))
    assert np.isfinite(predictions.quantiles).all()
    assert (np.diff(predictions.quantiles, axis=1) >= 0).all()
    assert predictions.tokens.min() >= 1.0
    assert predictions.tokens[-2] <= 3.0
    assert predictions.quantiles[-1].tolist() == [1.0] * len(QUANTILES)
    assert len(model.predict([]).tokens) == 0

    model.save(tmp_path / "model.npz")
    again = MODELS[name].load(tmp_path / "model.npz").predict(queries)
    assert again.tokens.tolist() == pytest.approx(predictions.tokens.tolist(), rel=1e-5)
    assert again.quantiles.ravel().tolist() == pytest.approx(predictions.quantiles.ravel().tolist(), rel=1e-5)

    write_state(tmp_path / "later.npz", {"model": name, "version": 99})
    with pytest.raises(ValueError, match="version"):
        MODELS[name].load(tmp_path / "later.npz")


@pytest.mark.parametrize("name", MODELS)
def test_nothing_to_fit_and_asked_too_early(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        new(name).fit([])
    with pytest.raises(ValueError):
        new(name).predict([LengthQuery("hello", 1)])
    with pytest.raises(ValueError):
        new(name).save(tmp_path / "model.npz")


def test_class_mean_is_the_mean_of_its_class() -> None:
    made = [Sample(LengthQuery("x", 1, model="a", slo_class="slow"), tokens) for tokens in range(10, 30)]
    made += [Sample(LengthQuery("x", 1, model="a", slo_class="fast"), 100) for _ in range(20)]
    predictions = ClassMean().fit(made).predict([made[0].query, made[-1].query, LengthQuery("x", 1, model="b")])
    assert predictions.tokens.tolist() == pytest.approx([19.5, 100.0, np.mean([each.output_tokens for each in made])])


def test_the_histogram_moves_with_its_tenant() -> None:
    query = LengthQuery("x", 1, model="a", tenant="t")
    before = [Sample(query, 50)] * 3000
    still = TenantHistogram().fit(before + [Sample(query, 800)] * 300).predict([query]).tokens[0]
    moved = TenantHistogram().fit(before + [Sample(query, 800)] * 2000).predict([query]).tokens[0]
    assert still == pytest.approx(50, rel=0.1)
    assert moved == pytest.approx(800, rel=0.1)


def test_prompt_buckets_double() -> None:
    made = [Sample(LengthQuery("x", size), size) for size in (4, 5, 6, 7, 100, 110) for _ in range(10)]
    model = PromptBuckets().fit(made)
    predictions = model.predict([LengthQuery("x", 5), LengthQuery("x", 120), LengthQuery("x", 9999)])
    assert predictions.tokens.tolist() == pytest.approx([5.5, 105.0, 6.5])


def test_an_ensemble_predicts_as_scikit_learn_does() -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    generator = np.random.default_rng(1)
    rows = generator.standard_normal((400, 5)).astype(np.float32)
    target = rows[:, 0] * 2 + np.abs(rows[:, 1])
    model = HistGradientBoostingRegressor(
        loss="quantile", quantile=0.5, max_iter=20, early_stopping=False, random_state=1
    )
    model.fit(rows, target)
    predictions = Ensemble.of_boosting(model).predict(rows)
    assert predictions.tolist() == pytest.approx(model.predict(rows).tolist(), abs=1e-5)


def test_a_spread_covers_what_it_promises() -> None:
    generator = np.random.default_rng(1)
    predicted = generator.uniform(10, 500, 4000)
    real = predicted * generator.lognormal(0.1, 0.5, 4000)
    queries = [LengthQuery("x", 1)] * 2000
    spread = Spread().fit(real[:2000], predicted[:2000])
    predictions = spread.around(predicted[2000:], queries)
    for column, level in enumerate(QUANTILES):
        assert (real[2000:] <= predictions.quantiles[:, column]).mean() == pytest.approx(level, abs=0.05)


def test_an_unfitted_spread_says_nothing_more_than_the_figure() -> None:
    assert Spread().fit([], []).around([7.0], [LengthQuery("x", 1)]).quantiles.tolist() == [[7.0] * 5]


def test_the_student_is_what_comes_first() -> None:
    assert next(iter(MODELS.values())) is Student
