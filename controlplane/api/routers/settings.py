"""`/api`: runtime settings. Viewers read, operators change."""

from datetime import datetime
from typing import Any

from django.http import Http404
from django.shortcuts import get_object_or_404
from ninja import Field, Query, Router, Schema

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.schemas import Described, Items, Reason, Strict
from controlplane.fleet.models import Model
from controlplane.tunable import Tunable
from controlplane.tuning import selectors, services
from controlplane.tuning.models import Setting

router = Router(auth=VIEWERS, tags=["Settings"])


class SettingOut(Described):
    """Setting with its effective value and default."""

    name: str
    model: str
    """Empty: all models without an override."""
    group: str
    purpose: str
    kind: str
    """`boolean`, `integer`, `number`, `choice` or `text`."""
    unit: str
    limits: str
    choices: list[str]
    per_model: bool
    """Whether it can be overridden per model."""
    value: Any
    default: Any
    """Value after a reset: the environment's, or for one model the value for all."""
    changed: bool
    changed_at: datetime | None
    changed_by: str | None


class SettingQuery(Schema):
    model: str = Field("", description="The settings of one model: those that it may have values of its own of.")


class SettingIn(Strict):
    value: Any
    model: str = ""
    """Empty: all models without an override."""
    reason: str = Field("", max_length=255)


@router.get("/settings", response=Items[SettingOut])
def list_settings(request: ApiRequest, query: Query[SettingQuery]) -> dict[str, Any]:
    """List all runtime settings by group."""
    _model(query.model)
    return {"items": [_shown(each) for each in selectors.described(query.model)]}


@router.put("/settings/{name}", response=SettingOut)
def change_setting(request: ApiRequest, name: str, body: SettingIn) -> dict[str, Any]:
    """Set a value for all models or for one. It takes effect within seconds, without a restart.

    422 names the limit that a value violates.
    """
    user, model = request.auth.require(Role.OPERATOR), _model(body.model)
    services.change(_known(name), body.value, user, body.reason, model)
    return _one(name, body.model)


@router.delete("/settings/{name}", response=SettingOut)
def reset_setting(request: ApiRequest, name: str, query: Query[SettingQuery], reason: str = Reason) -> dict[str, Any]:
    """Reset to the default, or for one model to the value for all."""
    user, model = request.auth.require(Role.OPERATOR), _model(query.model)
    row = Setting.objects.filter(name=_known(name), model=model).first()
    if row is not None:
        services.reset(row, user, reason)
    return _one(name, query.model)


def _model(name: str) -> Model | None:
    return get_object_or_404(Model, name=name) if name else None


def _known(name: str) -> str:
    if name not in Tunable.model_fields:
        raise Http404(name)
    return name


def _one(name: str, model: str) -> dict[str, Any]:
    each = next((each for each in selectors.described(model) if each.name == name), None)
    if each is None:
        raise Http404(name)
    return _shown(each)


def _shown(each: selectors.Described) -> dict[str, Any]:
    names = ("name", "model", "group", "purpose", "kind", "unit", "limits", "choices", "per_model", "value", "default")
    row = each.row
    return {
        **{name: getattr(each, name) for name in names},
        "changed": row is not None,
        "changed_at": row.changed_at if row else None,
        "changed_by": row.changed_by if row else None,
    }
