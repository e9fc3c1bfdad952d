"""Fields of the form that say of an uploaded trace what it does not say itself: whose model, where, how fast."""

from collections.abc import Mapping
from typing import Any, Final

from django.http import QueryDict

from controlplane.console.formats import duration
from controlplane.console.pages.what_if.rows import MODEL, Column, Kind, Values, amount, changes_of
from controlplane.simulation.whatif.changes.base import ChangeError, region_title
from controlplane.simulation.whatif.models import TraceFile
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import traces
from scheduling.simulation.scenario import Scenario

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
"""What makes a value of the text, its unit and the step of the field."""
SHOWN: Final = 8
"""Names of a kind that are listed."""


def _pair(row: Mapping[str, str]) -> Values:
    if not row["model"]:
        raise ChangeError("model", "is missing")
    return {"theirs": row["theirs"], "ours": row["model"]}


NAMES: Final = Kind(
    "trace-name",
    "Models by other names",
    (Column("theirs", "Name in the trace"), MODEL),
    (("Name", {"theirs": "name"}),),
    _pair,
    "None: a model is found by the name that it has here.",
)


def keys_of(data: QueryDict, errors: dict[str, str]) -> Values:
    """The keys of `[trace]` that *data* has; what is wrong is written into *errors* by its label."""
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
    """The field's name."""
    return f"trace-{key}".replace("_", "-")


def label_of(key: str) -> str:
    """What an error of *key* is listed as."""
    return f"Trace, {FIELDS.get(key, NAMES.title if key == 'models' else key)}"


def misfits(start: Start, scenario: Scenario) -> dict[str, str]:
    """What of the trace that *start* takes does not fit *scenario*, by the label of the field; of other starts nothing."""
    if start.arrivals["kind"] != "file":
        return {}
    return {label_of(key): what for key, what in traces.misfits(start.arrivals, scenario).items()}


def fields(data: QueryDict, values: Values, errors: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the page draws: name, label, value, error, and the options of a select or the unit of a number."""
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
    """What a trace is and which names it has, in a sentence or two; empty if there is none."""
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
    """The trace that a form begins with."""
    return TraceFile.objects.order_by("-pk").values_list("pk", flat=True).first()
