"""Line numbers of TOML keys, for errors: tomllib reads values and forgets their lines."""

import re
from pathlib import Path

Key = tuple[str | int, ...]
"""Steps from the top: names of keys, and numbers of elements of arrays."""


class ScenarioError(ValueError):
    """A scenario is invalid; names the file, the line (0 = unknown), the key and the fault."""

    def __init__(self, path: Path, line: int, key: str, what: str) -> None:
        place = str(path) + (f", line {line}" if line else "") + (f", {key}" if key else "")
        super().__init__(f"{place}: {what}")
        self.path, self.line, self.key, self.what = path, line, key, what


class ScenarioProblem(ValueError):
    """A fault at *key* of a scenario, found while it is staged."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key


def wrong_at(path: Path, text: str, key: Key, what: str) -> ScenarioError:
    """Return the error *what* at *key*, with the line of the key or of its nearest parent."""
    lines = _lines(text)
    line = next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), 0)
    return ScenarioError(path, line, _written(key), what)


def _written(key: Key) -> str:
    text = ""
    for step in key:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return text


_HEADER = re.compile(r"\s*(\[\[|\[)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(
    r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_NAME = re.compile(r"[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'")


def _lines(text: str) -> dict[Key, int]:
    """Return the line of each key. Only headers and assignments are parsed, which suffices for errors."""
    lines: dict[Key, int] = {}
    tables: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            names: Key = tuple(name.strip("\"'") for name in _NAME.findall(header[2]))
            if header[1] == "[[":
                tables[names] = tables.get(names, -1) + 1
                table = (*names, tables[names])
            else:
                # [fleet.x] under [[fleet]] belongs to the last element of the array.
                table = (names[0], tables[names[:1]], *names[1:]) if names[:1] in tables else names
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], number)
        elif assignment := _ASSIGNMENT.match(line):
            steps = tuple(name.strip("\"'") for name in _NAME.findall(assignment[1]))
            for end in range(1, len(steps) + 1):
                lines.setdefault((*table, *steps[:end]), number)
    return lines
