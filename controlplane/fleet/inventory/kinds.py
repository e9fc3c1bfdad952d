"""Kinds of rows that operators write: their fields, keys and references to other rows.

`/api`, the admin and fleet files write the same values. Schemas come from the fields of its Django model: types, bounds
and help come from there, and rows are checked by the model's own `full_clean`, as in the admin.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models.fields import NOT_PROVIDED
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, create_model

from controlplane.accounts.models import Budget, Membership, Tenant, User
from controlplane.accounts.services import guard_member, guard_user
from controlplane.fleet.models import (
    Adapter,
    Deployment,
    GpuType,
    Instance,
    Model,
    Node,
    PerformanceProfile,
    Region,
    ScheduledMinimum,
    SloClass,
    SwapGroup,
    WeightedTarget,
)
from controlplane.fleet.models.hardware import NumbersField

TYPES: tuple[tuple[type[models.Field[Any, Any]], Any], ...] = (
    (models.BooleanField, bool),
    (models.DecimalField, Decimal),
    (models.FloatField, FiniteFloat),
    (models.IntegerField, int),
    (NumbersField, dict[str, FiniteFloat]),
    (models.JSONField, dict[str, str]),
    (models.CharField, str),
)


class Values(BaseModel):
    """Schema that rejects unknown fields, so that typing mistakes do not pass silently."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Kind:
    """Rows of *model*, called *key* together; *fixed* fields are given once, `fields` may be changed later."""

    name: str  # as in a fleet file's tables: [[regions]]
    model: type[models.Model]
    key: tuple[str, ...] = ("name",)
    fixed: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Fields that may be written; by default all that the model has for forms."""
    optional: frozenset[str] = frozenset()
    """Fields that may be omitted although they have no default, since they can be derived."""
    secret: frozenset[str] = frozenset()
    """Fields whose values are not shown after saving."""
    deletable: bool = True
    by: Mapping[str, str] = field(default_factory=dict)
    """How references name the other row, where not by its `name`."""
    guard: Callable[[Any, Any, bool], None] = lambda row, actor, ends: None
    """Raises ValidationError where the actor may not change the row, or end it, though the role allows it."""

    @property
    def title(self) -> str:
        return str(self.model._meta.verbose_name)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        written = (name for name, column in self._columns.items() if column.editable and not column.primary_key)
        return self.only or tuple(name for name in written if name not in self.key)

    @cached_property
    def named(self) -> dict[str, type[models.Model]]:
        """Return, for each field that refers to another row, the model whose name it takes."""
        related = {name: column.related_model for name, column in self._columns.items()}
        return {name: other for name in (*self.key, *self.fixed, *self.fields) if (other := related.get(name))}

    @property
    def _columns(self) -> dict[str, Any]:
        options = self.model._meta
        return {column.name: column for column in (*options.concrete_fields, *options.many_to_many)}

    @cached_property
    def create(self) -> type[Values]:
        """Schema of a new row."""
        parts: dict[str, Any] = {name: self._part(name) for name in (*self.key, *self.fixed, *self.fields)}
        return create_model(f"{self.model.__name__}In", __base__=Values, **parts)

    @cached_property
    def change(self) -> type[Values]:
        """Schema of changes to a row; omitted fields stay."""
        parts: dict[str, Any] = {name: self._part(name, given=False) for name in self.fields}
        return create_model(f"{self.model.__name__}Change", __base__=Values, **parts)

    @cached_property
    def entry(self) -> type[Values]:
        """Schema of a table in a fleet file; only the key is required, since the row may exist."""
        types: dict[str, Any] = {name: part.annotation for name, part in self.create.model_fields.items()}
        parts: dict[str, Any] = {name: (kind | None, None) for name, kind in types.items()}
        parts |= {name: (types[name], ...) for name in self.key}
        return create_model(f"{self.model.__name__}Entry", __base__=Values, **parts)

    def find(self, key: Mapping[str, Any]) -> models.Model | None:
        """Return the row with *key*, or None."""
        lookup = {f"{name}__name" if name in self.named else name: key[name] for name in self.key}
        return self.model._default_manager.filter(**lookup).first()

    def key_of(self, row: models.Model) -> dict[str, Any]:
        return {name: getattr(row, name).name if name in self.named else getattr(row, name) for name in self.key}

    def label(self, key: Mapping[str, Any]) -> str:
        return "/".join(str(key[name]) for name in self.key)

    def values_of(self, row: models.Model) -> dict[str, Any]:
        """Return the writable fields of *row*, references by name."""
        return {name: self._read(row, name) for name in (*self.fixed, *self.fields)}

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return *values* with rows in place of names. Raises ValidationError naming the field."""
        return {name: self._resolve(name, value) for name, value in values.items()}

    def is_many(self, name: str) -> bool:
        return name in self.named and bool(self._field(name).many_to_many)

    def _resolve(self, name: str, value: Any) -> Any:
        target = self.named.get(name)
        if target is None or value is None:
            return value
        if self.is_many(name):
            return [self._row(name, target, one) for one in value]
        return self._row(name, target, value)

    def _row(self, name: str, target: type[models.Model], value: str) -> models.Model:
        row = target._default_manager.filter(**{self.by.get(name, "name"): value}).first()
        if row is None:
            raise ValidationError({name: f"There is no {target._meta.verbose_name} {value!r}."})
        return row

    def _read(self, row: models.Model, name: str) -> Any:
        value = getattr(row, name)
        if name not in self.named:
            return value
        if self.is_many(name):
            return sorted(other.name for other in value.all())
        return getattr(value, self.by.get(name, "name")) if value is not None else None

    def _field(self, name: str) -> Any:
        return self._columns[name]

    def _part(self, name: str, *, given: bool = True) -> tuple[Any, Any]:
        """Return (type, pydantic field) of a Django field."""
        source = self._field(name)
        kind: Any
        if name in self.named:
            kind = list[str] if self.is_many(name) else str
        else:
            kind = next(python for django, python in TYPES if isinstance(source, django))
        about = str(source.help_text) or None
        limits: dict[str, Any] = {}
        if kind is str and source.max_length:
            limits["max_length"] = source.max_length
        if source.null or not given or name in self.optional:
            kind = kind | None
        known = getattr(source, "default", NOT_PROVIDED)
        if not given or name in self.optional:
            return kind, Field(None, description=about, **limits)
        if known is not NOT_PROVIDED:
            return kind, Field(known() if callable(known) else known, description=about, **limits)
        if source.null or source.blank:
            empty: Any = [] if self.is_many(name) else None if source.null else ""
            return kind, Field(empty, description=about, **limits)
        return kind, Field(..., description=about, **limits)


