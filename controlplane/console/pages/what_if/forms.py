"""The what-if form: from its fields to a request for `services.submit`, and back to words.

The address holds the whole draft, so that it can be sent and reloaded; the same fields are posted to run it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.http import QueryDict
from django.utils import timezone

from controlplane.console.formats import duration
from controlplane.console.pages.what_if.rows import (
    MODEL,
    OF_ALL,
    OF_FLEET,
    TENANT,
    RowColumn,
    RowKind,
    Values,
    amount,
    changes_of,
)
from controlplane.simulation.whatif.changes.base import ChangeError, region_title
from controlplane.simulation.whatif.changes.policies import PARTS
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.changes.supply import gpus_in
from controlplane.simulation.whatif.models import TraceFile
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import traces
from controlplane.simulation.whatif.starts.nodes import with_instances
from scheduling.simulation.scenario import Scenario

HORIZONS: Final = (
    ("600", "10 minutes"), ("3600", "1 hour"), ("21600", "6 hours"), ("86400", "24 hours"), ("604800", "7 days"),
)  # fmt: skip
USUAL_HORIZON: Final = "3600"
HORIZON_S: Final = (60, 7 * 86_400)
USUAL_WINDOW: Final = timedelta(hours=1)
MINUTE: Final = "%Y-%m-%dT%H:%M"
USUAL_SEEDS: Final = 5
MOST_SEEDS: Final = 20
USUAL_PRESETS: Final = ("pilothouse",)
CUSTOM_PARTS: Final = ("routing", "ordering", "strategy", "forecaster", "release")
OWN_FUTURE, ALL_FUTURES, CUSTOM_FUTURE = "own", "all", "custom"
"""Targets of edits of the fleet, besides the name of a preset, whose policies the future then has too."""
PRICES: Final = {"price:": "usd_per_hour", "spot:": "spot_usd_per_hour"}
"""Prefixes of price fields, and the key of a GPU type for each."""
AS_NOW: Final = "As now"


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
    errors: dict[str, str] = {}

    def number(name: str, usual: float, least: float, most: float) -> float:
        text = data.get(name, "").strip()
        try:
            value = float(text) if text else usual
        except ValueError:
            errors[name] = f"{text!r} is no number"
            return usual
        if not least <= value <= most:
            errors[name] = f"{value:g} is not between {least:g} and {most:g}"
            return usual
        return value

    def changes(kinds: tuple[RowKind, ...]) -> list[Values]:
        made = []
        for kind in kinds:
            try:
                made += changes_of(kind, data)
            except ChangeError as error:
                errors[error.field] = error.what
        return made

    edits, start = changes(OF_ALL), start_of(data, errors)
    horizon_s = number("horizon", float(USUAL_HORIZON), *HORIZON_S)
    if start["kind"] == "ledger":
        horizon_s = _length_s(start, errors) or horizon_s
    if start["kind"] == "synthetic":  # its only demand is that of the tenants
        edits = [edit for edit in edits if edit["kind"] != "tenant"]
        if not start["tenants"]:
            errors["New tenants"] = "a synthetic start has no other requests: add one"
    fleet = [*_supply(data, now, errors), *_with_instances(changes(OF_FLEET), now, errors)]
    fleet_for, fleet_name = data.get("fleet-for", OWN_FUTURE), data.get("fleet-name", "").strip()[:80]
    of_all = fleet_for == ALL_FUTURES
    futures: list[Values] = [{"name": AS_NOW, "changes": []}]
    chosen = data.getlist("preset") if "chosen" in data else USUAL_PRESETS
    futures += [
        {"name": PRESETS[name].title, "changes": [dict(change) for change in PRESETS[name].changes]}
        for name in chosen
        if name in PRESETS
    ]
    custom = [
        {"kind": "policy", "part": part, "value": data[f"custom-{part}"]}
        for part in CUSTOM_PARTS
        if data.get(f"custom-{part}", "") in PARTS[part]
    ]
    joins = bool(fleet) and fleet_for == CUSTOM_FUTURE
    if custom:
        name = fleet_name if joins and fleet_name else "Custom"
        futures.append({"name": name, "changes": [*custom, *(fleet if joins else [])]})
    elif joins:
        errors["Applies to"] = "there is no custom future: choose its router, order, strategy or forecaster"
    if fleet and not (of_all or joins):
        policies = PRESETS.get(fleet_for)
        name = f"{policies.title}, other fleet" if policies else "Other fleet"
        taken = [dict(change) for change in policies.changes] if policies else []
        futures.append({"name": fleet_name or name, "changes": [*taken, *fleet]})
    return FormRequest(
        title=data.get("title", "").strip()[:160],
        start=start,
        horizon_s=horizon_s,
        warmup_s=60 * number("warmup", 0, 0, 24 * 60),
        seeds=int(number("seeds", USUAL_SEEDS, 1, MOST_SEEDS)),
        edits=edits + (fleet if of_all else []),
        futures=futures,
        errors=errors,
    )


def _with_instances(made: list[Values], now: Values, errors: dict[str, str]) -> list[Values]:
    """Return *made*, in which a lost node takes down the instances that it has in *now*."""
    kept = []
    for change in with_instances(made, now):
        if change.get("what") == "node" and not change.get("instances"):
            errors["Failures, Node"] = f"{change['node']} has no instance that is ready: nothing is lost with it"
        else:
            kept.append(change)
    return kept


def start_of(data: QueryDict, errors: dict[str, str]) -> Values:
    """Return the start as the service names it; problems with a trace's fields are added to *errors*."""
    match data.get("start", "fleet"):
        case "ledger":
            since, until = window_of(data)
            return {"kind": "ledger", "since": since or None, "until": until or None}
        case "trace":
            trace = data.get("trace") or newest()
            return {"kind": "trace", "trace": trace, "trace_keys": keys_of(data, errors)}
        case "synthetic":
            try:
                return {"kind": "synthetic", "tenants": changes_of(TENANT, data)}
            except ChangeError:  # reported by `asked`
                return {"kind": "synthetic", "tenants": []}
    return {"kind": "fleet"}


