"""What a page's query string asks for: one parser, so that pages, their CSV twins and their chart data agree."""

from collections.abc import Iterable
from dataclasses import dataclass

from django.http import HttpRequest, QueryDict

RANGES_MIN = (5, 15, 60)
DEFAULT_RANGE_MIN = 15


def choice(query: QueryDict, name: str, allowed: Iterable[str], default: str = "") -> str:
    """The parameter *name* if it is one of *allowed*, else *default*: a mistyped link still shows a page."""
    value = query.get(name, default)
    return value if value in set(allowed) else default


def number(query: QueryDict, name: str, default: int | None = None) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 19 else default


@dataclass(frozen=True, slots=True)
class View:
    """The filters of live pages: model ("" is all), range of the charts, kind of demand, and which chart is a table."""

    model: str
    range_min: int
    demand: str
    table: str

    @property
    def range_s(self) -> float:
        return self.range_min * 60.0


def view_of(request: HttpRequest, models: Iterable[str]) -> View:
    query = request.GET
    asked = number(query, "range", DEFAULT_RANGE_MIN)
    return View(
        model=choice(query, "model", models),
        range_min=asked if asked in RANGES_MIN else DEFAULT_RANGE_MIN,
        demand=choice(query, "demand", DEMANDS, "output"),
        table=query.get("table", ""),
    )


@dataclass(frozen=True, slots=True)
class Order:
    """The column that a table is sorted by."""

    field: str
    descending: bool

    @property
    def text(self) -> str:
        return f"-{self.field}" if self.descending else self.field


def order_of(request: HttpRequest, fields: Iterable[str], default: str) -> Order:
    """`?sort=name` or `?sort=-name` among *fields*."""
    text = choice(request.GET, "sort", [sign + field for field in fields for sign in ("", "-")], default)
    return Order(text.removeprefix("-"), text.startswith("-"))


DEMANDS = {
    "output": ("output_tokens_per_s", "Output tokens per second", "tok/s", "Output tok/s"),
    "prompt": ("prompt_tokens_per_s", "Prompt tokens per second", "tok/s", "Prompt tok/s"),
    "requests": ("requests_per_s", "Requests per second", "/s", "Requests/s"),
}
