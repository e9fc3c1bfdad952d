"""The what-if form: from its fields to a request for `services.ask`, and the questions that fill it in.

The address holds the whole form, so that it can be sent and reloaded; the same fields are posted to run it.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django import forms
from django.http import QueryDict
from django.utils import timezone

from controlplane.console.formats import duration
from controlplane.console.pages.what_if.rows import FLEET, SCENARIO, TRACE, RowKind, Values, changes_of
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.asking import advanced_of, futures_of
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.models import TraceFile
from controlplane.simulation.whatif.starts.begin import Begin
from controlplane.simulation.whatif.starts.nodes import resolved

HORIZONS: Final = [
    ("600", "10 minutes"), ("3600", "1 hour"), ("21600", "6 hours"), ("86400", "24 hours"), ("604800", "7 days"),
]  # fmt: skip
HORIZON_S: Final = (60, 7 * 86_400)
USUAL_WINDOW: Final = timedelta(hours=1)
MINUTE: Final = "%Y-%m-%dT%H:%M"
MAX_SEEDS: Final = 20
USUAL: Final = {"start": "fleet", "horizon": "3600", "warmup": "0", "seeds": "5"}


class WhatIfForm(forms.Form):
    """Fields besides the rows."""

    title = forms.CharField(max_length=160, required=False)
    start = forms.CharField()
    since = forms.CharField(label="From (UTC)", required=False, widget=forms.DateTimeInput({"type": "datetime-local"}))
    until = forms.CharField(label="Until (UTC)", required=False, widget=forms.DateTimeInput({"type": "datetime-local"}))
    trace = forms.IntegerField(required=False, widget=forms.Select)
    horizon = forms.FloatField(min_value=HORIZON_S[0], max_value=HORIZON_S[1], widget=forms.Select)
    warmup = forms.FloatField(label="Warm-up, not counted (min)", min_value=0, max_value=24 * 60)
    seeds = forms.IntegerField(label="Repetitions", min_value=1, max_value=MAX_SEEDS)
    advanced = forms.CharField(
        label="Changes as in REST", max_length=8000, required=False, strip=False, widget=forms.Textarea({"rows": 6})
    )

    def __init__(self, data: QueryDict) -> None:
        super().__init__(with_usual(data))
        given = self.data["horizon"]
        own = [] if given in dict(HORIZONS) or not given.isdecimal() else [(given, duration(float(given)))]
        self.fields["horizon"].widget.choices = sorted([*HORIZONS, *own], key=lambda one: float(one[0]))
        kept = TraceFile.objects.defer("content")
        self.fields["trace"].widget.choices = [(row.pk, row.about) for row in kept]


def with_usual(data: QueryDict) -> QueryDict:
    """Return a copy of *data* with the usual values of fields that are missing."""
    given, now = data.copy(), timezone.now()
    for name, value in USUAL.items():
        if not given.get(name, "").strip():
            given[name] = value
    for name, at in (("since", now - USUAL_WINDOW), ("until", now)):
        given.setdefault(name, f"{at:{MINUTE}}")
    if given["start"] == "trace" and not given.get("trace"):
        newest = TraceFile.objects.order_by("-pk").values_list("pk", flat=True).first()
        given["trace"] = "" if newest is None else str(newest)
    return given


@dataclass(slots=True)
class FormRequest:
    """Request of the form; *errors* by field or title of a row."""

    begin: Values
    """Values of `starts.begin.Begin`."""
    values: Values
    """For `services.ask`, but for the start."""
    scenario: list[Values]
    """Of every future, or where A stays without it of every other one."""
    futures: list[Values]
    """Each with a name and changes; the first has none."""
    errors: dict[str, str]


def asked(data: QueryDict, now: Values) -> FormRequest:
    """Return the request of *data*; *now* is the scenario that it starts from."""
    form = WhatIfForm(data)
    errors = {name: str(of[0]) for name, of in form.errors.items()}
    given = {name: USUAL[name] for name in USUAL} | form.cleaned_data

    def changes(kinds: tuple[RowKind, ...]) -> list[Values]:
        made = []
        for kind in kinds:
            try:
                made += changes_of(kind, data, now)
            except ChangeError as error:
                errors[error.field] = error.what
        return made

    scenario, fleet, edits, own = changes(SCENARIO), changes(FLEET), list[Values](), list[Values]()
    begin, horizon_s = begin_of(data), float(given["horizon"])
    try:
        more = advanced_of(data.get("advanced", ""))
        edits = resolved(more.edits, now)
        own = [services.future_of(one.name, one.preset, resolved(one.changes, now)) for one in more.futures]
    except ChangeError as error:
        errors[error.field] = error.what
    except forms.ValidationError as error:
        errors["Advanced"] = " ".join(error.messages)
    with suppress(ValueError):  # which the start reports
        horizon_s = Begin.model_validate(begin).window_s or horizon_s
    if not HORIZON_S[0] <= horizon_s <= HORIZON_S[1]:
        errors.setdefault("until", f"the window is {horizon_s / 60:g} minutes long, not between 1 minute and 7 days")
    beside = scenario if is_beside(data) else []
    edits += [] if beside else scenario
    values = {"title": given.get("title", ""), "horizon_s": horizon_s, "edits": edits}
    values |= {"seeds": int(given["seeds"]), "warmup_s": 60 * float(given["warmup"])}
    return FormRequest(begin, values, scenario, futures_of(now, beside, data.getlist("preset"), fleet) + own, errors)


def is_beside(data: QueryDict) -> bool:
    """Return whether A stays without the scenario; usually it does."""
    return "beside" in data or "chosen" not in data


def begin_of(data: QueryDict) -> Values:
    """Return the start as the service names it."""
    given = with_usual(data)
    with suppress(ChangeError):  # which `asked` reports
        if (begin := advanced_of(data.get("advanced", "")).begin) is not None:
            return begin.model_dump(exclude_unset=True)
    match given["start"]:
        case "ledger":
            return {"kind": "ledger", "since": given["since"] or None, "until": given["until"] or None}
        case "trace":
            return {"kind": "trace", "trace": given.get("trace") or None, "trace_keys": TRACE.values(trace_row(data))}
    return {"kind": "fleet"}


def trace_row(data: QueryDict) -> dict[str, str]:
    return {column.name: data.get(f"{TRACE.name}-{column.name}", "").strip() for column in TRACE.columns}
