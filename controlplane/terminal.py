"""Output of management commands: tables and a progress bar."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH = 170  # unless a terminal says otherwise


@dataclass(frozen=True, slots=True)
class Column:
    """Table column. Text is left-aligned and wraps; a column with a format is numeric and right-aligned."""

    head: str
    value: str | Callable[[Any], Any]
    """Key of a row, or a function from a row to its value."""
    format: str | Callable[[Any], str] = ""
    """Template such as "{:.2f} s", or a function from value to text; a template shows None as "-"."""

    def cell(self, row: Any) -> str:
        value = row[self.value] if isinstance(self.value, str) else self.value(row)
        if callable(self.format):
            return self.format(value)
        return "-" if value is None else (self.format or "{}").format(value)


def table(
    title: str, columns: Sequence[Column], rows: Iterable[Any], style: Callable[[Any], str] | None = None
) -> Table:
    """Return *rows* as a table; *style* returns the style of a row."""
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
    """Return the console for standard output."""
    return Console(file=stdout, width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error; yields a callback that takes the step, the amount done and the total."""
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
