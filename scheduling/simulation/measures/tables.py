"""Tables of results: columns by name, written as CSV."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Table:
    """Rows under named columns. Units stand in the names, or in a separate column."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        """Add a row. Raise ValueError if it has not as many values as there are columns."""
        if len(values) != len(self.columns):
            raise ValueError(f"{len(values)} values for {len(self.columns)} columns")
        self.rows.append(values)

    def select(self, **wanted: Any) -> "Table":
        """Return the rows whose columns have the *wanted* values."""
        places = [(self.columns.index(name), value) for name, value in wanted.items()]
        rows = [row for row in self.rows if all(row[place] == value for place, value in places)]
        return Table(self.columns, rows)

    def value(self, **wanted: Any) -> Any:
        """Return the last column of the row with the *wanted* values. Raise LookupError unless there is exactly one."""
        rows = self.select(**wanted).rows
        if len(rows) != 1:
            raise LookupError(f"{len(rows)} rows have {wanted}")
        return rows[0][-1]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def write_csv(self, path: Path) -> None:
        write_csv(path, self.columns, self.rows)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write *rows* under a header; None is an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
