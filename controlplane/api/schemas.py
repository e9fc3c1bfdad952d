"""Building blocks of the schemas of `/api`. Units stand in names; times are ISO 8601 in UTC; prices are US dollars."""

from typing import Annotated, Any, Generic, TypeVar

from django.db.models import Field as Column
from django.db.models import ForeignKey, QuerySet
from django.http import HttpRequest
from ninja import Field, Schema
from ninja.orm.fields import TYPES
from ninja.pagination import PaginationBase
from ninja.params.functions import Query
from ninja.schema import ResolverMetaclass
from pydantic import ConfigDict

from controlplane.rows import MAX_PAGE_SIZE, PAGE_SIZE, page_of

Row = TypeVar("Row")


class Described(Schema):
    """Lines of text under a field are its description in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Strict(Described):
    """A body in which an unknown field is an error, so that a typing mistake does not pass silently."""

    model_config = ConfigDict(extra="forbid")


class ColumnsOfMeta(ResolverMetaclass):
    """Adds the columns that `Meta` names, before the schema's own fields.

    Ninja's ModelSchema is for bodies: what has a default in the database may be missing or null in its answers, too.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if meta := namespace.get("Meta"):
            columns = {column: answered(meta.model._meta.get_field(column)) for column in meta.fields}
            namespace["__annotations__"] = columns | namespace.get("__annotations__", {})
        return super().__new__(mcs, name, bases, namespace, **kwargs)


def answered(column: Column[Any, Any]) -> Any:
    """The type of *column* in an answer, described by its help text; another row goes by its name."""
    other = isinstance(column, ForeignKey)
    python: Any = str if other else TYPES[column.get_internal_type()]
    about = Field(alias=f"{column.name}.name" if other else None, description=str(column.help_text) or None)
    return Annotated[python | None if column.null else python, about]


class RowSchema(Described, metaclass=ColumnsOfMeta):
    """An answer with columns of a row. Those with choices, JSON or a row that may be missing are declared one by one."""


class Items(Schema, Generic[Row]):
    items: list[Row]


class Page(Schema, Generic[Row]):
    """Newest first. Pass `next_cursor` back as `cursor` for the next page; null on the last."""

    items: list[Row]
    next_cursor: int | None


class PageQuery(Schema):
    cursor: int | None = None
    limit: int = Field(PAGE_SIZE, ge=1, le=MAX_PAGE_SIZE)


class NewestFirst(PaginationBase):
    """For `paginate`: the handler gives rows, the answer is a `Page` of them.

    Ninja's CursorPagination answers addresses, where lists of this API answer the number to ask with.
    """

    Input = PageQuery  # type: ignore[assignment]  # ninja names no common class
    Output = None  # type: ignore[assignment]  # handlers name theirs: Page[...]

    def paginate_queryset(
        self, queryset: QuerySet[Any], pagination: PageQuery, request: HttpRequest, **params: Any
    ) -> dict[str, Any]:
        page = page_of(queryset, pagination.cursor, pagination.limit)
        return {"items": page.rows, "next_cursor": page.next_cursor}


class ActionIn(Strict):
    reason: str = Field(min_length=1, max_length=255)


class DecisionIn(Strict):
    reason: str = Field("", max_length=255)


Reason = Query("", max_length=255, description="Kept with the event.")
"""Of what has no body."""
