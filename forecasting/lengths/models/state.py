"""A length model's file: what `forecasting.workload.files` writes, with the model's name and version checked."""

from pathlib import Path
from typing import Any

from forecasting.workload.files import StateError, read_state, write_state


def save_model(path: Path, name: str, version: int, state: dict[str, Any]) -> None:
    """Write *state* of the model *name*; a reader meanwhile has the old file or the new one."""
    write_state(path, {"model": name, "version": version, **state})


def load_model(path: Path, name: str, version: int) -> dict[str, Any]:
    """What `save_model` wrote. Raises StateError, a ValueError, for another model or another version."""
    state = read_state(path)
    if state.get("model") != name:
        raise StateError(f"{path}: holds {state.get('model')!r}, not the length model {name!r}")
    if state.get("version") != version:
        raise StateError(f"{path}: {name} of version {state.get('version')!r}, this version reads {version}")
    return state
