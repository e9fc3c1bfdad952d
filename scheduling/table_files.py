"""Read files of rows, one row at a time, with errors that locate the fault."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

NUMBER: Final = "a number of seconds"
CLOCK_TIME: Final = "a clock time since the start, such as 26:10:05"
DATE: Final = "a date and time, such as 2023-11-16 18:15:46.68"
CLOCK = re.compile(r"(\d{1,6}):([0-5]?\d):([0-5]?\d(?:\.\d*)?)")
MOST_TOKENS: Final = 100_000_000
UNREADABLE: Final = (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error)


class TraceError(ValueError):
    """A file of rows cannot be read; names the file, the line (from 1; 0 = none), the column and the fault."""

    def __init__(self, path: Path, line: int, column: str, what: str) -> None:
        self.place = ", ".join(text for text in (line and f"line {line}", column and f"column {column}") if text)
        super().__init__(f"{path}{', ' if self.place else ''}{self.place}: {what}")
        self.path, self.line, self.column, self.what = path, line, column, what


class Row:
    """One row and its header, with readers whose errors name the position."""

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

    def is_number(self, column: str) -> bool:
        try:
            float(self.values[column])
        except ValueError:
            return False
        return True

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

    def tokens(self, column: str) -> int:
        tokens = self.count(column)
        if tokens > MOST_TOKENS:
            what = f"{self.values[column]!r} tokens are more than any model's context: {MOST_TOKENS:,} are the most"
            raise TraceError(self.path, self.line, column, what)
        return tokens

    def moment_s(self, column: str, *, usual: str = NUMBER) -> float:
        """Return seconds: from a number, a clock time (hours may exceed 24), or, since 1970, a date and time.

        A date without an offset is taken as UTC. *usual* is the format named first in the error.
        """
        if self.is_number(column):
            return self.number(column)
        text = self.values[column].strip()
        if clock := CLOCK.fullmatch(text):
            hours, minutes, seconds = clock.groups()
            return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
        try:
            # .NET writes seven decimals; fromisoformat accepts any number and keeps six.
            moment = datetime.fromisoformat(text)
        except ValueError:
            first, *others = sorted((NUMBER, CLOCK_TIME, DATE), key=lambda form: form != usual)
            what = f"{text!r} is not {first}, {others[0]} or {others[1]}"
            raise TraceError(self.path, self.line, column, what) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def open_text(path: Path) -> IO[str]:
    try:
        return (
            io.TextIOWrapper(gzip.open(path), "utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig")
        )
    except OSError as error:
        raise TraceError(path, 0, "", error.strerror or str(error)) from error


def csv_rows(path: Path, *columns: str, fill: bool = False) -> Iterator[Row]:
    """Yield the rows of a CSV file whose header has *columns*; with *fill*, values missing at the end of a row are empty."""
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
