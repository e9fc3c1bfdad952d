"""Tables as CSV: streamed, times in UTC as ISO 8601, units in the headers, and no cell that a spreadsheet would run."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from django.http import StreamingHttpResponse

ROW_LIMIT = 50_000  # of one file; stated on the page and in `X-Row-Limit`
_RUNS = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> str:
    """*value* as text: times in UTC, None empty, and text that begins like a formula with an apostrophe before it.

    Numbers stay numbers, also negative ones: they come from us and are no formulas.
    """
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        case int() | float():
            return str(value)
    text = str(value)
    return f"'{text}" if text.startswith(_RUNS) else text


class _Echo:
    """A file that hands back what is written to it."""

    def write(self, text: str) -> str:
        return text


def lines(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    writer = csv.writer(_Echo())
    yield writer.writerow(header)
    for row in rows:
        yield writer.writerow([cell(value) for value in row])


def csv_response(
    name: str, header: Sequence[str], rows: Iterable[Sequence[Any]], row_limit: int = ROW_LIMIT
) -> StreamingHttpResponse:
    """The file *name*-<now>.csv. *rows* are already limited by the caller, to *row_limit*."""
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
