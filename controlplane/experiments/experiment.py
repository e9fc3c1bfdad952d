"""An experiment as data: cases that each vary a scenario, measures of their runs, tables, and the paper's figures."""

import argparse
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from controlplane.simulation.running import Simulated, simulate
from controlplane.terminal import Column
from forecasting.models_extra import ModelsExtraMissing
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import stage
from scheduling.simulation.workload.columns import Workload

Progress = Callable[[str, int, int], None]
"""Called with the step, the amount done and the total."""
Settings = Mapping[str, Any]
Result = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: `--name-with-dashes` on the command line, `name_with_underscores` in `Settings`."""

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str
    flag: bool = False
    among: Sequence[str] = ()
    """Values allowed; empty: any."""
    several: bool = False
    """Values of `among` separated by commas; all by default. A list in `Settings`, in the order of `among`."""
    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf
    group: str = ""
    """At most one option of a group may be given."""
    missing: Callable[[str], str] | None = None
    """Returns why a value of `among` is not installed; empty if it is."""

    @property
    def key(self) -> str:
        """Name in `Settings`."""
        return self.name.replace("-", "_")

    @classmethod
    def read(
        cls,
        name: str,
        table: Mapping[str, Any],
        among: Sequence[str] = (),
        missing: Callable[[str], str] | None = None,
    ) -> "Option":
        """Return the option *name* of an experiment's `[options]`: one of `COMMON` if *table* is empty, of the type of its
        default. *among* and *missing* as `among` and `missing`, where the code knows them.
        """
        if not table:
            return COMMON[name]
        default = table.get("default")
        table = {"type": str if default is None else type(default), "flag": default is False, "among": among, **table}
        return cls(name, missing=missing, **table)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Declare the option on an argparse parser or group."""
        if self.flag:
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        shown = "" if self.default is None else f" (default {self.default:g})" if self.type is float else ""
        shown = shown or ("" if self.default is None else f" (default {self.default})")
        parser.add_argument(f"--{self.name}", type=self.type, default=self.default, help=self.help + shown)

    def parse(self, value: Any) -> Any:
        """Return the setting for the option's *value*. Raise ValueError when it is not allowed."""
        if self.among:
            names = value.split(",") if self.several and value else list(self.among) if self.several else [value]
            for name in names:
                if name not in self.among:
                    raise ValueError(f"--{self.name}: {name!r} is none of {', '.join(self.among)}.")
            return [name for name in self.among if name in names] if self.several else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.above > -math.inf and not self.above < value <= self.at_most:
                raise ValueError(f"--{self.name} must be above {self.above:g} and at most {self.at_most:g}.")
            if value < self.at_least:
                raise ValueError(f"--{self.name} must be at least {self.at_least:g}.")
        return value


