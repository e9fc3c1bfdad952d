"""The what-if form: what is asked is shown back as it is filled in, then run."""

from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import back
from controlplane.console.charts.cache import once
from controlplane.console.pages.what_if import forms
from controlplane.console.pages.what_if.forms import FormRequest, WhatIfForm, asked, begin_of
from controlplane.console.pages.what_if.rows import AS_NOW, FLEET, SCENARIO, TRACE, RowKind, Values, rows_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.asking import described
from controlplane.simulation.whatif.changes.applying import in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.changes.questions import QUESTIONS, change_of
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import start_of as begun
from controlplane.simulation.whatif.timing import estimate
from scheduling.bundles import BUNDLES
from scheduling.simulation.workload.traces import FORMATS

NOW_S: Final = 10
"""Seconds for which the form uses one read of the fleet; a run reads it again."""


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def build(request: HttpRequest) -> HttpResponseBase:
    """Show the form; run it when an operator posts it. `?ask=` fills it in with one of QUESTIONS."""
    posted = request.method == "POST"
    data = request.POST if posted else request.GET
    form = WhatIfForm(data)
    horizon = form.data["horizon"]
    now, trouble = _now(begin_of(data), float(horizon) if horizon.isdecimal() else 3600.0)
    values = now.scenario if now else {}
    if now is not None and data.get("ask") in QUESTIONS:
        try:
            given = {name: value for name, value in data.items() if name != "ask"}
            return redirect(f"{request.path}?{urlencode(given | _filled(data['ask'], values))}")
        except ChangeError as error:
            trouble = str(error)
    wanted = asked(data, values)
    shown, wrong = described(values, wanted.values["edits"], wanted.futures)
    wanted.errors |= wrong
    refused = ""
    if posted and may(request, Role.OPERATOR) and not (wanted.errors or trouble):
        try:
            start = begun(wanted.begin, wanted.values["horizon_s"]).model_dump(mode="json")
            asks = wanted.values | {"start": start, "asked": f"{request.path}?{address_of(data)}"}
            return redirect("console:what-if", services.ask(asks, wanted.futures[1:], user_of(request)).pk)
        except ValidationError as error:
            refused = " ".join(f"{field}: {each}." for field, of in error.message_dict.items() for each in of)
        except (ActionError, ChangeError, ValueError) as error:
            refused = str(error)
    context = _form(data, form, values) | _side(wanted, shown, now, trouble) | {"refused": refused}
    return render(request, "console/what_if/build.html", context, status=422 if posted else 200)


def _filled(question: str, values: Values) -> dict[str, Any]:
    """Return the fields of the form for one of QUESTIONS."""
    change = change_of(question, values)
    kind = change.pop("kind")
    fields = {f"{kind}-{key}": ",".join(of) if isinstance(of, list) else of for key, of in change.items()}
    more = {"demand-edit": "factor", "demand-by": AS_NOW} if kind == "failure" else {}
    return {"chosen": "yes", "beside": "yes", "horizon": "600", **more, **fields}


def address_of(data: QueryDict) -> str:
    """Return the form as a query string; a row keeps its empty values, so that columns stay together."""
    left_out = {"csrfmiddlewaretoken"} | ({"since", "until"} if data.get("start") != "ledger" else set())
    kept = [(name, values) for name, values in data.lists() if name not in left_out and any(values)]
    return urlencode([(name, value) for name, values in kept for value in values])


def _now(begin: Values, horizon_s: float) -> tuple[Start | None, str]:
    """Return the start, read again every NOW_S, and why there is none."""
    second = int(timezone.now().timestamp()) // NOW_S
    try:
        return once(("what-if-now", second, horizon_s, str(begin)), lambda: begun(begin, horizon_s)), ""
    except (ActionError, ValueError) as error:
        return None, f"{str(error).rstrip('.')}."


def _form(data: QueryDict, form: WhatIfForm, values: Values) -> dict[str, Any]:
    def parts(kinds: tuple[RowKind, ...]) -> list[tuple[RowKind, list[dict[str, str]]]]:
        return [(kind, rows_of(kind, data)) for kind in kinds]

    return {
        "form": form,
        "formats": sorted(FORMATS),
        "trace": (TRACE, forms.trace_row(data)),
        "scenario": parts(SCENARIO),
        "fleet": parts(FLEET),
        "no_row": {},
        "column_choices": {
            f"{kind.name}-{column.name}": choices
            for kind in (*SCENARIO, *FLEET, TRACE)
            for column in kind.columns
            if (choices := column.choices(values)) is not None
        },
        "presets": data.getlist("preset"),
        "bundles": [PRESETS[name] for name in BUNDLES],
        "beside": forms.is_beside(data),
    }


def _side(wanted: FormRequest, shown: list[dict[str, Any]], now: Start | None, trouble: str) -> dict[str, Any]:
    seeds, words, known = wanted.values["seeds"], [], None
    runs, horizon_s = len(shown) * seeds, wanted.values["horizon_s"]
    checks = [("critical", f"{name}: {what}") for name, what in wanted.errors.items()]
    checks += [("critical", trouble)] if trouble else []
    if now is not None:
        with suppress(ChangeError):  # named with the futures
            words = in_words(now.scenario, parsed(wanted.values["edits"], "Scenario"))
            known = estimate(now, horizon_s, runs, settings.WHAT_IF_PROCESSES, parsed(wanted.scenario))
        checks += [("ready", remark) for remark in now.remarks]
    side = {"futures": shown, "in_all": words, "estimate": known, "runs": runs, "seeds": seeds, "checks": checks}
    return side | {"errors": bool(wanted.errors or trouble)}


@require_POST
@fleet_role(Role.OPERATOR)
def upload(request: HttpRequest) -> HttpResponse:
    """Keep an uploaded trace."""
    file = request.FILES.get("file")
    try:
        if file is None or file.name is None:
            raise ActionError("Choose a file.")
        row = traces.upload(
            file.name, request.POST.get("format", ""), file.read(), user_of(request), request.POST.get("unit", "")
        )
        messages.success(request, f"{row.about}.")
    except ActionError as error:
        messages.error(request, str(error))
    return back(request, "console:new-what-if")
