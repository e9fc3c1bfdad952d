"""State of forecasters and length models in one file: NumPy's .npz, with everything but arrays as JSON in a header."""

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

FORMAT: Final = 1  # of the file, which shipped length models have too; what a state holds is for its reader to check
HEADER: Final = "header"
ARRAY: Final = "@array"  # {"@array": name} stands where an array stood


class StateError(ValueError):
    """A file holds no state that this version can read; the text says which file and why."""


def write_state(path: Path, state: dict[str, Any], compressed: bool = True) -> None:
    """Write *state* to *path* atomically: a concurrent reader has the old file or the new one."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    header = json.dumps({"format": FORMAT, "state": _taken_out(state, arrays)})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            save = np.savez_compressed if compressed else np.savez
            save(file, allow_pickle=False, **{HEADER: np.array(header)}, **arrays)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in the file *path*. Raises StateError for another format, OSError if it cannot be opened."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file[HEADER]))
            version = header.get("format")
            if version != FORMAT:
                raise StateError(f"{path}: format {version!r}, this version reads {FORMAT}")
            state: dict[str, Any] = _put_back(header["state"], {name: file[name] for name in file.files})
            return state
    except (zipfile.BadZipFile, EOFError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise StateError(f"{path}: not a forecaster's state: {error}") from error
    except ValueError as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{path}: not a forecaster's state: {error}") from error


def _taken_out(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Move arrays out of *value* into *arrays*, and make NumPy's scalars plain; return the rest."""
    if isinstance(value, np.ndarray):
        name = f"array_{len(arrays)}"
        arrays[name] = value
        return {ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _taken_out(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_taken_out(item, arrays) for item in value]
    return value


def _put_back(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return arrays[value[ARRAY]]
        return {key: _put_back(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_back(item, arrays) for item in value]
    return value