SEED = Option("seed", "seed of all random draws", 1, int, at_least=0)
SCALE = Option("scale", "factor on the demand", 1.0, float, above=0.0, at_most=100.0)
DATA = Option("data", "folder of traces and lengths", Path("data"), Path)
SEEDS = Option("seeds", "runs that are averaged, with seeds from the first one on", 1, int, at_least=1)
COMMON = {"seed": SEED, "scale": SCALE, "data": DATA, "seeds": SEEDS}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of the paper and ours."""

    measure: str
    section: str
    paper: float
    ours: float | None
    """None: not measured with these settings."""
    unit: Literal["change", "factor", "share", "tokens", "hours"] = "change"
    simplest: float | None = None
    """The same measure of the simplest rule that could do the job; None: it is what is compared with, or not measured."""


class Case(NamedTuple):
    """One variation of a scenario."""

    about: Row
    """First columns of its row."""
    draw: Callable[[int], tuple[Scenario, Workload | None]]
    """Returns the scenario and its requests for a seed; None for those that the scenario describes."""
    hooks: Mapping[str, Any] = {}
    """Fields of the `Stage` that stand in for the scenario's, such as `advisor`."""

    @classmethod
    def of(cls, about: Row, scenario: Scenario, requests: Workload | None = None, **hooks: Any) -> "Case":
        """Return a case that is the same for every seed."""
        return cls(about, lambda seed: (scenario, requests), hooks)

    def simulate(self, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Simulated:
        """Simulate the case with *seed*."""
        scenario, requests = self.draw(seed)
        return simulate(scenario, replace(stage(scenario, workload=requests), **self.hooks), progress=progress)


def run_cases(
    step: str,
    cases: Iterable[Case],
    measure: Callable[[Simulated], Row],
    progress: Progress,
    seeds: Sequence[int] = (0,),
) -> list[Row]:
    """Return a row for each of *cases*: `about`, and the mean of its measures over *seeds*."""
    rows, listed = [], list(cases)
    for at, case in enumerate(listed):
        progress(step, at, len(listed))
        name = " ".join(str(value) for value in case.about.values())
        within = partial(progress, name) if "control" in case.hooks or "advisor" in case.hooks else None
        rows.append(case.about | mean_of([measure(case.simulate(seed, within)) for seed in seeds]))
    progress(step, len(listed), len(listed))
    return rows


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of *values*, of mappings by key, of lists of one length by place, None left out (nothing to measure).
    Values that are all the same stay; of words and lists of several lengths it is the first.
    """
    known = [value for value in values if value is not None]
    if not known or known.count(known[0]) == len(values):
        return values[0]
    first = known[0]
    if isinstance(first, Mapping):
        return {key: mean_of([value[key] for value in known]) for key in first}
    if isinstance(first, list) and len({*map(len, known)}) == 1:
        return [mean_of(each) for each in zip(*known, strict=True)]
    if isinstance(first, str | list):
        return first
    total = sum(known) / len(known)
    return round(total) if isinstance(first, int) else total


def rounded(values: Any) -> Any:
    """Return *values* for JSON: floats to four places, null for those that are not finite."""
    if isinstance(values, dict):
        return {name: rounded(value) for name, value in values.items()}
    if isinstance(values, list):
        return [rounded(value) for value in values]
    if isinstance(values, float):
        return round(values, 4) if math.isfinite(values) else None
    return values


def change(value: float | None, base: float | None, least: float = 0.0) -> float | None:
    """Return the change from *base* to *value*; None if either is missing or *base* is at most *least*."""
    return None if value is None or base is None or base <= least else round(value / base - 1, 4)


def read_data(name: str) -> dict[str, Any]:
    """Return what the TOML file of the experiment *name* says: what it is, its options, parts, columns and figures."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A paper's evaluation, or our own, that `manage.py reproduce NAME` runs."""

    name: str
    paper: str
    section: str
    measures: str
    """Its measures, in a few words."""
    results: str
    """Page and anchor of its results under docs/papers."""
    options: Sequence[Option]
    run: Callable[[Settings, Progress], Result]
    """Returns a result that can be written as JSON. Raises ValueError where data is missing."""
    show: Callable[[Console, Result], None]
    """Prints a result as tables."""
    compare: Callable[[Result], list[Comparison]] = lambda result: []
    """Returns the paper's figures with those of a result."""

    @classmethod
    def read(
        cls,
        name: str,
        *,
        among: Mapping[str, Sequence[str]] = {},
        missing: Mapping[str, Callable[[str], str]] = {},
        **functions: Any,
    ) -> "Experiment":
        """Return the experiment that its file describes; *among* and *missing* are by option, *functions* `run`, `show` and
        `compare`.
        """
        data = read_data(name)
        options = [
            Option.read(each, table, among.get(each, ()), missing.get(each)) for each, table in data["options"].items()
        ]
        about = {each: data[each] for each in ("paper", "section", "measures", "results")}
        return cls(name=name, options=options, **about, **functions)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Check *values* by option and add defaults. Raise ValueError for a value that is not allowed."""
        return {option.key: option.parse(values.get(option.key, option.default)) for option in self.options}

    def measure(self, settings: Settings, progress: Progress) -> Result:
        """Return the result of `run`: the mean over seeds, unless the experiment has an option of its own for them."""
        if SEEDS not in self.options:
            return self.run(settings, progress)
        seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
        results = [self.run({**settings, "seed": seed}, progress) for seed in seeds]
        return mean_of(results) | {name: settings[name] for name in ("seed", "seeds")}  # type: ignore[no-any-return]

    def check_installed(self, settings: Settings) -> None:
        """Raise ModelsExtraMissing where *settings* name what needs the models extra."""
        for option in self.options:
            value = settings[option.key]
            for name in value if option.several else [value]:
                if option.missing is not None and (reason := option.missing(name)):
                    raise ModelsExtraMissing(reason)


def percent(value: float | None, sign: bool = True) -> str:
    """Format a share or a change as percent; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def share(value: float) -> str:
    """Format a share as percent, to the hundredth."""
    return f"{100 * value:.2f} %"


def seconds(value: float | None) -> str:
    """Format seconds, as milliseconds below one; "-" for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{1000 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def figure(value: float | None, unit: str) -> str:
    """Format a figure of a `Comparison`."""
    if value is None or not math.isfinite(value):
        return "not measured"
    if unit == "hours":
        return f"{value:,.0f} h"
    if unit == "factor":
        return f"x {value:.2f}"
    if unit == "tokens":
        return f"{value:,.1f}"
    return percent(value, sign=unit == "change")


def milliseconds(value: float) -> str:
    return f"{1000 * value:.1f} ms"


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "change": percent,
    "percent": partial(percent, sign=False),
    "share": share,
    "seconds": seconds,
    "ms": milliseconds,
    "whole ms": lambda value: f"{1000 * value:.0f} ms",
    "whole percent": lambda value: f"{100 * value:.0f} %",
    "reduction": lambda value: percent(-value),
}


def columns(table: Iterable[Sequence[str]], **names: Any) -> list[Column]:
    """Return the columns of an experiment's file: lists of head, key and, for numbers, a template or one of `FORMATS`.

    A key such as `changes/usd` is one in a mapping within the row, "-" if it has none; without a key the template is that of
    the whole row. Heads and keys have *names* filled in.
    """
    return [_column(head.format(**names), key.format(**names), *format) for head, key, *format in table]


def _column(head: str, key: str, format: str = "") -> Column:
    def value(row: Any) -> Any:
        if not key:
            return format.format(**row)
        for part in key.split("/"):
            row = None if row is None else row.get(part)
        return row

    return Column(head, value, FORMATS.get(format, format) if key else "{}")
