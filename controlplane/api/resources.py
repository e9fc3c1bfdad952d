"""REST lists built from resources: row schema, query parameters and operation."""

from collections.abc import Callable
from types import new_class
from typing import Annotated, Any, cast

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Field as ModelField
from ninja import Field, Query, Router, Schema
from ninja.pagination import paginate
from pydantic import ValidationInfo, create_model, model_validator

from controlplane.accounts.models import Role
from controlplane.api.callers import ApiRequest, Caller
from controlplane.api.schemas import Described, Items, NewestFirst, Page, answered
from controlplane.resources.resource import Column, Resource


def schema_of(resource: Resource, name: str, doc: str = "", **more: Any) -> Any:
    """Return the schema *name* of rows of *resource*, plus fields *more*. Fleet-only columns are null for other callers."""
    columns = [column for column in resource.columns if column.rest]
    hidden = [column.name for column in columns if column.fleet]

    def hide_fleet(self: Schema, info: ValidationInfo) -> Schema:
        if not (info.context or {})["request"].auth.sees_fleet:
            for column in hidden:
                setattr(self, column, None)
        return self

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__annotations__"] = {column.name: _type(resource, column) for column in columns} | more
        namespace["__doc__"] = doc
        namespace |= {
            f"resolve_{column.name}": staticmethod(column.source) for column in columns if callable(column.source)
        }
        if hidden:
            namespace["hide_fleet"] = model_validator(mode="after")(hide_fleet)

    return new_class(name, (Described,), exec_body=fill)


def _type(resource: Resource, column: Column) -> Any:
    kind = column.type
    if kind is None:
        try:
            kind = answered(cast("ModelField[Any, Any]", resource.model._meta.get_field(column.name)))
        except FieldDoesNotExist:
            raise TypeError(f"{resource.name}.{column.name} needs a type: its model has no such field") from None
    if column.fleet:
        kind = kind | None
    about: dict[str, Any] = {"description": column.about} if column.about else {}
    if isinstance(column.source, str) and column.source:
        about["alias"] = column.source
    return Annotated[kind, Field(**about)] if about else kind


def query_of(resource: Resource) -> type[Schema]:
    """Return the query parameters that filter *resource*."""
    parameters: dict[str, Any] = {
        each.name: (str, Field("", description=each.about or None))
        if each.type is str
        else (each.type | None, Field(None, description=each.about or None))
        for each in resource.filters
        if each.rest
    }
    return create_model(f"{resource.noun.capitalize()}Query", __base__=Schema, **parameters)


def add_list(
    router: Router,
    resource: Resource,
    out: Any,
    doc: str,
    *,
    path: str = "",
    paged: bool = True,
    leave_out: tuple[str, ...] = (),
    check: Callable[[Caller, dict[str, Any]], None] = lambda caller, given: None,
) -> None:
    """Add `GET /NAME`, or *path*: rows visible to the caller, described by *doc*.

    *leave_out* are fields to omit; *check* may refuse parameters.
    """

    parameters = query_of(resource)

    def listed(request: ApiRequest, given: dict[str, Any]) -> Any:
        if any(given[each.name] for each in resource.filters if each.fleet and each.rest):
            request.auth.check(Role.VIEWER)
        check(request.auth, given)
        rows = resource.narrowed(resource.rows(request.auth), given).defer(*leave_out)
        return rows if paged else {"items": list(rows)}

    def all_rows(request: ApiRequest) -> Any:
        return listed(request, {})

    def rows(request: ApiRequest, query: Schema) -> Any:
        return listed(request, query.model_dump())

    rows.__annotations__["query"] = Query[parameters]  # type: ignore[valid-type, misc]
    operation: Callable[..., Any] = rows if parameters.model_fields else all_rows
    operation.__name__, operation.__doc__ = f"list_{resource.name}", doc
    router.get(path or f"/{resource.name}", response=(Page if paged else Items)[out])(
        paginate(NewestFirst)(operation) if paged else operation
    )
