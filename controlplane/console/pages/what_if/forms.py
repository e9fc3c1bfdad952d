"""The what-if form: from its fields to a request for `services.submit`, and back to words.

The address holds the whole form, so that it can be sent and reloaded; the same fields are posted to run it.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from django import forms
from django.http import QueryDict
from django.utils import timezone

from controlplane.console.formats import duration
from controlplane.console.pages.what_if.rows import OF_ALL, OF_FLEET, TENANT, TRACE, RowKind, Values, changes_of
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import TraceFile

HORIZONS: Final = [
    ("600", "10 minutes"), ("3600", "1 hour"), ("21600", "6 hours"), ("86400", "24 hours"), ("604800", "7 days"),
]  # fmt: skip
HORIZON_S: Final = (60, 7 * 86_400)
USUAL_WINDOW: Final = timedelta(hours=1)
MINUTE: Final = "%Y-%m-%dT%H:%M"
MAX_SEEDS: Final = 20
USUAL_PRESETS: Final = ["pilothouse"]
OWN_FUTURE, ALL_FUTURES = "own", "all"
"""Targets of edits of the fleet, besides the name of a preset, whose policies the future then has too."""
USUAL: Final = {"start": "fleet", "horizon": "3600", "warmup": "0", "seeds": "5", "fleet_for": OWN_FUTURE}
AS_NOW: Final = "As now"


class WhatIfForm(forms.Form):
    """Fields besides the rows."""

    title = forms.CharField(max_length=160, required=False)
    start = forms.CharField()
    since = forms.CharField(label="From (UTC)", required=False, widget=forms.DateTimeInput({"type": "datetime-local"}))
    until = forms.CharField(label="Until (UTC)", required=False, widget=forms.DateTimeInput({"type": "datetime-local"}))
    trace = forms.IntegerField(required=False, widget=forms.Select)
    horizon = forms.FloatField(min_value=HORIZON_S[0], max_value=HORIZON_S[1], widget=forms.Select)
    warmup = forms.FloatField(label="Warm-up, not counted (min)", min_value=0, max_value=24 * 60)
    seeds = forms.IntegerField(label="Seeds, paired", min_value=1, max_value=MAX_SEEDS)
    fleet_for = forms.ChoiceField(
        label="Applies to",
        choices=[
            (OWN_FUTURE, "a separate future"),
            (ALL_FUTURES, "all futures"),
            *((preset.name, f"a separate future with {preset.title}") for preset in PRESETS.values()),
        ],
    )
    fleet_name = forms.CharField(label="Name of this future", max_length=80, required=False)

    def __init__(self, data: QueryDict) -> None:
        super().__init__(with_usual(data))
        given = self.data["horizon"]
        own = [] if given in dict(HORIZONS) or not given.isdecimal() else [(given, duration(float(given)))]
        self.fields["horizon"].widget.choices = sorted([*HORIZONS, *own], key=lambda one: float(one[0]))
        kept = TraceFile.objects.defer("content")
        self.fields["trace"].widget.choices = [(row.pk, f"{row}, {row.requests:,} requests") for row in kept]


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

    title: str
    start: Values
    """Values of `starts.begin.Begin`; a synthetic one has the changes `tenants`."""
    horizon_s: float
    warmup_s: float
    seeds: int
    edits: list[Values]
    futures: list[Values]
    """Each with a name and changes; the first has none."""
    errors: dict[str, str] = field(default_factory=dict)


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

    edits, start = changes(OF_ALL), start_of(data)
    horizon_s = float(given["horizon"])
    if start["kind"] == "ledger":
        horizon_s = _length_s(start, errors) or horizon_s
    if start["kind"] == "synthetic":  # its only demand is that of the tenants
        edits = [edit for edit in edits if edit["kind"] != "tenant"]
        if not start["tenants"]:
            errors["New tenants"] = "a synthetic start has no other requests: add one"
    fleet, fleet_for = changes(OF_FLEET), given["fleet_for"]
    futures: list[Values] = [{"name": AS_NOW, "changes": []}]
    chosen = [PRESETS[name] for name in chosen_presets(data) if name in PRESETS]
    futures += [{"name": each.title, "changes": [dict(change) for change in each.changes]} for each in chosen]
    if fleet and fleet_for != ALL_FUTURES:
        policies = PRESETS.get(fleet_for)
        name = f"{policies.title}, other fleet" if policies else "Other fleet"
        taken = [dict(change) for change in policies.changes] if policies else []
        futures.append({"name": given.get("fleet_name") or name, "changes": [*taken, *fleet]})
    return FormRequest(
        title=given.get("title", ""),
        start=start,
        horizon_s=horizon_s,
        warmup_s=60 * float(given["warmup"]),
        seeds=int(given["seeds"]),
        edits=edits + (fleet if fleet_for == ALL_FUTURES else []),
        futures=futures,
        errors=errors,
    )


def chosen_presets(data: QueryDict) -> list[str]:
    """Return the names of the ticked presets; the usual ones in a new form."""
    return data.getlist("preset") if "chosen" in data else USUAL_PRESETS


def start_of(data: QueryDict) -> Values:
    """Return the start as the service names it."""
    given = with_usual(data)
    match given["start"]:
        case "ledger":
            return {"kind": "ledger", "since": given["since"] or None, "until": given["until"] or None}
        case "trace":
            return {"kind": "trace", "trace": given.get("trace"), "trace_keys": TRACE.values(trace_row(data))}
        case "synthetic":
            try:
                return {"kind": "synthetic", "tenants": changes_of(TENANT, data, {})}
            except ChangeError:  # reported by `asked`
                return {"kind": "synthetic", "tenants": []}
    return {"kind": "fleet"}


def trace_row(data: QueryDict) -> dict[str, str]:
    return {column.name: data.get(f"{TRACE.name}-{column.name}", "").strip() for column in TRACE.columns}


def _length_s(start: Values, errors: dict[str, str]) -> float | None:
    """Return the length of the ledger window in seconds; None if it is no window, which its start reports."""
    try:
        since, until = (datetime.fromisoformat(start[name] or "") for name in ("since", "until"))
        length_s = (until - since).total_seconds()
    except (TypeError, ValueError):
        return None
    least, most = HORIZON_S
    if not least <= length_s <= most:
        if length_s > 0:
            errors["until"] = f"the window is {length_s / 60:g} minutes long, not between 1 minute and 7 days"
        return None
    return length_s
