"""REST operations built from resources: row schema, query parameters, list, and what is done with one row."""

import inspect
import re
from collections.abc import Callable
from types import new_class
from typing import Annotated, Any, Literal, cast

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Field as ModelField
from django.db.models import Model, QuerySet, SlugField
from django.shortcuts import get_object_or_404
from ninja import Field, Query, Router, Schema, Status
from ninja.pagination import paginate
from pydantic import BaseModel, ConfigDict, ValidationInfo, create_model, model_validator

from controlplane.accounts.models import Role
from controlplane.api import conditions
from controlplane.api.callers import VIEWERS, ApiRequest, Caller
from controlplane.api.conditions import IfMatch
from controlplane.api.names import NAME
from controlplane.api.schemas import (
    ActionIn,
    DecisionIn,
    Described,
    Items,
    MessageOut,
    NewestFirst,
    Page,
    Reason,
    answered,
)
from controlplane.fleet.inventory import services
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


ADMIN = Caller(fleet_role=Role.ADMIN)
"""Reads rows that were just written."""


def with_reason(schema: type[BaseModel]) -> type[BaseModel]:
    reason = (str, Field("", max_length=255, description="Kept with the event."))
    return create_model(schema.__name__, __base__=schema, reason=reason)


def given(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True, exclude={"reason"})


def path_of(resource: Resource) -> str:
    """Return the path of one row: by its name, by the rows that it is between, or by its number."""
    key = resource.kind.key if resource.kind is not None else ()
    if key == ("name",):
        slug = isinstance(cast("type[Model]", resource.model)._meta.get_field("name"), SlugField)
        return f"/{resource.name}/{'{name}' if slug else NAME}"
    return f"/{resource.name}/{'/'.join(f'{{{name}}}' for name in key) if len(key) == 2 else '{int:pk}'}"


class Row:
    """Path of one row of a resource, and the operations there."""

    def __init__(self, router: Router, resource: Resource, path: str) -> None:
        self.router, self.resource, self.path = router, resource, path
        model = cast("type[Model]", resource.model).__name__
        self.word = re.sub(r"(?<!^)(?=[A-Z])", "_", model).lower()  # `gpu_type`
        named = resource.kind.named if resource.kind is not None else {}
        self.lookups: dict[str, str] = {}
        self.parameters: list[inspect.Parameter] = []
        for kind, name in re.findall(r"{(?:(\w+):)?(\w+)}", path):
            self.lookups[name] = f"{name}__name" if name in named else name
            self.parameters.append(_parameter(name, int if kind == "int" else str))

    def find(self, caller: Caller, key: dict[str, Any]) -> Any:
        return get_object_or_404(self.rows(caller), **self.lookup(key))

    def lookup(self, key: dict[str, Any]) -> dict[str, Any]:
        return {self.lookups[name]: key[name] for name in self.lookups}

    def rows(self, caller: Caller = ADMIN) -> QuerySet[Any]:
        rows = self.resource.rows(caller)
        return rows if isinstance(rows, QuerySet) else cast("type[Model]", self.resource.model)._default_manager.all()

    def add(
        self, method: str, verb: str, about: str, function: Callable[..., Any], response: Any, *more: inspect.Parameter,
        path: str | None = None,
    ) -> None:  # fmt: skip
        """Add *method* at *path*, by default that of the row, as the operation `VERB_NOUN`."""
        path = self.path if path is None else path
        operation: Any = lambda request, **values: function(request, values)  # noqa: E731 (one for each)
        own = [each for each in self.parameters if f"{each.name}}}" in path]
        operation.__signature__ = inspect.Signature([_parameter("request", ApiRequest), *own, *more])
        operation.__name__, operation.__doc__ = f"{verb}_{self.word}", about
        auth: Any = {} if method == "get" else {"auth": VIEWERS}
        getattr(self.router, method)(path, response=response, **auth)(operation)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default)


REASON, IF_MATCH = _parameter("reason", str, Reason), _parameter("if_match", str, IfMatch)


