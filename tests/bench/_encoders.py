"""Accuracy and speed of length models with fewer layers and 8-bit integers.

Each kind of length model is fitted to public answers with all layers of its encoder and with fewer, then evaluated on
held-out prompts in full precision and in 8-bit integers, as served. Times are of one prompt on one core.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from controlplane.experiments.length_models import thinned
from forecasting.lengths import MODELS, Fitting
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
    for kind in kinds:
        for kept in dict.fromkeys((0, layers)):
            model = _fitted(kind, kept, split)
            name = f"{kind}, {kept or 'all'} layers"
            result["models"][name] = {"full": _row(model, test, edges)}
            model.encoder.quantise()
            result["models"][name]["8-bit"] = _row(model, test, edges)
            print(f"lengths: {name}: {result['models'][name]}", file=sys.stderr)
    return result


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
