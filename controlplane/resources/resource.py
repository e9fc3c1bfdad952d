"""A list of rows, declared once: its page, CSV file, filters and REST list are derived from it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from django.db.models import Model, QuerySet, TextChoices
from django.http import StreamingHttpResponse
from django.utils import timezone
from pydantic import BaseModel

from controlplane.accounts.models import Role, Tenant, User
from controlplane.fleet.inventory.kinds import Kind
from controlplane.resources.filters import Control, Filters, Select, every, last_hours, model_select, sort_by
from controlplane.resources.names import model_names, region_names
from controlplane.resources.tables import ROW_LIMIT, sorted_by, table, value
from controlplane.rows import Instant, Page, containing, page_of, sorted_page_of

NUMBERS = frozenset(
    {
        "count",
        "milliseconds",
        "percent",
        "percent_fine",
        "usd",
        "usd_fine",
        "quantity",
        "duration",
        "period",
        "clock",
        "seconds_fine",
        "signed",
        "share",
    }
)
LEAVES, LEAVES_FIRST = "leaves", "leaves-first"
EPOCHS = frozenset({"age", "since"})
"""Formats of times, which may be epoch seconds."""
Rows = QuerySet[Any] | Sequence[Any]


class Viewer(Protocol):
    """Reader of a list: the user of a page or the caller of REST."""

    @property
    def sees_fleet(self) -> bool: ...
    @property
    def person(self) -> User: ...
    def tenants(self) -> QuerySet[Tenant]: ...


@dataclass(frozen=True, slots=True)
class Column:
    """One column; *name* is its name in REST and in `?sort=`."""

    name: str
    heading: str = ""
    """In the CSV file, with its unit; a column without one is not in the file."""
    source: str | Callable[[Any], Any] = ""
    """Path of the value (`tenant.name`), or a function of the row; by default *name*."""
    label: str = ""
    """On the page; by default the heading without its unit."""
    draw: str = ""
    """Format on the page: of a number, `moment`, `age`, `since`, `mark`, `id`, `reason`, `wide`; or a template of `row`."""
    live: str = ""
    """Format of a number that the live connection keeps fresh, in place of *draw*."""
    kind: str = ""
    """CSS class of the cell, where *draw* does not say it."""
    sorts: bool = False
    fleet: bool = False
    """Only for those with a role over the fleet; null in REST for others."""
    rest: bool = True
    type: Any = None
    """In REST, where the model's field does not say it."""
    about: str = ""
    """In REST, where the model's field has no help text."""
    tip: str = ""
    leaves: str = ""
    """`LEAVES`: not shown in windows between a phone's and a desk's; `LEAVES_FIRST`: not on a small desk either."""
    axis: str = ""
    """Template of the marks in the header of a column that is drawn on an axis."""

    def of(self, row: Any) -> Any:
        """Return the value in *row*. Rows made for pages are mappings by the columns' names."""
        if isinstance(row, Mapping) and not callable(self.source):
            return row.get(self.name)
        return value(row, self.source or self.name)

    def in_file(self, row: Any) -> Any:
        """Return the value as the CSV file has it: epoch seconds as a time."""
        cell = self.of(row)
        if isinstance(cell, int | float) and (self.draw in EPOCHS or self.live in EPOCHS):
            return datetime.fromtimestamp(cell, UTC)
        return cell

    @property
    def title(self) -> str:
        return self.label or self.heading.partition(" (")[0]

    @property
    def template(self) -> str:
        return self.draw if self.draw.endswith(".html") else ""

    @property
    def css(self) -> str:
        is_number = self.draw in NUMBERS | EPOCHS or (self.live and self.live != "mark")
        if self.draw == "share":
            return "num kv"
        return self.kind or ("num" if is_number else self.draw if self.draw in ("id", "reason", "wide") else "")

    @property
    def sorts_first(self) -> str:
        """Sign of the order that the first click on the header asks for: the greatest number, the first name."""
        return "-" if self.is_number and self.draw not in EPOCHS else ""

    @property
    def header_css(self) -> str:
        """Return the class of its header."""
        return " ".join(filter(None, ("num" if self.is_number else "text", self.leaves)))

    @property
    def is_number(self) -> bool:
        return self.css.startswith("num")


