"""Tables declared by their columns: one mapping gives headings, rows and the CSV file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.http import StreamingHttpResponse

from controlplane.console.filters import Order
from controlplane.exports import csv_response

Row = TypeVar("Row")
Columns = Mapping[str, str | Callable[[Any], Any]]
"""Heading with its unit to where the value stands: a path of keys or attributes (`model.name`), or a function of the row."""


@dataclass(frozen=True, slots=True)
class Table:
    header: tuple[str, ...]
    rows: Iterable[list[Any]]

    def csv(self, name: str) -> StreamingHttpResponse:
        return csv_response(name, self.header, self.rows)


def table(columns: Columns, rows: Iterable[Any]) -> Table:
    """A sequence of *rows* is read at once, and may be read by many threads; others are streamed to a file."""
    lines = ([value(row, column) for column in columns.values()] for row in rows)
    return Table(tuple(columns), list(lines) if isinstance(rows, Sequence) else lines)


def value(row: Any, column: str | Callable[[Any], Any]) -> Any:
    """None as soon as a part of the path is None or, in a mapping, missing."""
    if callable(column):
        return column(row)
    for part in column.split("."):
        row = row.get(part) if isinstance(row, Mapping) else None if row is None else getattr(row, part)
    return row


def sorted_by(order: Order, rows: Iterable[Row]) -> list[Row]:
    """*rows* by the column of *order*; those without a value come last either way, and equals stay in their order."""
    known: list[Row] = []
    unknown: list[Row] = []
    for row in rows:
        (unknown if value(row, order.field) is None else known).append(row)
    known.sort(key=lambda row: value(row, order.field), reverse=order.descending)
    return known + unknown


def moment(name: str) -> Callable[[Mapping[str, Any]], datetime | None]:
    """The time at *name*, kept in seconds since the epoch."""

    def read(row: Mapping[str, Any]) -> datetime | None:
        seconds = row.get(name)
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)

    return read
