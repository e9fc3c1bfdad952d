"""Accuracy and speed of length models with fewer layers and 8-bit integers, and value of the embedding cache's
similarity.

Each kind of length model is fitted to public answers with all layers of its encoder and with fewer, then evaluated on
held-out prompts in full precision and in 8-bit integers, as served. Times are of one prompt on one core.

The cache comes after the exact and the lexical one, as in the gateway: it only sees their misses. It is fed the prompts
of three sets in random order. The similarity is chosen on training prompts and evaluated on test prompts.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from controlplane.experiments.length_models import thinned
from forecasting.lengths import MODELS, Fitting
from forecasting.lengths.caches import EmbeddingCache, LengthCache, Lesson, Limits
from forecasting.lengths.datasets import Split, read_sets
from forecasting.lengths.proxy import Proxy
from forecasting.lengths.query import Sample
from forecasting.lengths.scoring import class_edges, score

KINDS: Final = ("ssjf-reg-l1", "ssjf-cls", "preserve")
EFFORT: Final = {"tuned": 320, "read": 800, "head_epochs": 15, "most_tokens": 96}
TEST_PROMPTS: Final = 60
"""Of each set, at most."""
ALONE: Final = 100
"""Prompts timed one by one."""
PAIRS: Final = 50_000
STREAM: Final = ("stanford_alpaca_5k", "gpteacher", "codealpaca")
"""Sets with answers of a single model, so that a prompt has one length."""
PROMPTS: Final = 2_500
"""Of the stream, from either part."""
SIMILARITIES: Final = (0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99)
ENTRIES: Final = 2_000
LEXICAL: Final = 0.85


def measured(folder: Path, layers: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Return accuracy and time of *kinds* on the sets in *folder*, with all layers and with *layers* (0: only with
    all).
    """
    split = read_sets(folder)
    edges = class_edges([sample.output_tokens for sample in split.training])
    test = thinned(split.test, TEST_PROMPTS, seed=1)
    result: dict[str, Any] = {
        "trained_on": len(split.training),
        "tested_on": len(test),
        "prompts": len({sample.query.text for sample in test}),
        "models": {},
    }
    cache: dict[str, Any] = {}
    for kind in kinds:
        for kept in dict.fromkeys((0, layers)):
            model = _fitted(kind, kept, split)
            name = f"{kind}, {kept or 'all'} layers"
            result["models"][name] = {"full": _row(model, test, edges)}
            model.encoder.quantise()
            result["models"][name]["8-bit"] = _row(model, test, edges)
            print(f"lengths: {name}: {result['models'][name]}", file=sys.stderr)
            if not cache:
                cache = {part: _similarities(model, getattr(split, part)) for part in ("training", "test")}
                cache["encoder"] = name
    return {**result, "embedding_cache": cache}


def _fitted(kind: str, layers: int, split: Split) -> Proxy:
    print(f"lengths: fit {kind} with {layers or 'all'} layers", file=sys.stderr)
    made: Any = MODELS[kind]
    model: Proxy = made(Fitting(**EFFORT, layers=layers))
    return model.fit(split.training)


def _row(model: Proxy, test: Sequence[Sample], edges: Any) -> dict[str, float]:
    real = np.array([sample.output_tokens for sample in test], float)
    said = model.predict([sample.query for sample in test]).tokens
    measures = score(real, said, edges)
    p50_ms, p99_ms = _milliseconds(model, test)
    return {
        "mae": measures["mae"],
        "five_class_accuracy": measures["five_class_accuracy"],
        "pairs_in_order": in_order(real, said),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
    }


def in_order(real: Any, said: Any, pairs: int = PAIRS) -> float:
    """Return the share of random pairs of unlike lengths that *said* orders as *real* does; a tie counts half."""
    one, other = np.random.default_rng(3).integers(0, len(real), (2, pairs))
    unlike = real[one] != real[other]
    right = np.sign(real[one] - real[other]) * np.sign(said[one] - said[other])
    return float(((right[unlike] + 1) / 2).mean())


def _milliseconds(model: Proxy, test: Sequence[Sample]) -> tuple[float, float]:
    """Return p50 and p99 of the processor time of one prompt."""
    by_text = {sample.query.text: sample.query for sample in test}
    queries = list(by_text.values())
    taken = []
    for query in queries[:: max(1, len(queries) // ALONE)]:
        began = time.thread_time()
        model.predict([query])
        taken.append(1000 * (time.thread_time() - began))
    p50_ms, p99_ms = np.percentile(taken, [50, 99]).tolist()
    return p50_ms, p99_ms


def _similarities(model: Proxy, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return, for each of `SIMILARITIES`, the share of requests answered by the embedding cache, its error there
    and the model's.
    """
    stream = [sample for sample in samples if sample.query.tenant in STREAM]
    order = np.random.default_rng(4).permutation(len(stream))[:PROMPTS]
    stream = [stream[index] for index in order]
    predictions, embeddings = model.predict_and_embed([sample.query for sample in stream])
    lexical = LengthCache(Limits(10_000, 86_400.0, LEXICAL))
    missed = []
    for at, sample in enumerate(stream):
        key = lexical.key(sample.query)
        if key is None or (lexical.exact(key) is None and lexical.nearest(key) is None):
            missed.append(at)
        if key is not None:
            lexical.learn(key, sample.output_tokens, cut=False)
    real = np.array([sample.output_tokens for sample in stream], float)
    result: dict[str, Any] = {"requests": len(stream), "missed_by_the_others": len(missed)}
    for similarity in SIMILARITIES:
        cache = EmbeddingCache()
        cache.set_limits(Limits(ENTRIES, 86_400.0, similarity))
        hits, errors = [], []
        for at in missed:
            seen = cache.look_up(stream[at].query, embeddings[at], at + 1)
            estimate = seen and seen.estimate(None)
            if estimate:
                hits.append(at)
                errors.append(abs(estimate.tokens - real[at]))
            cache.learn(Lesson(at + 1, real[at], False))
        result[f"{similarity:g}"] = {
            "hits": len(hits),
            "share": len(hits) / len(stream),
            "mae": float(np.mean(errors)) if hits else 0.0,
            "mae_of_the_model": float(np.abs(predictions.tokens[hits] - real[hits]).mean()) if hits else 0.0,
        }
    print(f"lengths: embedding cache: {result}", file=sys.stderr)
    return result