def window_of(data: QueryDict) -> tuple[str, str]:
    """Return since and until (UTC) of the ledger window as the fields have it; the last hour in a new form."""
    now = timezone.now()
    usual = {"since": now - USUAL_WINDOW, "until": now}
    since, until = (data.get(name, f"{at:{MINUTE}}") for name, at in usual.items())
    return since, until


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


def _supply(data: QueryDict, now: Values, errors: dict[str, str]) -> list[Values]:
    """Return the changes of GPUs and prices: fields that differ from *now*."""
    made: list[Values] = []
    prices: dict[str, Values] = {}
    for field_name in sorted(name for name in data if name.startswith(("gpus:", *PRICES))):
        kind, *where = field_name.split(":")
        text = data.get(field_name, "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            errors[field_name] = f"{text!r} is no number"
            continue
        if kind == "gpus" and value != gpus_in(now, *where):
            made.append({"kind": "gpus", "region": where[0], "gpu": where[1], "count": int(value)})
        elif f"{kind}:" in PRICES:
            is_now, key = now.get("gpus", {}).get(where[0], {}), PRICES[f"{kind}:"]
            if value != is_now.get(key, 0.0):
                other = {"usd_per_hour": is_now.get("usd_per_hour", 0.0)}
                prices[where[0]] = other | prices.get(where[0], {}) | {key: value}
    return [*made, *({"kind": "price", "gpu": gpu, **changed} for gpu, changed in prices.items())]


def cells_of(
    data: QueryDict, now: Values
) -> tuple[list[str], list[tuple[str, list[dict[str, Any]]]], list[tuple[str, list[dict[str, Any]]]]]:
    """Return GPU types, the cells of each region, and the cells of each price, with the present values."""
    types = sorted({group["gpu"] for group in now.get("fleet", ())})

    def cell(name: str, was: float | None, label: str) -> dict[str, Any]:
        value = data.get(name, "").strip() or ("" if was is None else f"{was:g}")
        return {
            "name": name,
            "value": value,
            "was": was,
            "differs": was is not None and value != f"{was:g}",
            "label": label,
        }

    regions = []
    for region in now.get("regions", ()):
        cells = []
        for gpu in types:
            was = gpus_in(now, region, gpu) if any(_runs(group, region, gpu) for group in now["fleet"]) else None
            cells.append(cell(f"gpus:{region}:{gpu}", was, f"GPUs of {gpu} in {region}"))
        regions.append((region, cells))
    prices = [
        (
            title,
            [
                cell(f"{name}{gpu}", now["gpus"].get(gpu, {}).get(key, 0.0), f"{title} of {gpu} an hour")
                for gpu in types
            ],
        )
        for title, (name, key) in zip(("Price", "Spot price"), PRICES.items(), strict=True)
    ]
    return types, regions, prices


def _runs(group: Values, region: str, gpu: str) -> bool:
    return bool(group["gpu"] == gpu and region in group["regions"])


FIELDS: Final = {
    "model": "Model",
    "region": "Region",
    "slo_class": "SLO class",
    "tenant": "Tenant",
    "speed": "Speed",
    "limit": "At most",
}
"""By key of a scenario's `[trace]`; `models` is NAMES."""
NUMBERS: Final = {"speed": (float, "times", "any"), "limit": (int, "requests", "1")}
"""Type of the value, its unit and the step of the field."""
SHOWN: Final = 8
"""Names of a kind that are listed."""


def _pair(row: Mapping[str, str]) -> Values:
    if not row["model"]:
        raise ChangeError("model", "is missing")
    return {"theirs": row["theirs"], "ours": row["model"]}


NAMES: Final = RowKind(
    "trace-name",
    "Models by other names",
    (RowColumn("theirs", "Name in the trace"), MODEL),
    (("Name", {"theirs": "name"}),),
    _pair,
    "None: a model is found by the name that it has here.",
)


def keys_of(data: QueryDict, errors: dict[str, str]) -> Values:
    """Return the keys of `[trace]` in *data*; problems are added to *errors* by label."""
    keys: Values = {}
    for key in FIELDS:
        text = data.get(field_of(key), "").strip()
        if not text:
            continue
        try:
            keys[key] = NUMBERS[key][0](amount({key: text}, key)) if key in NUMBERS else text
        except (ChangeError, OverflowError):
            errors[label_of(key)] = f"{text!r} is no number"
    try:
        named = {pair["theirs"]: pair["ours"] for pair in changes_of(NAMES, data)}
    except ChangeError as error:
        errors[error.field] = error.what
        named = {}
    return keys | ({"models": named} if named else {})


def field_of(key: str) -> str:
    """Return the name of the field of *key*."""
    return f"trace-{key}".replace("_", "-")


def label_of(key: str) -> str:
    """Return the label of an error of *key*."""
    return f"Trace, {FIELDS.get(key, NAMES.title if key == 'models' else key)}"


def misfits(start: Start, scenario: Scenario) -> dict[str, str]:
    """Return problems of the trace of *start* with *scenario*, by the label of the field; empty for other starts."""
    if start.arrivals["kind"] != "file":
        return {}
    return {label_of(key): what for key, what in traces.misfits(start.arrivals, scenario).items()}


def fields(data: QueryDict, values: Values, errors: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the fields of the page: name, label, value, error, and the options of a select or the unit of a number."""
    regions = list(values.get("regions", {}))
    classes = list(values.get("classes", {}))
    options = {
        "model": [("", "choose one"), *((name, name) for name in values.get("models", {}))],
        "region": [("" if at == 0 else name, region_title(name)) for at, name in enumerate(regions)],
        "slo_class": [("" if at == 0 else name, name) for at, name in enumerate(classes)],
    }
    usual = {"tenant": "trace", "speed": "1", "limit": "all"}
    made = []
    for key, label in FIELDS.items():
        _, unit, step = NUMBERS.get(key, (str, "", ""))
        made.append(
            {
                "name": field_of(key),
                "label": label,
                "value": data.get(field_of(key), ""),
                "error": errors.get(label_of(key), ""),
                "options": options.get(key),
                "usual": usual.get(key, ""),
                "unit": unit,
                "step": step,
            }
        )
    return made


def about(start: Values) -> str:
    """Describe a trace and the names in it; empty if there is none."""
    pk = str(start.get("trace") or "")
    row = TraceFile.objects.defer("content").filter(pk=pk).first() if pk.isdecimal() else None
    if row is None:
        return ""
    lists = []
    for kind, names in traces.named(row.pk).items():
        title = {"model": "models", "region": "regions", "slo_class": "SLO classes"}[kind]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lists.append(f"{title} {', '.join(names[:SHOWN])}{more}" if names else f"no {title}")
    return f"{row.requests:,} requests over {duration(row.span_s)}. It names {'; '.join(lists)}. Where it names none:"


def newest() -> int | None:
    """Return the trace that a new form begins with."""
    return TraceFile.objects.order_by("-pk").values_list("pk", flat=True).first()
