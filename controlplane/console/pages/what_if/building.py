"""The what-if form: what is asked is shown back as it is filled in, then run."""

from typing import Any, Final
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST
from pydantic import ValidationError as PydanticError

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import back
from controlplane.console.charts.cache import once
from controlplane.console.pages.what_if import forms
from controlplane.console.pages.what_if.forms import FormRequest, WhatIfForm, asked, start_of
from controlplane.console.pages.what_if.rows import OF_ALL, OF_FLEET, TRACE, RowKind, Values, rows_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.presets import BASELINES, PRESETS
from controlplane.simulation.whatif.models import LETTERS
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin
from controlplane.simulation.whatif.starts.begin import start_of as begun
from controlplane.simulation.whatif.timing import estimate
from scheduling.simulation.workload.traces import FORMATS

STARTS: Final = (
    ("fleet", "Live fleet, now", "Present instances, queues and look-ahead maps"),
    ("ledger", "Ledger window", "Requests of a past time, on today's fleet"),
    ("trace", "Trace", "The requests of a file that you upload"),
    ("synthetic", "Synthetic", "Requests of tenants with a rate and lengths"),
)
NOW_S: Final = 10
"""Seconds for which the form uses one read of the fleet; a run reads it again."""


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def build(request: HttpRequest) -> HttpResponseBase:
    """Show the form; run it when an operator posts it."""
    posted = request.method == "POST"
    data = request.POST if posted else request.GET
    horizon = WhatIfForm(data).data["horizon"]
    now, trouble = _now(start_of(data), float(horizon) if horizon.isdecimal() else 3600.0)
    wanted = asked(data, now.scenario if now else {})
    shown = _shown(wanted, now)
    refused = ""
    if posted and may(request, Role.OPERATOR) and not (wanted.errors or trouble):
        try:
            return redirect("console:what-if", _run(request, wanted, data, now))
        except ValidationError as error:
            refused = " ".join(f"{field}: {each}." for field, of in error.message_dict.items() for each in of)
        except (ActionError, ChangeError, ValueError) as error:
            refused = str(error)
    context = (
        _form(data, now.scenario if now else {}, wanted) | _side(wanted, shown, now, trouble) | {"refused": refused}
    )
    return render(request, "console/what_if/build.html", context, status=422 if posted else 200)


def _run(request: HttpRequest, wanted: FormRequest, data: QueryDict, now: Start | None) -> int:
    shared = parsed([*wanted.start.get("tenants", []), *wanted.edits], "edits")
    words = in_words(now.scenario, shared)[:1] if now else []
    names = ", ".join(one["name"] for one in wanted.futures[1:])
    values = {
        "title": wanted.title or f"What if … {words[0] if words else names or 'nothing changes'}",
        "start": begun(_begin(wanted.start, wanted.horizon_s), wanted.horizon_s).model_dump(mode="json"),
        "horizon_s": wanted.horizon_s,
        "warmup_s": wanted.warmup_s,
        "seeds": wanted.seeds,
        "edits": wanted.edits,
        "asked": f"{request.path}?{address_of(data)}",
    }
    return int(services.ask(values, wanted.futures[1:], user_of(request)).pk)


def address_of(data: QueryDict) -> str:
    """Return the form as a query string; a row keeps its empty values, so that columns stay together."""
    left_out = {"csrfmiddlewaretoken"} | ({"since", "until"} if data.get("start") != "ledger" else set())
    kept = [(name, values) for name, values in data.lists() if name not in left_out and any(values)]
    return urlencode([(name, value) for name, values in kept for value in values])


def _now(start: Values, horizon_s: float) -> tuple[Start | None, str]:
    """Return the start, read again every NOW_S, and why there is none."""
    second = int(timezone.now().timestamp()) // NOW_S
    try:
        return once(
            ("what-if-now", second, horizon_s, str(start)), lambda: begun(_begin(start, horizon_s), horizon_s)
        ), ""
    except (ActionError, ValueError) as error:
        return None, f"{str(error).rstrip('.')}."