REGION = Kind("regions", Region)
GPU_TYPE = Kind("gpu_types", GpuType)
NODE = Kind("nodes", Node)
MODEL = Kind("models", Model, optional=frozenset({"title", "weights_bytes", "kv_bytes_per_token", "context_tokens"}))
ADAPTER = Kind("adapters", Adapter, fixed=("base",))
WEIGHTED_TARGET = Kind("weighted_targets", WeightedTarget, key=("name", "target"))
PROFILE = Kind("profiles", PerformanceProfile, key=("model", "gpu_type", "tensor_parallel"))
SLO_CLASS = Kind("slo_classes", SloClass)
TENANT = Kind("tenants", Tenant, deletable=False)  # its keys, members and ledger stay: make it inactive
DEPLOYMENT = Kind(
    "deployments", Deployment, key=("model", "region", "gpu_type"), secret=frozenset({"secrets", "api_key"})
)
BUDGET = Kind(
    "budgets",
    Budget,
    key=(),
    fixed=("tenant", "api_key", "model", "kind"),
    only=("soft", "hard"),
    by={"api_key": "prefix"},
)
USER = Kind("users", User, key=(), fixed=("username",), only=("email", "is_active"), guard=guard_user)
MEMBERSHIP = Kind(
    "memberships",
    Membership,
    key=(),
    fixed=("user", "tenant"),
    only=("role",),
    by={"user": "username"},
    guard=guard_member,
)
SWAP_GROUP = Kind("swap_groups", SwapGroup)
SCHEDULE = Kind("schedules", ScheduledMinimum)


class InstanceKind(Kind):
    """Instances refer to their deployment by model, region and, if there are several, GPU type."""

    @cached_property
    def create(self) -> type[Values]:
        parts: dict[str, Any] = {
            "name": self._part("name"),
            "model": (str, Field(..., description="Of its deployment.")),
            "region": (str, Field(..., description="Of its deployment.")),
            "gpu_type": (str, Field("", description="Of its deployment; needed where there are several.")),
            "launcher": self._part("launcher"),
            "node": self._part("node"),
            "url": self._part("url"),
            "kv_events": self._part("kv_events"),
        }
        return create_model("InstanceIn", __base__=Values, **parts)

    def values_of(self, row: models.Model) -> dict[str, Any]:
        assert isinstance(row, Instance)
        of = row.deployment
        deployment = {"model": of.model.name, "region": of.region.name, "gpu_type": of.gpu_type.name}
        return deployment | {name: self._read(row, name) for name in ("launcher", *self.fields)}

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        resolved = super().resolve({name: values[name] for name in values if name not in self.fixed[:3]})
        if "model" in values or "region" in values:
            resolved["deployment"] = self._deployment(values)
        return resolved

    @staticmethod
    def _deployment(values: Mapping[str, Any]) -> Deployment:
        names = {name: values[name] for name in ("model", "region", "gpu_type") if values.get(name)}
        rows = Deployment.objects.filter(**{f"{name}__name": value for name, value in names.items()})
        deployments = list(rows.select_related("model", "region", "gpu_type")[:2])
        wanted = "/".join(str(name) for name in names.values())
        if len(deployments) == 1:
            return deployments[0]
        if deployments:
            raise ValidationError({"gpu_type": f"There are several deployments {wanted}: name the GPU type."})
        raise ValidationError({"model": f"There is no deployment {wanted}."})


INSTANCE = InstanceKind(
    "instances",
    Instance,
    fixed=("model", "region", "gpu_type", "launcher"),
    only=("node", "url", "kv_events", "host"),
)

KINDS: tuple[Kind, ...] = (
    REGION,
    GPU_TYPE,
    NODE,
    MODEL,
    SLO_CLASS,
    TENANT,
    ADAPTER,
    WEIGHTED_TARGET,
    PROFILE,
    DEPLOYMENT,
    SCHEDULE,
    INSTANCE,
)
"""In creation order; rows are deleted in reverse order."""
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
