"""Kept results of the documentation, each with the hash of the code that it is of: `make evidence` runs what is stale again.

A result is the JSON that `manage.py reproduce` or `python -m tests.bench` printed, in `docs/results/NAME.json`, with its
command, commit, date and hash; its tables are the page `docs/results/NAME.md`, and `docs/evidence.md` lists every headline.

    python -m tests.docs.evidence                   write the pages again, from what is kept
    python -m tests.docs.evidence --list            say what is green and what is stale
    python -m tests.docs.evidence --run [NAME ...]  run what is stale, the oldest first, or these; what has ended is kept,
                                                    so the next call goes on where this one stopped
    python -m tests.docs.evidence --add NAME COMMAND...   run `reproduce X ...` or `bench X ...` and keep it as NAME

The hash is of all modules that the experiment imports, directly or not, without their comments and docstrings, and of data
that lies beside them.
"""

import argparse
import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from controlplane.experiments.experiment import Result, figure
from controlplane.experiments.management.commands.reproduce import show
from controlplane.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "evidence.md"
CLOCK = "wall_s"
MOST_SEEDS = 5
"""Of a list of numbers that is one measure by seed."""
DATA_SUFFIXES = {".toml", ".npz", ".json"}
PARTS = "body", "orelse", "handlers", "finalbody", "cases"


class Kept(NamedTuple):
    name: str
    experiment: str
    """Of the registry, or a module of `tests.bench`."""
    commit: str
    date: str
    hash: str
    """Of the code that it is of; empty: of before there were hashes."""
    result: Result
    before: Mapping[str, Any] = {}
    """`date`, and `ours` by measure, of the last run on other code."""
    took_s: int = 0

    @property
    def is_stale(self) -> bool:
        return self.hash != code_hash(self.experiment)


def kept() -> Iterator[Kept]:
    """Yield all results that are kept, by name."""
    for path in sorted(KEPT.glob("*.json")):
        yield Kept(path.stem, **json.loads(path.read_text()))


# Code


@cache
def code_hash(experiment: str) -> str:
    """Return the hash of the code that *experiment* runs."""
    entry, extra = f"tests.bench.{experiment}", []
    if experiment in EXPERIMENTS:
        entry = EXPERIMENTS[experiment].run.__module__
        extra = [ROOT / f"controlplane/experiments/data/{name}.toml" for name in (experiment, "scenes")]
    modules, found = set[Path](), _files_of({entry})
    while found := found - modules:
        modules |= found
        found = set[Path]().union(*(_read(path)[1] for path in found))
    beside = {path for of in {each.parent for each in modules} for path in of.iterdir() if path.suffix in DATA_SUFFIXES}
    whole = hashlib.sha256()
    for path in (*sorted(modules), *sorted(beside - {ROOT / "pyproject.toml"}), *extra):
        whole.update(f"{path.relative_to(ROOT)} {_read(path)[0]}\n".encode())
    return whole.hexdigest()[:12]


@cache
def _read(path: Path) -> tuple[str, set[Path]]:
    """Return the hash of a file, and the files of the project that it imports itself."""
    data, names = path.read_bytes(), set[str]()
    if path.suffix == ".py":
        nodes: list[Any] = [tree := ast.parse(data)]
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [
                    each
                    for each in node.body
                    if not (isinstance(each, ast.Expr) and isinstance(getattr(each.value, "value", 0), str))
                ]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {f"{getattr(node, 'module', '')}.{each.name}".strip(".") for each in node.names}
            nodes += [each for part in PARTS for each in getattr(node, part, ())]
        data = ast.dump(tree).encode()
    return hashlib.sha256(data).hexdigest(), _files_of(names)


def _files_of(modules: set[str]) -> set[Path]:
    """Return the files of *modules*, if they are the project's, and of the packages around them."""
    paths = {path for name in modules for path in (ROOT / name.replace(".", "/") / "_").parents}
    return {file for path in paths for file in (path / "__init__.py", Path(f"{path}.py")) if file.is_file()}


# Pages


