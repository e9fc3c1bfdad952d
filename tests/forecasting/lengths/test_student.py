"""The student: it learns, keeps within limits, comes back from its file, and learns from features without text."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.files import write_state
from forecasting.lengths import MODELS, LengthQuery, Sample, Student, bundled, score, student_training
from forecasting.lengths.query import QUANTILES
from tests.forecasting.lengths.made import samples


@pytest.fixture(scope="module")
def student() -> Student:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student_training, "LEAST_STEPS", 60)
        return Student().fit(samples(600))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is short: which way it goes shows soon."""
    monkeypatch.setattr(student_training, "LEAST_STEPS", 60)


def test_it_learns_length_and_verbosity(student: Student) -> None:
    essay, question = "Write a long essay about word1 word2 word3.", "Answer yes or no: word4 word5 word6?"
    long, _ = student.predict_one(LengthQuery(essay, 12, model="long"))
    short, _ = student.predict_one(LengthQuery(essay, 12, model="short"))
    brief, _ = student.predict_one(LengthQuery(question, 10, model="long"))
    assert long > 1.3 * short
    assert brief < 0.3 * short
    test = samples(200, seed=2)
    predictions = student.predict([sample.query for sample in test])
    assert score([sample.output_tokens for sample in test], predictions.tokens)["rank_correlation"] > 0.85


@given(
    text=st.text(max_size=300),
    prompt_tokens=st.integers(0, 10**6),
    max_tokens=st.none() | st.integers(1, 5000),
    turns=st.integers(0, 500),
)
def test_predictions_ascend_and_stay_within_limits(
    text: str, prompt_tokens: int, max_tokens: int | None, turns: int
) -> None:
    query = LengthQuery(text, prompt_tokens, model="long", tenant="never seen", max_tokens=max_tokens, turns=turns)
    tokens, quantiles = bundled_once().predict_one(query)
    assert quantiles.shape == (len(QUANTILES),)
    assert np.isfinite(quantiles).all()
    assert (np.diff(quantiles) >= 0).all()
    assert quantiles[0] >= 1.0
    assert 1.0 <= tokens <= (max_tokens or np.inf)
    assert quantiles[-1] <= (max_tokens or np.inf)


_BUNDLED: list[Student] = []


def bundled_once() -> Student:
    if not _BUNDLED:
        _BUNDLED.append(bundled())
    return _BUNDLED[0]


def test_a_file_brings_it_back_whole(student: Student, tmp_path: Path) -> None:
    queries = [sample.query for sample in samples(50, seed=3)]
    student.save(tmp_path / "student.npz")
    again = Student.load(tmp_path / "student.npz")
    assert again.predict(queries).quantiles.tolist() == student.predict(queries).quantiles.tolist()
    assert again.predict(queries).tokens[0] == student.predict_one(queries[0])[0]


def test_files_of_others_are_refused(student: Student, tmp_path: Path) -> None:
    write_state(tmp_path / "later.npz", {"model": "student", "version": 99, **student.state()})
    with pytest.raises(ValueError, match="version"):
        Student.load(tmp_path / "later.npz")
    write_state(tmp_path / "other.npz", {"model": "trees", "version": 1})
    with pytest.raises(ValueError, match="trees"):
        Student.load(tmp_path / "other.npz")
    (tmp_path / "broken.npz").write_bytes(b"no model")
    with pytest.raises(ValueError):
        Student.load(tmp_path / "broken.npz")


@pytest.mark.nightly
def test_it_predicts_and_learns_from_features_without_text(student: Student) -> None:
    test = samples(80, seed=4)
    queries = [sample.query for sample in test]
    blank = [dataclasses.replace(each, text="", prompt_tokens=0, features=student.features(each)) for each in queries]
    direct = student.predict(queries)
    assert student.predict(blank).quantiles.tolist() == direct.quantiles.tolist()
    assert not student.can_read(dataclasses.replace(blank[0], features=b"of another vocabulary"))

    bent = Student.of_state(student.state())
    longer = [Sample(query, 3 * sample.output_tokens) for query, sample in zip(blank, test, strict=True)]
    bent.fit(longer)
    real = [sample.output_tokens for sample in longer]
    after = bent.predict(blank)
    assert score(real, after.tokens)["mae"] < score(real, direct.tokens)["mae"]


def test_it_continues_from_its_weights_and_takes_in_new_names(student: Student, few_steps: None) -> None:
    more = Student.of_state(student.state())
    fresh = [Sample(dataclasses.replace(each.query, model="new"), each.output_tokens) for each in samples(60, seed=5)]
    more.fit(fresh)
    assert more.models == {**student.models, "new": len(student.models) + 1}
    assert more.vocabulary is not None
    assert student.vocabulary is not None
    assert more.vocabulary.fingerprint == student.vocabulary.fingerprint


@pytest.mark.nightly
def test_a_cut_answer_counts_as_at_least_so_long(few_steps: None) -> None:
    limited = [
        Sample(dataclasses.replace(each.query, max_tokens=20), min(each.output_tokens, 20)) for each in samples(300)
    ]
    free = dataclasses.replace(limited[0].query, max_tokens=None, text="Write a long essay about word1.")
    cut = Student().fit(limited).predict_one(free)[0]
    uncut = (
        Student()
        .fit([Sample(dataclasses.replace(each.query, max_tokens=None), each.output_tokens) for each in limited])
        .predict_one(free)[0]
    )
    assert cut > uncut


@pytest.mark.nightly
def test_nothing_to_learn_from_and_asked_too_early() -> None:
    query = LengthQuery("hello", 1)
    with pytest.raises(ValueError):
        Student().fit([])
    for ask in (Student().predict_one, Student().features, lambda each: Student().predict([each])):
        with pytest.raises(ValueError):
            ask(query)
    with pytest.raises(ValueError):
        Student().save(Path("nowhere.npz"))


def test_the_bundled_student_knows_long_from_short() -> None:
    bundled = bundled_once()
    assert Path(sys.modules["forecasting.lengths.student"].BUNDLED).stat().st_size < 4_000_000
    essay = bundled.predict_one(LengthQuery("Write a detailed 1000 word essay on the history of Rome.", 14))[0]
    short = bundled.predict_one(LengthQuery("Answer yes or no: is it raining?", 9))[0]
    assert essay > 2 * short
    assert not bundled.tenants


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
    assert MODELS["student"] is Student
