"""Parts of the stack with their states and restarts, for the System page."""

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from controlplane.supervisor.child import MARK
from controlplane.supervisor.state import read_parts


class PartState(StrEnum):
    OK = "ok"
    STARTING = "starting"
    WARNING = "warning"
    STANDBY = "standby"
    OFF = "off"
    DOWN = "down"


@dataclass(slots=True)
class Part:
    """*since* is when it came into its state (epoch seconds); *restarts* is None where the supervisor does not start it."""

    name: str
    state: PartState
    detail: str = ""
    since: float | None = None
    restarts: int | None = None
    process_id: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"state": self.state.value}


PART_TITLES = {
    "web": "Gateway and web",
    "redis": "Redis",
    "database": "Database",
    "celery": "Celery workers",
    "beat": "Celery beat",
    "instances": "Instances",
    "lengths": "Length service",
    "kernels": "Compiled kernels",
    "emulator": "Emulated fleet",
    "traffic": "Demo traffic",
}
STATES = {"running": PartState.OK, "starting": PartState.STARTING, "restarting": PartState.DOWN}


def part_title(name: str) -> str:
    return PART_TITLES.get(name, name.capitalize())


def supervised(folder: Path) -> dict[str, Part]:
    """Return the parts that `manage.py up` supervises, if this process is one of them."""
    return {
        row["name"]: Part(**row | {"state": STATES.get(row["state"], PartState.DOWN)})
        for row in (read_parts(folder) if os.environ.get(MARK) == str(folder) else [])
    }


def merged(seen: Iterable[Part], kept: dict[str, Part]) -> list[Part]:
    """Return the parts that this process sees, with the supervisor's view of their processes; then its other parts."""
    kept, parts = dict(kept), []
    for part in seen:
        if below := kept.pop(part.name, None):
            part.restarts, part.process_id = below.restarts, below.process_id
            if below.state != PartState.OK:
                part.state, part.detail = below.state, below.detail
        parts.append(part)
    return [*parts, *kept.values()]


class Since:
    """Remembers the time of each part's last state change."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[PartState, float]] = {}

    def mark(self, parts: Iterable[Part]) -> None:
        for part in parts:
            state, at = self._seen.get(part.name, (None, 0.0))
            if state != part.state:
                at = time.time()
                self._seen[part.name] = part.state, at
            part.since = at
