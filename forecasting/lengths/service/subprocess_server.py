"""The subprocess in which a length model answers: one socket, a batch of queries in, predictions out.

Started by `predictor.SubprocessPredictor`, never by hand. It ends when its parent does: the socket closes, and Linux kills
it should it hang just then.
"""

import ctypes
import gc
import importlib
import pickle
import signal
import socket
import struct
import sys
from itertools import repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

from forecasting.lengths.query import LengthModel, LengthQuery
from forecasting.lengths.service.embedding_cache import EmbeddingCache, Lesson, Limits
from forecasting.models_extra import ModelsExtraMissing

SIZE: Final = struct.Struct("!I")
DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


def load(kind: str, file: str) -> Any:
    """The length model of *kind* in *file*, to be asked alone; the bundled student when *file* is empty.

    An encoder is quantised. Raises ValueError or OSError.
    """
    from forecasting.lengths import MODELS, bundled
    from forecasting.lengths.models.proxy import Proxy

    if not file:
        return bundled()
    if kind not in MODELS:
        raise ValueError(f"There is no length model {kind!r}; there are: {', '.join(sorted(MODELS))}.")
    models: dict[str, Any] = MODELS
    model = models[kind].load(Path(file))
    if isinstance(model, Proxy):
        model.encoder.quantise()
    return model


def check(kind: str, file: str) -> None:
    """Raise what `load` would, as far as that is known without opening an encoder."""
    from forecasting.lengths import MODELS, Student, rests
    from forecasting.workload.files import read_state

    if kind in (Student.name, "") or kind not in MODELS:
        load(kind, file)
    elif (model := read_state(Path(file)).get("model")) != kind:
        raise ValueError(f"{file}: holds {model!r}, not the length model {kind!r}.")
    elif reason := rests(kind):
        raise ModelsExtraMissing(reason)


def made(call: str, arguments: tuple[str, ...]) -> Any:
    """What *call* ("module:function") makes of *arguments*: a LengthModel."""
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def frame(message: Any) -> bytes:
    raw = pickle.dumps(message, protocol=5)
    return SIZE.pack(len(raw)) + raw


def _read(link: socket.socket, size: int) -> bytes:
    """Exactly *size* bytes. Raises EOFError when the other side is gone."""
    data = bytearray()
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class Asked(NamedTuple):
    """A batch."""

    queries: list[LengthQuery]
    numbers: list[int]
    """By which later lessons name the queries."""
    lessons: list[Lesson] = []
    limits: Limits = Limits()
    """Of the embedding cache."""


Said = tuple[float, list[float], int]
"""Tokens, quantiles, and how many lengths of the embedding cache they stand on; 0: the model's answer."""


class Answers:
    """A model and, where it reads prompts by an encoder, the embedding cache before it."""

    def __init__(self, model: LengthModel) -> None:
        self.model = model
        self.cache = EmbeddingCache()

    def of(self, asked: Asked) -> list[Said]:
        """What is said of each query; one that the model cannot bear costs its own answer alone."""
        self.cache.keep_to(asked.limits)
        for lesson in asked.lessons:
            self.cache.learn(lesson)
        return self._said(asked.queries, asked.numbers)

    def _said(self, queries: list[LengthQuery], numbers: list[int]) -> list[Said]:
        try:
            return self._predicted(queries, numbers)
        except Exception:
            if len(queries) == 1:
                return [(float("nan"), [], 0)]
        return [self._said([query], [number])[0] for query, number in zip(queries, numbers, strict=True)]

    def _predicted(self, queries: list[LengthQuery], numbers: list[int]) -> list[Said]:
        embed = getattr(self.model, "predict_and_embed", None)
        if embed is None:
            tokens, quantiles = self.model.predict(queries)
            return list(zip(tokens.tolist(), quantiles.tolist(), repeat(0), strict=False))
        (tokens, quantiles), embeddings = embed(queries)
        said: list[Said] = list(zip(tokens.tolist(), quantiles.tolist(), repeat(0), strict=False))
        for place, (query, number) in enumerate(zip(queries, numbers, strict=True)):
            seen = self.cache.look_up(query, embeddings[place], number)
            known = seen.tokens(query.max_tokens) if seen is not None else 0.0
            if seen is not None and known:
                said[place] = known, list(seen.quantiles(known)), seen.count
        return said


def serve(link: socket.socket, answers: Answers) -> None:
    """Answer batches until the other side closes."""
    while True:
        try:
            (size,) = SIZE.unpack(_read(link, SIZE.size))
            asked = pickle.loads(_read(link, size))  # noqa: S301 - from our own parent alone
        except (EOFError, OSError):
            return
        link.sendall(frame(answers.of(asked)))


def main(descriptor: int, call: str, *arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the socket
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as link:
        answers = Answers(made(call, arguments))
        answers.of(Asked([LengthQuery("What is compiled on the first call is compiled now.", 12)], [0]))
        gc.freeze()
        link.sendall(frame("ready"))
        serve(link, answers)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
