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
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, create_model, model_validator

from controlplane.accounts.models import Role, User
from controlplane.api.callers import VIEWERS, ApiRequest, Caller
from controlplane.api.errors import ApiError
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
from controlplane.fleet.inventory.kinds import Kind
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
        each.name: (str, Field("", max_length=getattr(each.control, "length", None), description=each.about or None))
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


def path_of(resource: Resource) -> str:
    """Return the path of one row: by its name where its kind has it as its key, else by its number."""
    if resource.kind is None or resource.kind.key != ("name",):
        return f"/{resource.name}/{{int:pk}}"
    slug = isinstance(cast("type[Model]", resource.model)._meta.get_field("name"), SlugField)
    return f"/{resource.name}/{'{name}' if slug else NAME}"


class Row:
    """Path of one row of a resource, and the operations there."""

    def __init__(self, router: Router, resource: Resource, path: str = "") -> None:
        self.router, self.resource, self.path = router, resource, path or path_of(resource)
        model = cast("type[Model]", resource.model).__name__
        self.word = re.sub(r"(?<!^)(?=[A-Z])", "_", model).lower()  # `alert_rule`
        self.parameters = [
            _parameter(name, int if kind == "int" else str)
            for kind, name in re.findall(r"{(?:(\w+):)?(\w+)}", self.path)
        ]

    def find(self, caller: Caller, values: dict[str, Any]) -> Any:
        return get_object_or_404(self.rows(caller), **{each.name: values[each.name] for each in self.parameters})

    def rows(self, caller: Caller) -> QuerySet[Any]:
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
        getattr(self.router, method)(path, response=response, auth=VIEWERS)(operation)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default)


REASON = _parameter("reason", str, Reason)


def add_changes(router: Router, resource: Resource, out: Any) -> None:
    """Add `POST`, `PATCH` and `DELETE` of rows without a name, by their kind, as an admin; `/inventory` has the others."""
    kind, row = cast(Kind, resource.kind), Row(router, resource)

    def body_of(schema: type[BaseModel]) -> inspect.Parameter:
        reason = (str, Field("", max_length=255, description="Kept with the event."))
        return _parameter("body", create_model(schema.__name__, __base__=schema, reason=reason))

    def written(request: ApiRequest, values: dict[str, Any]) -> tuple[User, dict[str, Any]]:
        """Return who writes, and what."""
        return request.auth.require(Role.ADMIN), values["body"].model_dump(exclude_unset=True, exclude={"reason"})

    def create(request: ApiRequest, values: dict[str, Any]) -> Status[Any]:
        user, given = written(request, values)
        made = services.create(kind, given, user, values["body"].reason)
        return Status(201, row.rows(request.auth).get(pk=made.pk))

    def change(request: ApiRequest, values: dict[str, Any]) -> Any:
        user, given = written(request, values)
        known = row.find(request.auth, values)
        services.change(kind, known, given, user, values["body"].reason)
        return row.rows(request.auth).get(pk=known.pk)

    def delete(request: ApiRequest, values: dict[str, Any]) -> Status[None]:
        user = request.auth.require(Role.ADMIN)
        services.delete(kind, row.find(request.auth, values), user, values["reason"])
        return Status(204, None)

    new, text = body_of(kind.create), f"A new {resource.noun}. Needs the role admin."
    row.add("post", "create", text, create, {201: out}, new, path=f"/{resource.name}")
    text = "Only what is given changes. Needs the role admin."
    row.add("patch", "change", text, change, out, body_of(kind.change))
    row.add("delete", "delete", "Needs the role admin.", delete, {204: None}, REASON)


def add_operations(router: Router, resource: Resource, out: Any = MessageOut, path: str = "") -> None:
    """Add `POST PATH/VERB` for each operation of *resource*, as one if there are several; answered as *out*.

    The body has a reason, and what the operation needs.
    """
    row, operations = Row(router, resource, path), {each.verb: each for each in resource.operations}
    only = next(iter(operations)) if len(operations) == 1 else ""

    def act(request: ApiRequest, values: dict[str, Any]) -> Any:
        operation, body = operations[only or values["action"]], values["body"]
        user = request.auth.require(operation.least)
        if operation.needs_reason and not body.reason:
            raise ApiError(422, "invalid", "A reason is needed.", "reason")
        given = body.model_dump(exclude_unset=True, exclude={"reason"})
        if unknown := sorted(given.keys() - operation.takes.model_fields.keys()):
            raise ApiError(422, "invalid", f"{operation.verb} takes no {unknown[0]}.", unknown[0])
        try:
            needed = operation.read(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ApiError(422, "invalid", first["msg"], str(first["loc"][0])) from None
        done = operation.carry_out(row.find(request.auth, values), user, body.reason, **needed)
        return {"message": done} if isinstance(done, str) else done

    about = " ".join(
        f"{verb.capitalize()}: {each.about[0].lower()}{each.about[1:]} Needs the role {each.least}."
        for verb, each in operations.items()
    )
    base: Any = ActionIn if all(each.needs_reason for each in operations.values()) else DecisionIn
    fields: dict[str, Any] = {
        name: (field.annotation, field if only else Field(None, description=field.description))
        for each in operations.values()
        for name, field in each.takes.model_fields.items()
    }
    body = create_model(f"{row.word.title().replace('_', '')}ActionIn", __base__=base, **fields) if fields else base
    verbs = [] if only else [_parameter("action", Literal[tuple(operations)])]
    verb = only.replace("-", "_") or "act_on"
    path = f"{row.path}/{only or '{action}'}"
    row.add("post", verb, about, act, out, *verbs, _parameter("body", body), path=path)
