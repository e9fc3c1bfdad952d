"""REST lists built from resources: row schema, query parameters and operation."""

from collections.abc import Callable
from types import new_class
from typing import Annotated, Any, cast

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Field as ModelField
from django.db.models import Model, QuerySet
from ninja import Field, Query, Router, Schema
from ninja.pagination import paginate
from pydantic import ConfigDict, ValidationInfo, create_model, model_validator

from controlplane.accounts.models import Role
from controlplane.api.callers import ApiRequest, Caller
from controlplane.api.schemas import Described, Items, NewestFirst, Page, answered
from controlplane.resources.resource import Column, Resource
from controlplane.resources.tables import value


def schema_of(resource: Resource, name: str, doc: str = "", *more: Column) -> Any:
    """Return the schema *name* of rows of *resource*, plus *more*. Fleet-only columns are null for other callers."""
    columns = [column for column in (*resource.columns, *more) if column.rest]
    hidden = [column.name for column in columns if column.fleet]

    def hide_fleet(self: Schema, info: ValidationInfo) -> Schema:
        if not (info.context or {})["request"].auth.sees_fleet:
            for column in hidden:
                setattr(self, column, None)
        return self

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__annotations__"] = {column.name: _type(resource, column) for column in columns}
        namespace["__doc__"] = doc
        # It has no source: pydantic would look for one in each frame below this, which takes a second of processor time.
        namespace["model_config"] = ConfigDict(use_attribute_docstrings=False)
        namespace |= {
            f"resolve_{column.name}": staticmethod(_resolver(column.source)) for column in columns if column.source
        }
        if hidden:
            namespace["hide_fleet"] = model_validator(mode="after")(hide_fleet)

    return new_class(name, (Described,), exec_body=fill)


def _resolver(source: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    return source if callable(source) else lambda row: value(row, source)


def _type(resource: Resource, column: Column) -> Any:
    kind = column.type
    if kind is None:
        try:
            fields = cast("type[Model]", resource.model)._meta
            kind = answered(cast("ModelField[Any, Any]", fields.get_field(column.name)))
        except (AttributeError, FieldDoesNotExist):
            raise TypeError(f"{resource.name}.{column.name} needs a type: its model has no such field") from None
    if column.fleet:
        kind = kind | None
    about: dict[str, Any] = {"description": column.about} if column.about else {}
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
    return create_model(f"{resource.noun.title().replace(' ', '')}Query", __base__=Schema, **parameters)


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
    show: Callable[[list[Any]], list[Any]] = list,
) -> None:
    """Add `GET /NAME`, or *path*: rows visible to the caller, described by *doc*.

    *leave_out* are fields to omit; *check* may refuse parameters. Lists without pages are completed by *show*.
    """

    parameters = query_of(resource)

    def listed(request: ApiRequest, given: dict[str, Any]) -> Any:
        if any(given[each.name] for each in resource.filters if each.fleet and each.rest):
            request.auth.check(Role.VIEWER)
        check(request.auth, given)
        rows = resource.narrowed(resource.rows(request.auth), given)
        if isinstance(rows, QuerySet):
            rows = rows.defer(*leave_out)
        return rows if paged else {"items": show(list(rows))}

    def all_rows(request: ApiRequest) -> Any:
        return listed(request, {})

    def rows(request: ApiRequest, query: Schema) -> Any:
        return listed(request, query.model_dump())

    rows.__annotations__["query"] = Query[parameters]  # type: ignore[valid-type, misc]
    operation: Callable[..., Any] = rows if parameters.model_fields else all_rows
    operation.__name__, operation.__doc__ = f"list_{resource.name.replace('-', '_')}", doc
    router.get(path or f"/{resource.name}", response=(Page if paged else Items)[out])(
        paginate(NewestFirst)(operation) if paged else operation
    )
