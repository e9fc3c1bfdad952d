"""Every length model keeps the one interface; those on an encoder run on a tiny random one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forecasting.files import write_state
from forecasting.lengths import MODELS, Fitting, LengthModel, LengthQuery, Sample, Trees, bundled, score
from forecasting.lengths.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.encoder import TINY
from forecasting.lengths.proxy import Spread
from forecasting.lengths.query import QUANTILES
from forecasting.lengths.trees import BUNDLED
from forecasting.trees import Ensemble
from tests.examples import at_night_but
from tests.forecasting.lengths.made import samples

SMALL = Fitting(TINY, tuned=48, read=60, head_epochs=3, most_tokens=24, trees=10)


def new(name: str) -> LengthModel:
    return MODELS[name](SMALL)


@pytest.mark.parametrize("name", at_night_but(["ssjf-cls", "preserve", "trees", "ours"], MODELS))
def test_every_model_fits_predicts_and_comes_back(name: str, tmp_path: Path) -> None:
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


# Trees


@pytest.fixture(scope="module")
def trees() -> Trees:
    return Trees(replace(SMALL, trees=60)).fit(samples(600))


def test_trees_learn_length_and_verbosity(trees: Trees) -> None:
    essay, question = "Write a long essay about word1 word2 word3.", "Answer yes or no: word4 word5 word6?"
    long, short = (trees.predict_one(LengthQuery(essay, 12, model=name))[0] for name in ("long", "short"))
    assert long > 1.1 * short
    assert trees.predict_one(LengthQuery(question, 10, model="long"))[0] < 0.7 * short
    test = samples(200, seed=2)
    predictions = trees.predict([sample.query for sample in test])
    assert score([sample.output_tokens for sample in test], predictions.tokens)["rank_correlation"] > 0.85


def test_trees_predict_and_learn_from_features_without_text(trees: Trees) -> None:
    test = samples(80, seed=4)
    queries = [sample.query for sample in test]
    blank = [replace(each, text="", prompt_tokens=0, features=trees.features(each)) for each in queries]
    direct = trees.predict(queries)
    assert trees.predict(blank).quantiles.tolist() == direct.quantiles.tolist()
    assert not trees.can_read(replace(blank[0], features=b"of another text score"))
    longer = [Sample(query, 3 * sample.output_tokens) for query, sample in zip(blank, test, strict=True)]
    after = Trees(SMALL, trees.text).fit(longer).predict(blank)
    real = [sample.output_tokens for sample in longer]
    assert score(real, after.tokens)["mae"] < score(real, direct.tokens)["mae"]


def test_unknown_names_are_as_usual(trees: Trees) -> None:
    known = [replace(samples(1)[0].query, model=name) for name in ("short", "long")]
    low, high = sorted(trees.predict(known).tokens)
    assert low <= trees.predict_one(replace(known[0], model="unknown", tenant="unknown"))[0] <= high


def test_features_that_never_varied_are_scaled_to_nothing(trees: Trees) -> None:
    query = samples(1)[0].query
    more = trees.scaled(replace(query, turns=50, tools=100))
    assert more.tolist() == trees.scaled(query).tolist()
    assert np.abs(more).max() <= 4.0


def test_the_bundled_trees_are_small_quick_to_load_and_know_long_from_short() -> None:
    assert BUNDLED.stat().st_size < 1_000_000
    model = bundled()
    essay = model.predict_one(LengthQuery("Write a detailed 1000 word essay on the history of Rome.", 14))[0]
    assert essay > 2 * model.predict_one(LengthQuery("Answer yes or no: is it raining?", 9))[0]
    assert not any(name.startswith("tenant ") and name != "tenant " for name in model.habits.means)


@pytest.mark.nightly
def test_importing_and_asking_need_no_heavy_package() -> None:
    code = (
        "import sys; from forecasting.lengths import LengthQuery, bundled; bundled().predict_one(LengthQuery('hello', 1));"
        "print([name for name in ('torch', 'transformers', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_models_are_their_own() -> None:
    assert all(model.name == name for name, model in MODELS.items())
