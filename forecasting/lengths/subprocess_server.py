"""The subprocess in which a length model answers: one socket, a batch of queries in, predictions out.

Started by `predictor.SubprocessPredictor`, never by hand. It ends when its parent does: the socket closes, and Linux
kills it should it hang just then.
"""

import ctypes
import gc
import importlib
import pickle
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final

from forecasting.lengths.model import LengthModel
from forecasting.lengths.query import Estimate, LengthQuery
from forecasting.models_extra import ModelsExtraMissing

SIZE: Final = struct.Struct("!I")
DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


def load(kind: str, file: str) -> LengthModel:
    """Return the length model of *kind* in *file*, to be asked alone; the bundled trees if *file* is empty.

    Raises ValueError or OSError.
    """
    from forecasting.lengths import MODELS, bundled

    if not file:
        return bundled()
    if kind not in MODELS:
        raise ValueError(f"There is no length model {kind!r}; there are: {', '.join(sorted(MODELS))}.")
    model = MODELS[kind].load(Path(file))
    model.quantise()
    return model


def check(kind: str, file: str) -> None:
    """Raise as `load` would, as far as that is known without opening an encoder."""
    from forecasting.files import read_state
    from forecasting.lengths import MODELS, Trees, unavailable_reason

    if kind in (Trees.name, "") or kind not in MODELS:
        load(kind, file)
    elif (model := read_state(Path(file)).get("model")) != kind:
        raise ValueError(f"{file}: holds {model!r}, not the length model {kind!r}.")
    elif reason := unavailable_reason(kind):
        raise ModelsExtraMissing(reason)


def made(call: str, arguments: tuple[str, ...]) -> Any:
    """Call *call* ("module:function") with *arguments*; return the LengthModel."""
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def frame(message: Any) -> bytes:
    raw = pickle.dumps(message, protocol=5)
    return SIZE.pack(len(raw)) + raw


def _read(link: socket.socket, size: int) -> bytes:
    """Return exactly *size* bytes. Raises EOFError if the other side is gone."""
    data = bytearray()
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def answer(model: LengthModel, queries: list[LengthQuery]) -> list[Estimate]:
    """Return an estimate for each query; one that the model fails on costs its own answer alone."""
    try:
        tokens, quantiles = model.predict(queries)
        return [Estimate(*each) for each in zip(tokens.tolist(), map(tuple, quantiles.tolist()), strict=False)]
    except Exception:
        if len(queries) == 1:
            return [Estimate(float("nan"), ())]
    return [answer(model, [query])[0] for query in queries]


def serve(link: socket.socket, model: LengthModel) -> None:
    """Answer batches until the other side closes."""
    while True:
        try:
            (size,) = SIZE.unpack(_read(link, SIZE.size))
            queries = pickle.loads(_read(link, size))  # noqa: S301 - from our own parent alone
        except (EOFError, OSError):
            return
        link.sendall(frame(answer(model, queries)))


def main(descriptor: int, call: str, *arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the socket
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as link:
        model = made(call, arguments)
        answer(model, [LengthQuery("What is compiled on the first call is compiled now.", 12)])
        gc.freeze()
        link.sendall(frame("ready"))
        serve(link, model)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