class Printed:
    """A console that keeps what is printed on it."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def print(self, thing: Any) -> None:
        self.things.append(thing)


def page(kept: Kept) -> str:
    """Return what the run printed, as Markdown, with the command and the commit."""
    printed = Printed()
    if kept.experiment in EXPERIMENTS:
        show(EXPERIMENTS[kept.experiment], kept.result, printed)
    else:
        for table in tables(kept.result):
            printed.print(table)
    where = f"kept in [{kept.name}.json]({kept.name}.json)"
    about = f"`{kept.result['command']}` at commit {kept.commit} of {kept.date}, {where}."
    return "\n\n".join([f"# {kept.name}", about, *map(_markdown, printed.things)]) + "\n"


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what a benchmark measured: a table for each part and set of measures, with a row for each case."""
    parts: dict[tuple[str, tuple[str, ...]], list[list[str]]] = {}
    for path, measures in _cases(result, ()):
        part, *case = path if len(path) > 1 else ("", *path)
        parts.setdefault((part, tuple(measures)), []).append([" ".join(case), *map(_cell, measures.values())])
    for (part, names), rows in parts.items():
        table = Table(title=part.replace("_", " ").capitalize() or "Measured")
        heads, body = ["", *names], rows
        if len(rows) == 1:
            heads, body = [rows[0][0], "measured"], [[*each] for each in zip(names, rows[0][1:], strict=True)]
        for at, head in enumerate(heads):
            table.add_column(head.replace("_", " "), justify="right" if at else "left")
        for row in body:
            table.add_row(*row)
        yield table


