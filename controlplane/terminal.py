"""What management commands print: tables, and a progress bar while they work."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH = 170  # where no terminal says otherwise


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Text is at the left and folds; what has a format is a figure, at the right."""

    head: str
    value: str | Callable[[Any], Any]
    """The key of a row, or what makes the value of a row."""
    format: str | Callable[[Any], str] = ""
    """A template such as "{:.2f} s", or what makes text of a value; "-" stands for None in a template."""

    def cell(self, row: Any) -> str:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if callable(self.format):
            return self.format(value)
        return "-" if value is None else (self.format or "{}").format(value)


def table(
    title: str, columns: Sequence[Column], rows: Iterable[Any], style: Callable[[Any], str] | None = None
) -> Table:
    """*rows* as a table; *style* is of each row."""
    shown = Table(title=title)
    for column in columns:
        if column.format:
            shown.add_column(column.head, justify="right")
        else:
            shown.add_column(column.head, overflow="fold")
    for row in rows:
        shown.add_row(*(column.cell(row) for column in columns), style=style(row) if style else "")
    return shown


def console(stdout: Any) -> Console:
    """The console of a command's standard output."""
    return Console(file=stdout, width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error: a callback that takes the step, how much of it is done, and of how much."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True, quiet=quiet), refresh_per_second=4) as bars:
        steps: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in steps:
                for other in steps.values():
                    bars.update(other, visible=False)
                steps[step] = bars.add_task(step, total=total)
            bars.update(steps[step], completed=done, total=total)

        yield report
