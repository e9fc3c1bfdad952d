"""Length models that misbehave, for tests: each as a model in line, and made in a subprocess by name."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from forecasting.lengths import LengthQuery
from forecasting.lengths.query import QUANTILES, Predictions

AROUND = (0.4, 0.7, 1.0, 1.5, 2.5)


class Scripted:
    """Says what *say* says, as trees would."""

    name = "scripted"

    def __init__(self, say: Callable[[LengthQuery], float]) -> None:
        self.say = say
        self.asked = 0

    def predict_one(self, query: LengthQuery) -> tuple[float, list[float]]:
        self.asked += 1
        tokens = self.say(query)
        return tokens, [max(1.0, tokens * each) if tokens >= 0 else tokens for each in AROUND]

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        answers = [self.predict_one(query) for query in queries]
        return Predictions(
            np.array([tokens for tokens, _ in answers], float),
            np.array([around for _, around in answers], float).reshape(len(answers), len(QUANTILES)),
        )


def constant(tokens: str) -> Scripted:
    return Scripted(lambda query: float(tokens))


def slow(seconds: str) -> Scripted:
    def say(query: LengthQuery) -> float:
        until_s = time.thread_time() + float(seconds)
        while time.thread_time() < until_s:
            pass
        return 50.0

    return Scripted(say)


def _at_word(query: LengthQuery) -> float:
    if "die" in query.text:
        os._exit(3)
    if "hang" in query.text:
        time.sleep(3600)
    if "raise" in query.text:
        raise RuntimeError(query.text)
    if "nan" in query.text:
        return float("nan")
    return 50.0


def at_word() -> Scripted:
    """Dies, hangs, raises or says NaN when the prompt says so."""
    return Scripted(_at_word)
