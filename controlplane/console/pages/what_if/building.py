"""The what-if form: filled from the address, shown with its consequences, and run."""

from functools import lru_cache
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
from controlplane.console.formats import duration
from controlplane.console.pages.what_if import forms
from controlplane.console.pages.what_if.forms import (
    ALL_FUTURES,
    CUSTOM_FUTURE,
    CUSTOM_PARTS,
    HORIZONS,
    MOST_SEEDS,
    OWN_FUTURE,
    USUAL_HORIZON,
    USUAL_PRESETS,
    FormRequest,
    asked,
    cells_of,
    start_of,
    window_of,
)
from controlplane.console.pages.what_if.rows import OF_ALL, OF_FLEET, RowKind, Values, rows_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.planning.titles import title_of
from controlplane.resources.names import place_titles
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError, region_title
from controlplane.simulation.whatif.changes.policies import PARTS, TITLES
from controlplane.simulation.whatif.changes.presets import BASELINES, PRESETS
from controlplane.simulation.whatif.models import LETTERS, TraceFile, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.begin import Begin
from controlplane.simulation.whatif.starts.begin import start_of as begun
from controlplane.simulation.whatif.timing import estimate
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.workload.traces import FORMATS

STARTS: Final = (
    ("fleet", "Live fleet, now", "Present instances, queues and look-ahead maps"),
    ("ledger", "Ledger window", "Requests of a past time, on today's fleet"),
    ("trace", "Trace", "The requests of a file that you upload"),
    ("synthetic", "Synthetic", "Requests of tenants with a rate and lengths"),
)
NOW_S: Final = 10
"""Seconds for which the form uses one read of the fleet; a run reads it again."""
PAST: Final = 5


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def build(request: HttpRequest) -> HttpResponseBase:
    """Show the form; run it when an operator posts it."""
    posted = request.method == "POST"
    data = request.POST if posted else request.GET
    horizon_s = float(data.get("horizon") or USUAL_HORIZON) if (data.get("horizon") or "0").isdecimal() else 3600.0
    now, trouble = _now(start_of(data, {}), horizon_s)
    values = now.scenario if now else {}
    wanted = asked(data, values)
    shown = _shown(wanted, now)
    refused = ""
    draft = _draft(data)
    keeps = posted and "keep" in data
    if posted and may(request, Role.OPERATOR) and (keeps or not (wanted.errors or trouble)):
        try:
            if keeps:
                return _kept(request, draft, wanted, data, values)
            return redirect("console:what-if", _run(request, wanted, data, values, draft))
        except ValidationError as error:
            refused = " ".join(error.messages)
        except (ActionError, ChangeError, ValueError) as error:
            refused = str(error)
    context = _form(data, values, wanted) | _side(wanted, shown, now, trouble)
    context |= {"refused": refused, "draft": draft}
    return render(request, "console/what_if/build.html", context, status=422 if posted else 200)


def _draft(data: QueryDict) -> WhatIf | None:
    """Return the draft that the form edits; None for a new question, and for a draft that was run or deleted."""
    pk = data.get("draft", "")
    return WhatIf.objects.filter(pk=pk, state=WhatIfState.DRAFT).first() if pk.isdecimal() else None


def _kept(
    request: HttpRequest, draft: WhatIf | None, wanted: FormRequest, data: QueryDict, scenario: Values
) -> HttpResponseBase:
    """Store the form with its errors, and continue editing."""
    values = _values(request, wanted, data, scenario) | {"start": {}}
    row = services.keep_draft(draft, values, wanted.futures[1:], user_of(request))
    messages.success(request, f"“{row}” is kept as a draft.")
    return redirect(f"{row.asked}&draft={row.pk}")


