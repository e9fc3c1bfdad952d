"""Parser of the stack's output: tracebacks, and lines at WARNING or worse by kind, within and outside kills."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.bench._soak.killer import Kill

LEVEL = re.compile(r"(?:^|[\s:\[])(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:[\s/\]:]|$)")
LEVEL_WITHIN = 90  # characters; a level after that is part of a message
TROUBLE = re.compile(
    r" ended \(| was not ready | failed \(|cannot be started|never retrieved|Exception ignored|\w+Warning: "
)
TRACEBACK = "Traceback (most recent call last)"
VARIES = re.compile(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b[0-9a-f]{12,}\b|\d+(?:[.,:-]\d+)*")
KIND_CHARS = 160
BEFORE_S, AFTER_S = 0.5, 15.0


@dataclass(slots=True)
class Lines:
    """Findings in a stack's output."""

    tracebacks: int = 0
    outside: Counter[str] = field(default_factory=Counter)  # error lines outside kills, by kind
    within: Counter[str] = field(default_factory=Counter)  # those explained by a kill
    traced: list[str] = field(default_factory=list)  # the last line of each traceback, if known

    @property
    def errors(self) -> int:
        return self.outside.total()


def read(stamped: Iterable[tuple[float, str]], kills: Iterable[Kill]) -> Lines:
    """Classify the lines of a stack, each with its arrival in epoch seconds."""
    judged, kills = Lines(), list(kills)
    tracing: dict[str, bool] = {}  # parts whose traceback is being printed
    for at, line in stamped:
        part, bar, text = line.partition(" | ")
        part, text = (part.strip(), text) if bar else ("", line)
        if tracing.get(part) and text and not text.startswith((" ", "Traceback")):
            judged.traced.append(f"{part}: {text[:KIND_CHARS]}")
            tracing[part] = False
        if TRACEBACK in text:
            judged.tracebacks += 1
            tracing[part] = True
        elif not _is_error(text):
            continue
        kind = f"{part}: {VARIES.sub('#', text)[:KIND_CHARS]}".lstrip(": ")
        explained = any(kill.covers(at - BEFORE_S, at + BEFORE_S, AFTER_S) for kill in kills)
        (judged.within if explained else judged.outside)[kind] += 1
    return judged


def _is_error(text: str) -> bool:
    level = LEVEL.search(text[:LEVEL_WITHIN])  # the first: the rest is the message
    return level[1] in ("WARNING", "ERROR", "CRITICAL") if level else TROUBLE.search(text) is not None