def _begin(start: Values, horizon_s: float) -> Begin:
    """Return the start to be read. Raise ActionError naming the invalid field."""
    if start["kind"] == "synthetic":
        clients = [change["client"] for change in start["tenants"]]
        demand = {"too_long": "clip", "duration_h": horizon_s / 3600}
        scenario = selectors.present_scenario() | {"demand": demand, "clients": clients}
        start = {"kind": "synthetic", "scenario": scenario}
    try:
        return Begin.model_validate(start)
    except PydanticError as error:
        first = error.errors(include_url=False)[0]
        raise ActionError(f"{first['loc'][0]}: {first['msg']}") from error


def _shown(wanted: FormRequest, now: Start | None) -> list[dict[str, Any]]:
    """Describe the futures; their problems are added to the errors."""
    shown, values = [], now.scenario if now else {}
    for letter, one in zip(LETTERS, wanted.futures, strict=False):
        words: list[str] = []
        try:
            if now is not None:
                changes = [*parsed(wanted.edits, "Demand"), *parsed(one["changes"], one["name"])]
                applied(values, changes, asks=bool(values.get("clients")), shared=len(wanted.edits))
                words = in_words(values, changes)[len(wanted.edits) :]
        except ChangeError as error:
            place = error.field if error.field.startswith(f"{one['name']}[") else f"{one['name']}, {error.field}"
            wanted.errors[place] = error.what
        shown.append({"letter": letter, "name": one["name"], "words": words})
    if len(wanted.futures) > len(LETTERS):
        wanted.errors["Futures"] = f"{len(wanted.futures)} are more than {len(LETTERS)}; leave some out"
    return shown


def _form(data: QueryDict, values: Values, wanted: FormRequest) -> dict[str, Any]:
    presets, baselines = forms.chosen_presets(data), {preset.name for preset in BASELINES}

    def parts(kinds: tuple[RowKind, ...]) -> list[tuple[RowKind, list[dict[str, str]]]]:
        return [(kind, rows_of(kind, data)) for kind in kinds]

    return {
        "form": WhatIfForm(data),
        "starts": STARTS,
        "formats": sorted(FORMATS),
        "trace": (TRACE, forms.trace_row(data)),
        "of_all": parts(OF_ALL),
        "of_fleet": parts(OF_FLEET),
        "no_row": {},
        "column_choices": {
            f"{kind.name}-{column.name}": choices
            for kind in (*OF_ALL, *OF_FLEET, TRACE)
            for column in kind.columns
            if (choices := column.choices(values)) is not None
        },
        "presets": presets,
        "bundles": [preset for preset in PRESETS.values() if preset.name not in baselines],
        "baselines": BASELINES,
        "baseline_chosen": not baselines.isdisjoint(presets),
    }


def _side(wanted: FormRequest, shown: list[dict[str, Any]], now: Start | None, trouble: str) -> dict[str, Any]:
    runs, words, known = len(shown) * wanted.seeds, [], None
    try:
        shared = parsed([*wanted.start.get("tenants", []), *wanted.edits], "Demand")
        if now is not None:
            words = in_words(now.scenario, shared)
        if now is not None and not wanted.errors:
            known = estimate(now, wanted.horizon_s, runs, settings.WHAT_IF_PROCESSES, parsed(wanted.edits))
    except ChangeError:  # named with the futures
        pass
    checks = [("critical", f"{name}: {what}") for name, what in wanted.errors.items()]
    if trouble:
        checks.append(("critical", trouble))
    if now is not None:
        checks += [("ready", remark) for remark in now.remarks]
    return {
        "futures": shown,
        "most_futures": len(LETTERS),
        "in_all": words,
        "estimate": known,
        "runs": runs,
        "seeds": wanted.seeds,
        "checks": checks,
        "errors": bool(wanted.errors or trouble),
    }


@require_POST
@fleet_role(Role.OPERATOR)
def upload(request: HttpRequest) -> HttpResponse:
    """Keep an uploaded trace."""
    file = request.FILES.get("file")
    if file is None or file.name is None:
        messages.error(request, "Choose a file.")
        return back(request, "console:new-what-if")
    try:
        row = traces.upload(
            file.name, request.POST.get("format", ""), file.read(), user_of(request), request.POST.get("unit", "")
        )
        read = f"{row.requests:,} requests over {row.span_s / 60:,.3g} min, numbers read as {row.unit}"
        messages.success(request, f"{row.name}: {read}.")
    except ActionError as error:
        messages.error(request, str(error))
    return back(request, "console:new-what-if")
