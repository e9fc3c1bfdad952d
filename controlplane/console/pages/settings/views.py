"""Settings that can be changed while Pilothouse runs: effective values, changes and their authors."""

from dataclasses import replace
from typing import Any, Final

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import viewer_of
from controlplane.events import since
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.planning.parts import unavailable_reasons
from controlplane.resources.settings import SETTINGS
from controlplane.tunable import Tunable
from controlplane.tuning import services
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import Described

FIRST: Final = (
    *("FLOOR", "SCALE_IN_BELOW", "SCALE_OUT_ABOVE", "SCALE_COOLDOWN_S", "FORECASTER", "PLAN_EVERY_S"),
    *("MAX_HOLD_S", "QUARANTINE_S", "TENANT_WEIGHTS", "SPOT_DONATE", "LENGTHS", "LENGTH_PROMOTE"),
)
"""Settings that operators touch first; search finds the others."""


def words(value: Any) -> str:
    """Format *value* for pages."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value) or "automatic"


def _choice(name: str, choice: str) -> str:
    """Return the title of *choice* of the setting *name*; it says so where the choice is unavailable."""
    return f"{choice} (not installed)" if unavailable_reasons({name: choice}) else choice or "automatic"


def line(each: Described) -> dict[str, Any]:
    """Return one row of the page."""
    choices = ("on", "off") if each.kind == "boolean" else each.choices
    given = words(each.value) if each.kind == "boolean" else str(each.value)
    return {
        "each": each,
        "name": each.name,
        "value": words(each.value),
        "default": words(each.default),
        "unit": each.unit,
        "given": given,
        "purpose": each.purpose.replace("`", ""),
        "limits": each.limits.replace("`", ""),
        "choices": [(choice, _choice(each.name, choice)) for choice in choices],
        "anchor": each.name.lower().replace("_", "-"),
        "chosen": each.row is not None,
    }


@require_safe
@fleet_role(Role.VIEWER)
def settings(request: HttpRequest) -> HttpResponseBase:
    drawn_after = str(since.newest())
    filters, described = SETTINGS.listed(viewer_of(request), request.GET)
    model = filters["model"]
    if request.GET.get("format") == "csv":
        return SETTINGS.csv(described)
    lines = [line(each) for each in described]
    if not filters.narrow:
        lines = sorted(
            (row for row in lines if row["chosen"] or row["name"] in FIRST),
            key=lambda row: (not row["chosen"], FIRST.index(row["name"]) if row["name"] in FIRST else 0),
        )
    others = Setting.objects.exclude(model=None).values_list("model__name", flat=True).distinct().order_by()
    context = {
        "drawn_after": drawn_after,
        "filters": filters,
        "model": model,
        "rows": lines,
        "total": len(SETTINGS.rows(viewer_of(request))),
        "actions": "console/settings/setting_actions.html" if may(request, Role.OPERATOR) else "",
        "columns": [
            replace(column, label="All models") if model and column.name == "default" else column
            for column in SETTINGS.named(*SETTINGS.page)
        ],
        "others": others if not model else [],
    }
    return render(request, "console/settings/settings.html", context)


@action(Role.OPERATOR, page="console:settings", unchanged="{name} is as before")
@transaction.atomic
def change(form: ActionForm, name: str) -> str:
    """Change or reset a setting."""
    if name not in Tunable.model_fields:
        raise Http404(name)
    model = get_object_or_404(Model, name=form.fields["model"]) if form.fields.get("model") else None
    subject = f"{name} of {model}" if model else name
    given = "its default" if "reset" in form.fields else form.fields.get("value", "")[:60]
    Setting.objects.select_for_update(of=("self",)).filter(name=name, model=model).first()
    form.check(Setting(name=name, model=model), fields=[name], given=given)
    if "reset" in form.fields:
        row = Setting.objects.filter(name=name, model=model).first()
        if row is None:
            raise ActionError(f"{subject} has its default already")
        services.reset(row, form.user, form.reason)
        return f"{subject} has its default again, within seconds."
    made = services.change(name, form.fields.get("value", "").strip(), form.user, form.reason, model)
    return f"{subject} is {words(made.value)}, within seconds and without a restart."
