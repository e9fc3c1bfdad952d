"""Reading files of rows, one at a time, with errors that say where the file is wrong."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

UNREADABLE: Final = (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error)


class TraceError(ValueError):
    """A file of rows cannot be read; names the file, the line (from 1; 0 = none), the column and what is wrong with it."""

    def __init__(self, path: Path, line: int, column: str, what: str) -> None:
        place = str(path) + (f", line {line}" if line else "") + (f", column {column}" if column else "")
        super().__init__(f"{place}: {what}")
        self.path, self.line, self.column, self.what = path, line, column, what


class Row:
    """One row under its header, with readers that say where a wrong value stands."""

    __slots__ = ("line", "path", "values")

    def __init__(self, path: Path, line: int, values: dict[str, str]) -> None:
        self.path, self.line, self.values = path, line, values

    def number(self, column: str) -> float:
        text = self.values[column]
        try:
            number = float(text)
        except ValueError:
            raise TraceError(self.path, self.line, column, f"{text!r} is not a number") from None
        if not 0 <= number < float("inf"):
            raise TraceError(self.path, self.line, column, f"{text!r} is not a number from 0 up")
        return number

    def positive(self, column: str) -> float:
        number = self.number(column)
        if number == 0:
            raise TraceError(self.path, self.line, column, "is 0; a measured time is above 0")
        return number

    def count(self, column: str) -> int:
        number = self.number(column)
        if number != int(number):
            raise TraceError(self.path, self.line, column, f"{self.values[column]!r} is not a whole number")
        return int(number)

    def moment_s(self, column: str) -> float:
        """Seconds since 1970 of a date and time; one without an offset is taken as UTC."""
        text = self.values[column]
        try:
            # Seven decimals, as .NET writes them: fromisoformat reads any number of them and keeps six.
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise TraceError(self.path, self.line, column, f"{text!r} is not a date and time") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def open_text(path: Path) -> IO[str]:
    try:
        return (
            io.TextIOWrapper(gzip.open(path), "utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")
        )
    except OSError as error:
        raise TraceError(path, 0, "", error.strerror or str(error)) from error


def csv_rows(path: Path, *columns: str, fill: bool = False) -> Iterator[Row]:
    """Rows of a CSV file with a header that holds *columns*; with *fill*, values missing at the end of a row are empty."""
    with open_text(path) as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            for column in columns:
                if column not in header:
                    named = ", ".join(header) or "nothing"
                    raise TraceError(path, 1, column, f"is missing; the first line holds {named}")
            for values in reader:
                if not values:
                    continue
                if fill:
                    values.extend([""] * (len(header) - len(values)))
                if len(values) != len(header):
                    raise TraceError(
                        path, reader.line_num, "", f"{len(values)} values under a header of {len(header)} columns"
                    )
                yield Row(path, reader.line_num, dict(zip(header, values, strict=True)))
        except (csv.Error, *UNREADABLE) as error:
            raise TraceError(path, reader.line_num, "", f"cannot be read: {error}") from error
