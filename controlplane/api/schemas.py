"""Building blocks of the schemas of `/api`. Names include units; times are ISO 8601 in UTC; prices are US dollars."""

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
    """Schema whose attribute docstrings are the field descriptions in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Strict(Described):
    """Request body that rejects unknown fields, so that typing mistakes do not pass silently."""

    model_config = ConfigDict(extra="forbid")


class ColumnsOfMeta(ResolverMetaclass):
    """Add the columns named by `Meta` before the schema's own fields.

    Ninja's ModelSchema is for bodies: fields with a database default may be missing or null in its responses, too.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if meta := namespace.get("Meta"):
            columns = {column: answered(meta.model._meta.get_field(column)) for column in meta.fields}
            namespace["__annotations__"] = columns | namespace.get("__annotations__", {})
        return super().__new__(mcs, name, bases, namespace, **kwargs)


def answered(column: Column[Any, Any]) -> Any:
    """Return the response type of *column*, described by its help text; related rows are shown by name."""
    other = isinstance(column, ForeignKey)
    python: Any = str if other else TYPES[column.get_internal_type()]
    about = Field(alias=f"{column.name}.name" if other else None, description=str(column.help_text) or None)
    return Annotated[python | None if column.null else python, about]


class RowSchema(Described, metaclass=ColumnsOfMeta):
    """Response with columns of a row. Columns with choices, JSON or an optional relation are declared explicitly."""


class Items(Schema, Generic[Row]):
    items: list[Row]


class Page(Schema, Generic[Row]):
    """Page of rows, newest first. Pass `next_cursor` back as `cursor` for the next page; null on the last."""

    items: list[Row]
    next_cursor: int | None


class PageQuery(Schema):
    cursor: int | None = None
    limit: int = Field(PAGE_SIZE, ge=1, le=MAX_PAGE_SIZE)


class NewestFirst(PaginationBase):
    """Pagination for `paginate`: the handler returns rows, the response is a `Page` of them.

    Ninja's CursorPagination returns URLs; this API returns the cursor itself.
    """

    Input = PageQuery  # type: ignore[assignment]  # ninja names no common class
    Output = None  # type: ignore[assignment]  # handlers name theirs: Page[...]

    def paginate_queryset(
        self, queryset: QuerySet[Any], pagination: PageQuery, request: HttpRequest, **params: Any
    ) -> dict[str, Any]:
        page = page_of(queryset, pagination.cursor, pagination.limit)
        return {"items": page.rows, "next_cursor": page.next_cursor}


class MessageOut(Described):
    message: str
    """Result in one sentence."""


class ActionIn(Strict):
    reason: str = Field(min_length=1, max_length=255)


class DecisionIn(Strict):
    reason: str = Field("", max_length=255)


Reason = Query("", max_length=255, description="Kept with the event.")
"""For operations without a body."""