@dataclass(frozen=True, slots=True)
class Filter:
    """Narrows the rows: by the parameter *name* in REST, by *control* on the page."""

    name: str
    lookup: str | Callable[[Any, Any], Any] = ""
    """A lookup of the ORM, or a function of the rows and the value; by default *name*."""
    type: Any = str
    control: Control | Callable[[Viewer], Control] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the control's choices, where they are not the choices themselves."""
    fleet: bool = False
    """Only for those with a role over the fleet."""
    rest: bool = True
    shown: bool = False
    """Narrows the rows as the page shows them, by a function of them and the value; for resources that are read whole."""
    about: str = ""

    def narrow(self, rows: Any, given: Any) -> Any:
        if given in (None, ""):
            return rows
        return self.lookup(rows, given) if callable(self.lookup) else rows.filter(**{self.lookup or self.name: given})


def search_in(*fields: str, control: Control, about: str = "") -> Filter:
    """Filter `q`: each word of the text occurs in one of *fields*."""
    return Filter("q", lambda rows, text: containing(rows, text, *fields), control=control, about=about)


def of_model(lookup: str = "", free: int = 0) -> Filter:
    """Filter by the name of a model; *free* as in `Select`."""
    return Filter("model", lookup, control=lambda viewer: model_select(model_names(), free))


def of_region(lookup: str = "") -> Filter:
    """Filter by the name of a region."""
    return Filter("region", lookup, control=lambda viewer: Select("region", "Region", every("regions", region_names())))


def of_choice(name: str, choices: type[TextChoices], plural: str, label: str = "") -> Filter:
    """Filter by one of *choices*."""
    return Filter(name, type=choices, control=Select(name, label or name.capitalize(), every(plural, choices.choices)))


def in_last(at: str, label: str, *hours: int) -> Filter:
    """Filter by the time in column *at*: the last *hours*, only on the page."""

    def within(rows: Any, given: str) -> Any:
        return rows.filter(**{f"{at}__gte": timezone.now() - timedelta(hours=int(given))})

    control = Select("hours", label, [("", "Any time"), *last_hours(*hours)])
    return Filter("hours", within, rest=False, control=control)


def in_range(at: str, label: str, *hours: int) -> tuple[Filter, ...]:
    """Filter by the time in column *at*: `since` and `until` in REST, the last *hours* on the page."""
    return (
        Filter("since", f"{at}__gte", Instant),
        Filter("until", f"{at}__lt", Instant),
        in_last(at, label, *hours),
    )


class Nothing(BaseModel):
    """What an operation takes that needs a reason alone."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done with a row for a reason: `POST /NAME/ROW/VERB` in REST, and a button of its page."""

    verb: str
    carry_out: Callable[..., Any]
    """Given the row, the user, the reason, and by name what it takes; returns a sentence, or the row as it is then."""
    about: str
    """What it does, in a sentence."""
    least: Role = Role.OPERATOR
    needs_reason: bool = True
    takes: type[BaseModel] = Nothing
    """What it needs besides a reason."""
    form: bool = False
    """Whether the console offers it although it takes more than a reason: its dialog has the fields."""

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what it takes as *given*. Raises pydantic's ValidationError."""
        return dict(self.takes.model_validate(given))


