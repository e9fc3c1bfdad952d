"""Filters of a page, declared once: read from the query string, rendered as a form, used by CSV and charts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import ClassVar

from django.utils import timezone

from controlplane.rows import within

Options = Sequence[tuple[str, str]]  # value and title


@dataclass(frozen=True, slots=True)
class Select:
    """A choice among *options*. Any other value reads as the default, so that a mistyped link still shows a page."""

    name: str
    label: str
    options: Options
    default: str = ""
    free: int = 0  # characters of another value that is kept, such as the name of a model that is no longer in use
    kind: ClassVar[str] = "select"

    def read(self, query: Mapping[str, str]) -> str:
        value = query.get(self.name, self.default)
        return value if value in dict(self.options) else value[: self.free] or self.default


@dataclass(frozen=True, slots=True)
class Search:
    name: str
    label: str
    placeholder: str = "Search"
    length: int = 80
    default: ClassVar[str] = ""
    kind: ClassVar[str] = "search"

    def read(self, query: Mapping[str, str]) -> str:
        return query.get(self.name, "").strip()[: self.length]


@dataclass(frozen=True, slots=True)
class Day:
    """An ISO 8601 date; anything else reads as empty."""

    name: str
    label: str
    default: ClassVar[str] = ""
    kind: ClassVar[str] = "day"

    def read(self, query: Mapping[str, str]) -> str:
        try:
            return within(date.fromisoformat(query.get(self.name, ""))).isoformat()
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A local date and time, to the minute; anything else reads as empty."""

    name: str
    label: str
    default: ClassVar[str] = ""
    kind: ClassVar[str] = "moment"

    def read(self, query: Mapping[str, str]) -> str:
        try:
            at = within(datetime.fromisoformat(query.get(self.name, "")))
            return at.replace(tzinfo=None).isoformat(timespec="minutes")
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Value set by a link and kept by the form: one of *options*, or any text if there are none."""

    name: str
    options: Iterable[str] = ()
    default: str = ""
    length: int = 120
    kind: ClassVar[str] = "hidden"

    def read(self, query: Mapping[str, str]) -> str:
        value = query.get(self.name, self.default).strip()[: self.length]
        return value if not self.options or value in self.options else self.default


Control = Select | Search | Day | Moment | Hidden


class Filters:
    """Values by name, for views and templates (`filters.model`); iterating yields fields with values, for the form."""

    def __init__(self, query: Mapping[str, str], *fields: Control) -> None:
        self._fields = fields
        self._values = {field.name: field.read(query) for field in fields}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[tuple[Control, str]]:
        return ((field, self._values[field.name]) for field in self._fields)

    @property
    def narrow(self) -> bool:
        """Return whether any filter is set."""
        return any(value != field.default for field, value in self if field.name not in (SORT, OPEN))

    @property
    def order(self) -> "Order":
        text = self._values.get(SORT, "")
        return Order(text.removeprefix("-"), text.startswith("-"))

    @property
    def since(self) -> datetime | None:
        """Return the time `hours` ago; None for any time."""
        return timezone.now() - timedelta(hours=int(self["hours"])) if self["hours"] else None


SORT, OPEN = "sort", "open"
"""Change how rows are shown, and not which."""


@dataclass(frozen=True, slots=True)
class Order:
    """Column that a table is sorted by."""

    field: str
    descending: bool


def sort_by(columns: Iterable[str], default: str) -> Hidden:
    """`?sort=name` or `?sort=-name` among *columns*."""
    return Hidden(SORT, [sign + column for column in columns for sign in ("", "-")], default)


def every(noun: str, options: Iterable[str | tuple[str, str]]) -> Options:
    """Return *options* preceded by one for all of them: `All models`."""
    return [("", f"All {noun}"), *named(options)]


def named(options: Iterable[str | tuple[str, str]]) -> Options:
    """Return (value, title) pairs; a name alone is also its title."""
    return [(option, option) if isinstance(option, str) else option for option in options]


def last_hours(*hours: int) -> Options:
    titles = {1: "Last hour", 168: "Last 7 days"}
    return [(str(number), titles.get(number, f"Last {number} hours")) for number in hours]


def model_select(models: Iterable[str], free: int = 0) -> Select:
    return Select("model", "Model", every("models", models), free=free)


CHART_RANGE = Select(
    "range", "Range of charts", [("5", "Last 5 minutes"), ("15", "Last 15 minutes"), ("60", "Last hour")], "15"
)


def number(text: str) -> int | None:
    """Parse a row key; None if *text* is not one."""
    return int(text) if text.isdecimal() and len(text) < 19 else None
