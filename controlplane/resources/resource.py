"""A list of rows, declared once: its page, CSV file, filters and REST list are derived from it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from django.db.models import Model, QuerySet
from django.http import StreamingHttpResponse
from django.utils import timezone
from pydantic import AwareDatetime

from controlplane.accounts.models import Role, Tenant, User
from controlplane.resources.filters import Control, Filters, Select, last_hours, sort_by
from controlplane.resources.tables import ROW_LIMIT, table, value
from controlplane.rows import Page, containing, page_of, sorted_page_of

NUMBERS = frozenset({"count", "milliseconds", "percent", "percent_fine", "usd", "quantity", "duration"})


class Viewer(Protocol):
    """Who reads a list: the user of a page or the caller of REST."""

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
    """How the page draws the value: a number format, `moment`, `age`, `id` or `reason`; or a template, given `row`."""
    href: str = ""
    """Address that the value links to, by name; its argument is the value, or the row's key where *own_page*."""
    own_page: bool = False
    most: int = 0
    """Characters shown; 0: all."""
    sorts: bool = False
    fleet: bool = False
    """Only for those with a role over the fleet; null in REST for others."""
    rest: bool = True
    type: Any = None
    """In REST, where the model's field does not say it."""
    about: str = ""
    """In REST, where the model's field has no help text."""
    tip: str = ""

    def of(self, row: Any) -> Any:
        return value(row, self.source or self.name)

    @property
    def title(self) -> str:
        return self.label or self.heading.partition(" (")[0]

    @property
    def template(self) -> str:
        return self.draw if self.draw.endswith(".html") else ""

    @property
    def css(self) -> str:
        return "num" if self.draw in NUMBERS else self.draw if self.draw in ("id", "reason") else ""


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
    about: str = ""

    def narrow(self, rows: Any, given: Any) -> Any:
        if given in (None, ""):
            return rows
        return self.lookup(rows, given) if callable(self.lookup) else rows.filter(**{self.lookup or self.name: given})


def search_in(*fields: str, control: Control) -> Filter:
    """`q`: each word of the text is in one of *fields*."""
    return Filter("q", lambda rows, text: containing(rows, text, *fields), control=control)


def in_last(at: str, label: str, *hours: int) -> Filter:
    """By the time in column *at*: the last *hours*, on the page alone."""

    def within(rows: Any, given: str) -> Any:
        return rows.filter(**{f"{at}__gte": timezone.now() - timedelta(hours=int(given))})

    control = Select("hours", label, [("", "Any time"), *last_hours(*hours)])
    return Filter("hours", within, rest=False, control=control)


def in_range(at: str, label: str, *hours: int) -> tuple[Filter, ...]:
    """By the time in column *at*: `since` and `until` in REST, the last *hours* on the page."""
    return (
        Filter("since", f"{at}__gte", AwareDatetime),
        Filter("until", f"{at}__lt", AwareDatetime),
        in_last(at, label, *hours),
    )


@dataclass(frozen=True)
class Resource:
    """Rows of *model*; *rows* gives those that a viewer may see."""

    name: str
    """In the plural; of its page, its REST list and, unless *file* says otherwise, its CSV file."""
    noun: str
    model: type[Model]
    rows: Callable[[Viewer], QuerySet[Any]]
    columns: tuple[Column, ...]
    filters: tuple[Filter, ...] = ()
    page: tuple[str, ...] = ()
    """Columns of the page, in order."""
    head: str = ""
    """The column that names a row; by default the page's first."""
    least: Role | None = None
    """Role over the fleet that the page needs; None: any user of a tenant."""
    title: str = ""
    file: str = ""
    parent: tuple[str, str] | None = None
    """Address and title of the page above."""
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

    @property
    def heading(self) -> str:
        return self.title or self.name.capitalize()

    @property
    def head_name(self) -> str:
        return self.head or self.page[0]

    def page_columns(self, viewer: Viewer) -> list[Column]:
        columns = {column.name: column for column in self.columns if viewer.sees_fleet or not column.fleet}
        return [columns[name] for name in self.page if name in columns]

    def stored(self, *names: str) -> tuple[str, ...]:
        """Those of *names*, once each, that are fields of the model: columns of its admin."""
        fields = {each.name for each in self.model._meta.get_fields()}
        return tuple(name for name in dict.fromkeys(names) if name in fields)

    def listed(self, viewer: Viewer, query: Mapping[str, str]) -> tuple[Filters, QuerySet[Any]]:
        """The values of the page's form in *query*, and the rows that they leave of those that *viewer* may see."""
        controls = [
            (each, each.control(viewer) if callable(each.control) else each.control)
            for each in self.filters
            if each.control is not None and (viewer.sees_fleet or not each.fleet)
        ]
        sorting = [column.name for column in self.columns if column.sorts]
        filters = Filters(query, *(control for _, control in controls), *([sort_by(sorting, "")] if sorting else []))
        rows = self.rows(viewer)
        for each, control in controls:
            given = filters[control.name]
            rows = each.narrow(rows, each.values.get(given, given))
        return filters, rows

    def narrowed(self, rows: QuerySet[Any], given: Mapping[str, Any]) -> QuerySet[Any]:
        """Those of *rows* that fit *given*, values by the filters' names."""
        for each in self.filters:
            rows = each.narrow(rows, given.get(each.name))
        return rows

    def page_of(self, rows: QuerySet[Any], filters: Filters, cursor: int | None) -> Page[Any]:
        order = filters.order
        return sorted_page_of(rows, order.field, order.descending, cursor) if order.field else page_of(rows, cursor)

    def csv(self, rows: QuerySet[Any], sees_fleet: bool = True) -> StreamingHttpResponse:
        columns = {c.heading: c.source or c.name for c in self.columns if c.heading and (sees_fleet or not c.fleet)}
        newest: Iterable[Any] = rows.order_by("-pk")[:ROW_LIMIT].iterator(chunk_size=1000)
        return table(columns, newest).csv(self.file or self.name)
