"""`/api`: runtime settings. Viewers read, operators change."""

from typing import Any

from django.db import transaction
from django.http import Http404
from django.shortcuts import get_object_or_404
from ninja import Field, Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest, Caller
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import Strict
from controlplane.fleet.models import Model
from controlplane.resources.settings import SETTINGS
from controlplane.tunable import Tunable
from controlplane.tuning import services
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import Described, described

router = Router(auth=VIEWERS, tags=["Settings"])


SettingOut = schema_of(SETTINGS, "SettingOut", "Setting with its effective value and default.")


class SettingIn(Strict):
    value: Any
    """Null resets it to the default, or for one model to the value for all."""
    model: str = ""
    """Empty: all models without an override."""
    reason: str = Field("", max_length=255)


def check_model(_caller: Caller, given: dict[str, Any]) -> None:
    _model(given["model"])


add_list(router, SETTINGS, SettingOut, "List all runtime settings by group.", paged=False, check=check_model)


@router.put("/settings/{name}", response=SettingOut)
@transaction.atomic
def change_setting(request: ApiRequest, name: str, body: SettingIn) -> Described:
    """Set a value for all models or for one, or reset it. It takes effect within seconds, without a restart.

    422 names the limit that a value violates.
    """
    user, model = request.auth.require(Role.OPERATOR), _model(body.model)
    row = Setting.objects.select_for_update(of=("self",)).filter(name=_known(name), model=model).first()
    if body.value is not None:
        services.change(name, body.value, user, body.reason, model)
    elif row is not None:
        services.reset(row, user, body.reason)
    each = next((each for each in described(body.model) if each.name == name), None)
    if each is None:
        raise Http404(name)
    return each


def _model(name: str) -> Model | None:
    return get_object_or_404(Model, name=name) if name else None


def _known(name: str) -> str:
    if name not in Tunable.model_fields:
        raise Http404(name)
    return name