def _values(request: HttpRequest, wanted: FormRequest, data: QueryDict, scenario: Values) -> Values:
    """Return the form's values that a row stores, without its start."""
    try:
        words = in_words(scenario, parsed([*wanted.start.get("tenants", []), *wanted.edits], "edits"))
    except (ChangeError, KeyError):  # a draft may be wrong, and there may be no fleet to speak of
        words = []
    names = [one["name"] for one in wanted.futures[1:]]
    title = wanted.title or f"What if … {words[0] if words else ', '.join(names) or 'nothing changes'}"
    return {
        "title": title[:160],
        "horizon_s": wanted.horizon_s,
        "warmup_s": wanted.warmup_s,
        "seeds": 1 if data.get("one-seed") else wanted.seeds,
        "edits": wanted.edits,
        "asked": f"{request.path}?{address_of(data, scenario)}",
    }


def _run(request: HttpRequest, wanted: FormRequest, data: QueryDict, scenario: Values, draft: WhatIf | None) -> int:
    user = user_of(request)
    start = begun(_begin(wanted.start, wanted.horizon_s), wanted.horizon_s)
    values = _values(request, wanted, data, scenario) | {"start": start.model_dump(mode="json")}
    row = services.save_draft(draft, values, wanted.futures[1:], user)
    try:
        services.submit(row, user)
    except (ValidationError, ActionError):
        if draft is None:
            row.delete()
        raise
    return int(row.pk)


def address_of(data: QueryDict, scenario: Values) -> str:
    """Return the draft as a query string, without unchanged GPUs and prices: a later fleet may have others."""
    _, regions, prices = cells_of(data, scenario)
    cells = [cell for _, own in (*regions, *prices) for cell in own]
    left_out = {"csrfmiddlewaretoken", "one-seed", "keep", "draft"}
    if data.get("start") != "ledger":
        left_out |= {"since", "until"}
    left_out |= {cell["name"] for cell in cells if not cell["differs"]}
    return urlencode(
        [(name, value) for name, values in data.lists() if name not in left_out for value in values if value]
    )


def _horizons(asked_s: float) -> list[tuple[str, str]]:
    """Return the horizons that the form offers, including the one of its address."""
    own = (f"{asked_s:g}", duration(asked_s))
    return sorted([*HORIZONS, *([] if own[0] in dict(HORIZONS) else [own])], key=lambda one: float(one[0]))


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
                changed = applied(values, changes, asks=bool(values.get("clients")), shared=len(wanted.edits))
                wanted.errors.update(forms.misfits(now, changed.scenario))
                words = in_words(values, changes)[len(wanted.edits) :]
        except ChangeError as error:
            place = error.field if error.field.startswith(f"{one['name']}[") else f"{one['name']}, {error.field}"
            wanted.errors[place] = error.what
        shown.append({"letter": letter, "name": one["name"], "words": words})
    if len(wanted.futures) > len(LETTERS):
        wanted.errors["Futures"] = f"{len(wanted.futures)} are more than {len(LETTERS)}; leave some out"
    return shown


