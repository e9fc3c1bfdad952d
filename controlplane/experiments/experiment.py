"""The interface of an experiment: settings, run, comparison with the paper's figures, tables."""

import argparse
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console

from forecasting.models_extra import ModelsExtraMissing

Progress = Callable[[str, int, int], None]
"""Called with the step, how much of it is done, and of how much."""
Settings = Mapping[str, Any]
Result = dict[str, Any]


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
    rests: Callable[[str], str] | None = None
    """Why a value of `among` cannot be had here; empty if it can."""

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of the paper and ours."""

    measure: str
    section: str
    paper: float
    ours: float | None
    """None: not measured with these settings."""
    unit: Literal["change", "factor", "share", "tokens"] = "change"


class Experiment(ABC):
    """A paper's evaluation, or our own, that `manage.py reproduce NAME` runs."""

    name: ClassVar[str]
    paper: ClassVar[str]
    section: ClassVar[str]
    measures: ClassVar[str]
    """Its measures, in a few words."""
    results: ClassVar[str]
    """Where its results stand: page and anchor under docs/."""
    options: ClassVar[Sequence[Option]]

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Check *values* by option and add defaults. Raise ValueError for a value that is not allowed."""
        by_key = {option.name.replace("-", "_"): option for option in self.options}
        return {key: option.parse(values.get(key, option.default)) for key, option in by_key.items()}

    def check_installed(self, settings: Settings) -> None:
        """Raise ModelsExtraMissing where *settings* name what rests without the models extra."""
        for option in self.options:
            value = settings[option.name.replace("-", "_")]
            for name in value if option.several else [value]:
                if option.rests is not None and (reason := option.rests(name)):
                    raise ModelsExtraMissing(reason)

    @abstractmethod
    def run(self, settings: Settings, progress: Progress) -> Result:
        """Run the experiment; the result can be written as JSON. Raise ValueError where its data is missing."""

    @abstractmethod
    def show(self, console: Console, result: Result) -> None:
        """Print *result* as tables."""

    @abstractmethod
    def compare(self, result: Result) -> list[Comparison]:
        """Return the paper's figures with those of *result*; empty where no paper reports any."""


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
    if unit == "factor":
        return f"x {value:.2f}"
    if unit == "tokens":
        return f"{value:,.1f}"
    return percent(value, sign=unit == "change")
