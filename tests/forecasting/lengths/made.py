"""Samples that are made up, with a length that can be learned from the prompt, the model and the tenant."""

import numpy as np

from forecasting.lengths.query import LengthQuery, Sample

WORDS = tuple(f"word{number}" for number in range(60))


def samples(count: int = 240, seed: int = 1) -> list[Sample]:
    """Essays are long and yes-or-no questions short; model "long" says twice as much as model "short"."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(count):
        essay = bool(generator.integers(0, 2))
        rest = " ".join(generator.choice(WORDS, int(generator.integers(3, 25))))
        text = f"Write a long essay about {rest}." if essay else f"Answer yes or no: {rest}?"
        model = ("short", "long")[index % 2]
        tokens = (300 if essay else 12) * (1 + index % 2) * generator.uniform(0.8, 1.25)
        tenant = f"tenant-{generator.integers(0, 3)}"
        made.append(Sample(LengthQuery(text, len(text) // 4, model=model, tenant=tenant), max(1, round(tokens))))
    return made
