"""Tables declared by columns, and their CSV files: streamed, times in UTC, units in headings, no formulas."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, TypeVar

from django.http import StreamingHttpResponse

from controlplane.resources.filters import Order

ROW_LIMIT = 50_000  # of one file; stated on the page and in `X-Row-Limit`
_RUNS = ("=", "+", "-", "@", "\t", "\r")
Row = TypeVar("Row")
Columns = Mapping[str, str | Callable[[Any], Any]]
"""Heading with unit to the value: a path of keys or attributes (`model.name`), or a function of the row."""


@dataclass(frozen=True, slots=True)
class Table:
    header: tuple[str, ...]
    rows: Iterable[list[Any]]

    def csv(self, name: str) -> StreamingHttpResponse:
        return csv_response(name, self.header, self.rows)


def table(columns: Columns, rows: Iterable[Any]) -> Table:
    """Return the table of *rows*. A sequence is read at once, so that threads can share it; other iterables are streamed."""
    lines = ([value(row, column) for column in columns.values()] for row in rows)
    return Table(tuple(columns), list(lines) if isinstance(rows, Sequence) else lines)


def value(row: Any, column: str | Callable[[Any], Any]) -> Any:
    """Return the value of *column* in *row*; None if part of the path is None or missing from a mapping."""
    if callable(column):
        return column(row)
    for part in column.split("."):
        row = row.get(part) if isinstance(row, Mapping) else None if row is None else getattr(row, part)
    return row


def sorted_by(order: Order, rows: Iterable[Row], read: Callable[[Row], Any] | None = None) -> list[Row]:
    """Sort *rows* by *read*, or by the path that *order* names; rows without a value are last, equals keep their order."""
    of = read or (lambda row: value(row, order.field))
    known: list[Row] = []
    unknown: list[Row] = []
    for row in rows:
        (unknown if of(row) is None else known).append(row)
    known.sort(key=of, reverse=order.descending)
    return known + unknown


def cell(value: Any) -> str:
    """Format *value*: times in UTC, None empty, lists and objects as JSON, text like a formula after an apostrophe.

    Negative numbers stay numbers.
    """
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        case int():
            return str(value)
        case float():
            return number(value)
        case dict() | list():
            return json.dumps(rounded(value), sort_keys=True) if value else ""
    text = str(value)
    return f"'{text}" if text.startswith(_RUNS) else text


def number(value: float) -> str:
    """Format with at most three decimals, below one with four figures: measurements are no more exact."""
    if not math.isfinite(value):
        return ""
    below_one = -math.floor(math.log10(abs(value))) - 1 if 0 < abs(value) < 1 else -1
    text = f"{value:.{4 + below_one}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rounded(value: Any) -> Any:
    """Round every number in *value* as in a cell."""
    match value:
        case float():
            text = number(value)
            return float(text) if text else None
        case dict():
            return {key: rounded(part) for key, part in value.items()}
        case list():
            return [rounded(part) for part in value]
    return value


class _Echo:
    """File that returns what is written to it."""

    def write(self, text: str) -> str:
        return text


def lines(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    writer = csv.writer(_Echo())
    for row in chain([header], rows):
        yield writer.writerow([cell(value) for value in row])


def csv_response(
    name: str, header: Sequence[str], rows: Iterable[Sequence[Any]], row_limit: int = ROW_LIMIT
) -> StreamingHttpResponse:
    """Return the file *name*-<now>.csv. The caller has limited *rows* to *row_limit*."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return StreamingHttpResponse(
        lines(header, rows),
        content_type="text/csv; charset=utf-8",
        headers={
            "Content-Disposition": f'attachment; filename="pilothouse-{name}-{moment}.csv"',
            "X-Row-Limit": str(row_limit),
            "Cache-Control": "no-store",
        },
    )