@dataclass(frozen=True)
class Resource:
    """Rows of *model*; *rows* gives those that a viewer may see."""

    name: str
    """In the plural; of its page, its REST list and, unless *file* says otherwise, its CSV file."""
    noun: str
    model: type[Model] | None
    """None for rows that are not in the database."""
    columns: tuple[Column, ...]
    rows: Callable[[Viewer], Rows] = lambda viewer: ()
    """Not given where a page or an operation computes them."""
    filters: tuple[Filter, ...] = ()
    kind: Kind | None = None
    """By which rows are created, changed and deleted."""
    operations: tuple[Operation, ...] = ()
    page: tuple[str, ...] = ()
    """Columns of the page, in order."""
    head: str = ""
    """The column that names a row; by default the page's first."""
    least: Role | None = None
    """Role over the fleet that the page needs; None: any user of a tenant."""
    title: str = ""
    file: str = ""
    caption: str = "Newest first"
    sorted_captions: tuple[str, str] = ("Greatest first", "Least first")
    """Of the descending and the ascending order."""
    empty: str = ""
    """Shown while there is no row at all."""
    template: str = "console/list.html"
    actions: str = ""
    """Template of a last cell with what can be done with a row."""
    row_template: str = ""
    """Draws a whole row, in place of cells by column."""
    live: str = ""
    """Topics of the live connection; empty: the page is not live."""
    refresh_s: int = 0
    """Seconds between two refreshes of a live page, beyond those that events cause."""
    whole: int = 0
    """All rows are read at once and sorted as they are shown, the page has so many of them; 0: pages by cursor."""

    @property
    def heading(self) -> str:
        return self.title or self.plural.capitalize()

    @property
    def plural(self) -> str:
        """The rows in words: `length versions`."""
        return self.name.replace("-", " ")

    @property
    def head_name(self) -> str:
        return self.head or self.page[0]

    @property
    def sorting(self) -> list[str]:
        """Names of the columns that the page sorts by."""
        return [column.name for column in self.columns if column.sorts]

    def named(self, *names: str) -> list[Column]:
        columns = {column.name: column for column in self.columns}
        return [columns[name] for name in names]

    def page_columns(self, viewer: Viewer) -> list[Column]:
        return [column for column in self.named(*self.page) if viewer.sees_fleet or not column.fleet]

    def stored(self, *names: str) -> tuple[str, ...]:
        """Those of *names*, once each, that are fields of the model: columns of its admin."""
        fields = {each.name for each in self.model._meta.get_fields()} if self.model else set()
        return tuple(name for name in dict.fromkeys(names) if name in fields)

    def listed(self, viewer: Viewer, query: Mapping[str, str], rows: Rows | None = None) -> tuple[Filters, Rows]:
        """Return the form's values in *query*, and those of *rows* that fit; by default all that *viewer* may see."""
        controls = [
            (each, each.control(viewer) if callable(each.control) else each.control)
            for each in self.filters
            if each.control is not None and (viewer.sees_fleet or not each.fleet)
        ]
        sorting = [sort_by(self.sorting, "")] if self.sorting else []
        filters = Filters(query, *(control for _, control in controls), *sorting)
        rows = self.rows(viewer) if rows is None else rows
        for each, control in controls:
            if not each.shown:
                given = filters[control.name]
                rows = each.narrow(rows, each.values.get(given, given))
        return filters, rows

    def arranged(self, rows: list[Any], filters: Filters) -> list[Any]:
        """*rows* as they are shown, narrowed and sorted by what is only known of them then."""
        for each in self.filters:
            if each.shown and (given := filters[each.name]):
                rows = each.narrow(rows, given)
        order = filters.order
        return sorted_by(order, rows, self.named(order.field)[0].of) if order.field else rows

    def narrowed(self, rows: Rows, given: Mapping[str, Any]) -> Rows:
        """Those of *rows* that fit *given*, values by the filters' names."""
        for each in self.filters:
            if not each.shown:
                rows = each.narrow(rows, given.get(each.name))
        return rows

    def page_of(self, rows: QuerySet[Any], filters: Filters, cursor: int | None) -> Page[Any]:
        order = filters.order
        return sorted_page_of(rows, order.field, order.descending, cursor) if order.field else page_of(rows, cursor)

    def csv(self, rows: Rows, sees_fleet: bool = True) -> StreamingHttpResponse:
        columns = {c.heading: c.in_file for c in self.columns if c.heading and (sees_fleet or not c.fleet)}
        if isinstance(rows, QuerySet):
            newest: Iterable[Any] = rows.order_by("-pk")[:ROW_LIMIT].iterator(chunk_size=1000)
            return table(columns, newest).csv(self.file or self.name)
        return table(columns, rows).csv(self.file or self.name)
