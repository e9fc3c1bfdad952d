"""Texts as a frozen encoder sees them, kept in a file: each text is read once in its life."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.text.encoder import Encoder, Progress
from forecasting.workload.files import StateError, read_state, write_state

MOST_TOKENS: Final = 128
"""Read of each text, from its end."""
KEPT: Final = 4096
KEPT_EVERY: Final = 1024
"""Texts after which the file is written: who is interrupted goes on from there."""


class Embeddings:
    """State of the first token and mean over all tokens, side by side, in half precision.

    With a *folder* all are kept, else `KEPT` at most beside those that are asked for.
    """

    def __init__(self, setting: str, folder: Path | None = None, progress: Progress | None = None) -> None:
        self.setting = setting
        self.progress = progress
        self._file = None if folder is None else folder / f"embeddings-{_word(setting)}-{MOST_TOKENS}.npz"
        self._encoder: Encoder | None = None
        self._rows: dict[int, NDArray[np.float16]] = {}
        if self._file is not None and self._file.exists():
            try:
                kept = read_state(self._file)
                self._rows = dict(zip(kept["keys"].tolist(), kept["rows"], strict=True))
            except (StateError, KeyError):
                self._file.unlink()  # of another version: it is made again

    def of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, 2 width) of *texts*."""
        keys = [_key(text) for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._rows}
        waiting = list(missing.items())
        if waiting and self._encoder is None:
            self._encoder = Encoder(self.setting, MOST_TOKENS)
        for start in range(0, len(waiting), KEPT_EVERY):
            part = dict(waiting[start : start + KEPT_EVERY])
            assert self._encoder is not None
            rows = self._encoder.states(list(part.values()), mean=True)
            self._rows.update(zip(part, rows.astype(np.float16), strict=True))
            if self._file is not None:
                self.keep()
            if self.progress:
                self.progress("embed prompts", min(start + KEPT_EVERY, len(waiting)), len(waiting))
        rows = np.stack([self._rows[key] for key in keys]).astype(np.float32)
        if self._file is None:
            for key in list(self._rows)[:-KEPT]:
                del self._rows[key]
        return rows

    def keep(self) -> None:
        """Write what is known to the file."""
        assert self._file is not None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_state(
            self._file, {"keys": np.array(list(self._rows), np.uint64), "rows": np.stack(list(self._rows.values()))}
        )


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def _word(setting: str) -> str:
    """*setting* as part of a file's name."""
    return "".join(each if each.isalnum() else "-" for each in setting)