def mount(router: Router, resource: Resource, out: Any, about: str = "", *, gets: bool = True) -> None:
    """Add all that `/api` has of *resource*, whose rows are answered as *out*: their list if *about* describes it; `GET` of
    one if *gets*; `POST`, `PATCH` and `DELETE` by its kind, as an admin; and its operations.

    Rows between two others are set by `PUT`.
    """
    if about:
        add_list(router, resource, out, about, paged=False)
    kind, row = resource.kind, Row(router, resource, path_of(resource))
    assert kind is not None

    def get(request: ApiRequest, values: dict[str, Any]) -> Any:
        conditions.tag(request, row.find(request.auth, values))
        return row.find(request.auth, values)

    def create(request: ApiRequest, values: dict[str, Any]) -> Status[Any]:
        user, body = request.auth.require(Role.ADMIN), values["body"]
        return Status(201, row.rows().get(pk=services.create(kind, given(body), user, body.reason).pk))

    def change(request: ApiRequest, values: dict[str, Any]) -> Any:
        user, body = request.auth.require(Role.ADMIN), values["body"]
        read_at = conditions.event_of(values["if_match"])
        written = services.change(kind, row.find(ADMIN, values), given(body), user, body.reason, read_at=read_at)
        return row.rows().get(pk=written.pk)

    def put(request: ApiRequest, values: dict[str, Any]) -> Any:
        user, body = request.auth.require(Role.ADMIN), values["body"]
        if row.rows().filter(**row.lookup(values)).exists():
            return change(request, values)
        key = {name: values[name] for name in row.lookups}
        return services.create(kind, key | given(body), user, body.reason)

    def delete(request: ApiRequest, values: dict[str, Any]) -> Status[None]:
        user, read_at = request.auth.require(Role.ADMIN), conditions.event_of(values["if_match"])
        services.delete(kind, row.find(ADMIN, values), user, values["reason"], read_at=read_at)
        return Status(204, None)

    changes = _parameter("body", with_reason(kind.change))
    if len(kind.key) == 2:
        row.add("put", "put", "Set it. Needs the role admin.", put, out, changes, IF_MATCH)
    else:
        new = _parameter("body", with_reason(kind.create))
        text = f"A new {resource.noun}. Needs the role admin."
        row.add("post", "create", text, create, {201: out}, new, path=f"/{resource.name}")
        row.add("patch", "change", "Only what is given changes. Needs the role admin.", change, out, changes, IF_MATCH)
    if gets:
        row.add("get", "get", f"One {resource.noun}, with its `ETag`.", get, out)
    if kind.deletable:
        text = "Refused while other rows refer to it. Needs the role admin."
        row.add("delete", "delete", text, delete, {204: None}, REASON, IF_MATCH)
    if resource.operations:
        add_operations(router, resource, MessageOut, row.path)


def add_operations(router: Router, resource: Resource, out: Any, path: str) -> None:
    """Add `POST PATH/VERB` for each operation of *resource*, as one if there are several; answered as *out*."""
    row, operations = Row(router, resource, path), {each.verb: each for each in resource.operations}
    only = next(iter(operations)) if len(operations) == 1 else ""

    def act(request: ApiRequest, values: dict[str, Any]) -> Any:
        operation = operations[only or values["action"]]
        user = request.auth.require(operation.least)
        done = operation.carry_out(row.find(request.auth, values), user, values["body"].reason)
        return {"message": done} if isinstance(done, str) else done

    about = " ".join(
        f"{verb.capitalize()}: {each.about[0].lower()}{each.about[1:]} Needs the role {each.least}."
        for verb, each in operations.items()
    )
    body = _parameter("body", ActionIn if any(each.needs_reason for each in operations.values()) else DecisionIn)
    verbs = [] if only else [_parameter("action", Literal[tuple(operations)])]
    row.add("post", only or "act_on", about, act, out, *verbs, body, path=f"{path}/{only or '{action}'}")
