"""The filters of a page, declared once: read from its query string, drawn as its form, used by its CSV and its charts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import ClassVar

from django.utils import timezone

Options = Sequence[tuple[str, str]]  # value and title


@dataclass(frozen=True, slots=True)
class Select:
    """A choice among *options*. What is none of them reads as the default: a mistyped link still shows a page."""

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
    """A day, as ISO 8601 writes it; what is none reads as empty."""

    name: str
    label: str
    default: ClassVar[str] = ""
    kind: ClassVar[str] = "day"

    def read(self, query: Mapping[str, str]) -> str:
        try:
            return date.fromisoformat(query.get(self.name, "")).isoformat()
        except ValueError:
            return ""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a link sets and the form keeps: one of *options*, or any text where there are none."""

    name: str
    options: Iterable[str] = ()
    default: str = ""
    length: int = 120
    kind: ClassVar[str] = "hidden"

    def read(self, query: Mapping[str, str]) -> str:
        value = query.get(self.name, self.default).strip()[: self.length]
        return value if not self.options or value in self.options else self.default


Control = Select | Search | Day | Hidden


class Filters:
    """The values by name, for views and templates (`filters.model`); iterated, each field with its value, for the form."""

    def __init__(self, query: Mapping[str, str], *fields: Control) -> None:
        self._fields = fields
        self._values = {field.name: field.read(query) for field in fields}

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[tuple[Control, str]]:
        return ((field, self._values[field.name]) for field in self._fields)

    @property
    def narrow(self) -> bool:
        """Whether they leave out any row."""
        return any(value != field.default for field, value in self if field.name != SORT)

    @property
    def order(self) -> "Order":
        text = self._values.get(SORT, "")
        return Order(text.removeprefix("-"), text.startswith("-"))

    @property
    def since(self) -> datetime | None:
        """So many `hours` ago; None for any time."""
        return timezone.now() - timedelta(hours=int(self["hours"])) if self["hours"] else None


SORT = "sort"


@dataclass(frozen=True, slots=True)
class Order:
    """The column that a table is sorted by."""

    field: str
    descending: bool


def sort_by(columns: Iterable[str], default: str) -> Hidden:
    """`?sort=name` or `?sort=-name` among *columns*."""
    return Hidden(SORT, [sign + column for column in columns for sign in ("", "-")], default)


def every(noun: str, options: Iterable[str | tuple[str, str]]) -> Options:
    """*options* after one that stands for all of them: `All models`."""
    return [("", f"All {noun}"), *named(options)]


def named(options: Iterable[str | tuple[str, str]]) -> Options:
    """A name alone is its own title."""
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
    """A whole number that fits a key; None for anything else."""
    return int(text) if text.isdecimal() and len(text) < 19 else None