def _cases(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield each mapping in *value* that has measures, with the names that lead to it."""
    if isinstance(value, list):
        value = {str(at): each for at, each in enumerate(value, 1)}
    measures = {name: each for name, each in value.items() if _is_measure(each) and name != "command"}
    if measures:
        yield path, measures
    for name, each in value.items():
        if isinstance(each, dict) or (isinstance(each, list) and each and isinstance(each[0], dict)):
            yield from _cases(each, (*path, name))


def _is_measure(value: Any) -> bool:
    if not isinstance(value, list):
        return not isinstance(value, dict)
    return 1 < len(value) <= MOST_SEEDS and all(isinstance(each, int | float) for each in value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{_cell(sum(value) / len(value))} ({_cell(min(value))} to {_cell(max(value))})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _markdown(thing: Any) -> str:
    if not isinstance(thing, Table):
        return Text.from_markup(thing).plain
    heads = [str(column.header) for column in thing.columns]
    sides = ["--:" if column.justify == "right" else "---" for column in thing.columns]
    cells = zip(*(map(str, column.cells) for column in thing.columns), strict=True)
    rows = [f"| {' | '.join(row)} |" for row in (heads, *cells)]
    rows.insert(1, f"|{'|'.join(sides)}|")
    return f"{thing.title}:\n\n" + "\n".join(rows)


def evidence() -> str:
    """Return the page of headlines: of each paper, what it reports, what we measure, and whether that is of today's code."""
    rows, others = [], []
    for each in kept():
        state = "stale" if each.is_stale else "green"
        run = f"[{each.name}](results/{each.name}.md) | {each.date} | {each.hash or '-'} | {state} |"
        experiment = EXPERIMENTS.get(each.experiment)
        compared = experiment.compare(each.result) if experiment is not None else []
        for one in compared:
            said = [
                "" if value is None else figure(value, one.unit)
                for value in (one.paper, each.before.get("ours", {}).get(one.measure), one.ours, one.simplest)
            ]
            if one.ours is not None:
                rows.append(f"| {experiment.paper} {one.section} | {one.measure} | {' | '.join(said)} | {run}")
        if not compared:
            others.append(f"| `{each.result['command']}` | {run}")
    heads = "| paper | measure | paper's | before | ours | simplest rule | run | date | code | state |"
    heads += "\n|---|---|--:|--:|--:|--:|---|---|---|---|"
    return "\n".join(
        [ABOUT, "## Against the papers", "", heads, *sorted(rows), "", "## Our own", "",
         "| command | run | date | code | state |", "|---|---|---|---|---|", *sorted(others), ""]
    )  # fmt: skip


ABOUT = """# Evidence

What is measured, and of which code. *Code* is the hash of all modules that a run imports and of their data, without
comments: **green** is of the code as it stands, **stale** of older code. `make evidence` runs what is stale again, the
oldest first, and may be stopped and called again; `python -m tests.docs.evidence --list` names it. *Before* is the same
measure of the last run on other code, *simplest rule* that of the simplest rule that could do the job. A test compares this
page with the results that are kept and with the code.
"""


# Runs

CALLS = {"python", "-m", "--json", "--", "manage.py", "tests.bench"}
"""Words of commands before what they run."""


def run(name: str, command: str, data: Path) -> Kept:
    """Run *command* and keep what it printed. Raises RuntimeError with the last lines of its errors."""
    words = [word for word in shlex.split(command) if word not in CALLS]
    experiment, *words = words[words[0] in ("reproduce", "bench") :]
    began_s = time.monotonic()
    if experiment in EXPERIMENTS:
        known = EXPERIMENTS[experiment].options
        with_data = ["--data", str(data)] if any(each.name == "data" for each in known) else []
        call = ["manage.py", "reproduce", experiment, *words, *with_data, "--json"]
    else:
        folders = {word: data if word == "DATA" else data / word for word in words}
        arguments = [str(folders[word]) if folders[word].exists() else word for word in words]
        call = ["-m", "tests.bench", experiment, "--json", "--", *arguments]
    environment = os.environ | {"PILOTHOUSE_DEBUG": "1"}
    ended = subprocess.run(
        [sys.executable, *call], check=False, cwd=ROOT, capture_output=True, text=True, env=environment
    )
    if ended.returncode:
        raise RuntimeError("\n".join(ended.stderr.splitlines()[-3:]))
    result = json.loads(ended.stdout)
    if experiment not in EXPERIMENTS:
        options = f" -- {shlex.join(words)}" if words else ""
        result = {"command": f"python -m tests.bench {experiment} --json{options}", **result}
    elif "--data" in (said := result["command"].split()):
        at = said.index("--data")
        result["command"] = " ".join(said[:at] + said[at + 2 :])
    took_s = round(time.monotonic() - began_s)
    print(f"{name}: {took_s:,} s", flush=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return keep(name, experiment, result, head.stdout.strip(), took_s)


def keep(name: str, experiment: str, result: Result, commit: str, took_s: int) -> Kept:
    """Keep *result*, of the code as it stands, as *name*."""
    date, code = f"{datetime.now(UTC):%Y-%m-%d}", code_hash(experiment)
    before: Mapping[str, Any] = {}
    for old in [each for each in kept() if each.name == name]:
        before = old.before
        if old.hash != code and experiment in EXPERIMENTS:
            compared = EXPERIMENTS[experiment].compare(old.result)
            before = {"date": old.date, "ours": {one.measure: one.ours for one in compared if one.ours is not None}}
    row = Kept(name, experiment, commit, date, code, _without_clock(result), before, took_s)
    about = {name: value for name, value in row._asdict().items() if name != "name"}
    (KEPT / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    return row


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(each) for key, each in value.items() if key != CLOCK}
    return [_without_clock(each) for each in value] if isinstance(value, list) else value


def write_pages() -> None:
    for each in kept():
        (KEPT / f"{each.name}.md").write_text(page(each))
    PAGE.write_text(evidence())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", nargs="*", metavar="NAME")
    parser.add_argument("--add", nargs=argparse.REMAINDER, metavar="NAME COMMAND")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of traces and lengths")
    given = parser.parse_args()
    failed = 0
    if given.add:
        run(given.add[0], " ".join(given.add[1:]), given.data)
    elif given.run is not None:
        stale = [each for each in sorted(kept(), key=lambda each: each.date) if each.is_stale]
        for each in [each for each in kept() if each.name in given.run] if given.run else stale:
            if "URL" in each.result["command"]:
                print(f"{each.name}: needs a GPU, not run")
                continue
            try:
                run(each.name, each.result["command"], given.data)
            except RuntimeError as error:
                failed += 1
                print(f"{each.name}: {error}", file=sys.stderr, flush=True)
    elif given.list:
        for each in sorted(kept(), key=lambda each: each.date):
            state = "stale" if each.is_stale else "green"
            print(f"{state}  {each.date}  {each.took_s:6,} s  {each.name:24}  {each.result['command']}")
        return 0
    write_pages()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