def _form(data: QueryDict, values: Values, wanted: FormRequest) -> dict[str, Any]:
    presets = data.getlist("preset") if "chosen" in data else list(USUAL_PRESETS)
    baselines = {preset.name for preset in BASELINES}
    gpu_types, regions, prices = cells_of(data, values)
    since, until = window_of(data)
    ledger = wanted.start["kind"] == "ledger"  # whose horizon is its window

    def parts(kinds: tuple[RowKind, ...]) -> list[tuple[RowKind, list[dict[str, str]]]]:
        return [(kind, rows_of(kind, data)) for kind in kinds]

    return {
        "starts": STARTS,
        "start": data.get("start") or "fleet",
        "since": since,
        "until": until,
        "traces": TraceFile.objects.defer("content"),
        "formats": sorted(FORMATS),
        "trace_fields": forms.fields(data, values, wanted.errors),
        "trace_about": forms.about(wanted.start),
        "trace_names": (forms.NAMES, rows_of(forms.NAMES, data)),
        "horizons": list(HORIZONS) if ledger else _horizons(wanted.horizon_s),
        "horizon": (data.get("horizon") or USUAL_HORIZON) if ledger else f"{wanted.horizon_s:g}",
        "warmup": data.get("warmup") or "0",
        "most_seeds": MOST_SEEDS,
        "title": data.get("title", ""),
        "of_all": parts(OF_ALL),
        "of_fleet": parts(OF_FLEET),
        "no_row": {},
        "column_choices": {
            f"{kind.name}-{column.name}": column.choices(values)
            for kind in (*OF_ALL, *OF_FLEET, forms.NAMES)
            for column in kind.columns
            if column.choices
        },
        "gpu_types": [place_titles().get(gpu, gpu) for gpu in gpu_types],
        "regions": [(region_title(name), cells) for name, cells in regions],
        "prices": prices,
        "applies_to": _applies_to(data.get("fleet-for", OWN_FUTURE)),
        "fleet_name": data.get("fleet-name", ""),
        "scenario_keys": scenario_keys(),
        "presets": presets,
        "bundles": [preset for preset in PRESETS.values() if preset.name not in baselines],
        "baselines": BASELINES,
        "baseline_chosen": not baselines.isdisjoint(presets),
        "custom": [
            (
                part,
                TITLES[part].capitalize(),
                [(name, title_of(name)) for name in PARTS[part]],
                data.get(f"custom-{part}"),
            )
            for part in CUSTOM_PARTS
        ],
        "custom_chosen": any(data.get(f"custom-{part}") for part in CUSTOM_PARTS),
    }


def _applies_to(chosen: str) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Return the groups of targets for edits of the fleet: value, title, and whether it is *chosen*."""
    groups = (
        ("", ((OWN_FUTURE, "a separate future"), (ALL_FUTURES, "all futures"), (CUSTOM_FUTURE, "the custom future"))),
        ("A separate future, with", tuple((preset.name, preset.title) for preset in PRESETS.values())),
    )
    return [(label, [(value, title, value == chosen) for value, title in options]) for label, options in groups]


def _side(wanted: FormRequest, shown: list[dict[str, Any]], now: Start | None, trouble: str) -> dict[str, Any]:
    runs = len(shown) * wanted.seeds
    shared = [*wanted.start.get("tenants", []), *wanted.edits]
    known = (
        estimate(now, wanted.horizon_s, runs, settings.WHAT_IF_PROCESSES, shared) if now and not wanted.errors else None
    )
    if known and not known.requests and not any(edit["kind"] in ("tenant", "application") for edit in wanted.edits):
        wanted.errors["Demand"] = (
            "no requests came in the last hour, so none are expected: add a tenant or an application"
        )
    checks = [("critical", f"{name}: {what}") for name, what in wanted.errors.items()]
    if trouble:
        checks.append(("critical", trouble))
    if now is not None:
        checks += [("ready", remark) for remark in now.remarks]
    try:
        in_all = in_words(now.scenario, parsed(shared, "Demand")) if now and shared else []
    except ChangeError:
        in_all = []
    past = selectors.what_ifs().exclude(state=WhatIfState.DRAFT)
    return {
        "futures": shown,
        "most_futures": len(LETTERS),
        "in_all": in_all,
        "estimate": known,
        "runs": runs,
        "seeds": wanted.seeds,
        "checks": checks,
        "errors": bool(wanted.errors or trouble),
        "past": past[:PAST],
        "past_count": past.count(),
    }


@lru_cache(maxsize=1)
def scenario_keys() -> list[str]:
    """Return every single key of a scenario, such as `planner.epsilon`, for the form to offer."""
    keys = []
    for name, place in Scenario.model_fields.items():
        fields = getattr(place.annotation, "model_fields", None)
        keys += (
            [f"{name}.{key}" for key in fields] if fields else [name] if place.annotation in (int, float, str) else []
        )
    return sorted(keys)


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
