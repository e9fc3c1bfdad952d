"""Results of experiments in the documentation: what a run printed, made from its JSON in `docs/results`.

`python -m tests.docs.results NAME FILE` keeps the JSON that `manage.py reproduce EXPERIMENT --out FILE` wrote as NAME, with
the commit it ran at and without clock times, and writes its tables as the page `docs/results/NAME.md`; likewise what a bench
of `BENCHES` printed with `--json`. `python -m tests.docs.results` writes all pages again; a test compares them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from controlplane.experiments.experiment import Result
from controlplane.experiments.management.commands.reproduce import show
from controlplane.experiments.registry import EXPERIMENTS
from tests.bench import demand_shapes, members

KEPT = Path(__file__).parents[2] / "docs" / "results"
CLOCK = "wall_s"
BENCHES = {"members": members, "demand_shapes": demand_shapes}


class Printed:
    """A console that keeps what is printed on it."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def print(self, thing: Any) -> None:
        self.things.append(thing)


def page(name: str, kept: Result) -> str:
    """Return what the run of *kept* printed, as Markdown, with the command and the commit."""
    printed = Printed()
    if (bench := BENCHES.get(kept["experiment"])) is not None:
        printed.print(bench.table(kept["result"]))
    else:
        show(EXPERIMENTS[kept["experiment"]], kept["result"], printed)
    first = f"`{kept['result']['command']}` at commit {kept['commit']}, kept in [{name}.json]({name}.json)."
    return "\n\n".join([f"# {name}", first, *(_markdown(thing) for thing in printed.things)]) + "\n"


def _markdown(thing: Any) -> str:
    if not isinstance(thing, Table):
        return Text.from_markup(thing).plain
    heads = [str(column.header) for column in thing.columns]
    sides = ["--:" if column.justify == "right" else "---" for column in thing.columns]
    cells = zip(*(map(str, column.cells) for column in thing.columns), strict=True)
    rows = [f"| {' | '.join(row)} |" for row in (heads, *cells)]
    rows.insert(1, f"|{'|'.join(sides)}|")
    return f"{thing.title}:\n\n" + "\n".join(rows)


def kept() -> Iterator[tuple[str, Result]]:
    """All results that are kept, by name."""
    for path in sorted(KEPT.glob("*.json")):
        yield path.stem, json.loads(path.read_text())


def keep(name: str, file: Path, commit: str) -> Result:
    """Keep what a run wrote into *file* as the result *name*."""
    result = _without_clock(json.loads(file.read_text()))
    words = result["command"].split()
    experiment = words[3] if "tests.bench" in words else words[2]
    row = {"experiment": experiment, "commit": commit, "result": result}
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    return row


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(each) for key, each in value.items() if key != CLOCK}
    return [_without_clock(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="of a result; default is all that are kept")
    parser.add_argument("file", nargs="?", type=Path, help="what the run wrote, to be kept as NAME")
    parser.add_argument("--commit", help="that the run was made at (default: the one that is checked out)")
    given = parser.parse_args()
    if given.file:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        keep(given.name, given.file, given.commit or head.stdout.strip())
    for name, result in kept():
        if given.name in (None, name):
            (KEPT / f"{name}.md").write_text(page(name, result))


if __name__ == "__main__":
    sys.exit(main())
