"""The table of usage: lines by what they are grouped by, with what was idle, and its columns as a file."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from controlplane.resources.filters import Order
from controlplane.resources.tables import Columns, sorted_by
from controlplane.usage.models import SUMS, Work
from controlplane.usage.selectors import Asked, summed, usage

GROUPS = {
    "tenant": "tenant",
    "key": "API key",
    "model": "model",
    "class": "SLO class",
    "work": "kind of work",
    "application": "application",
    "batch": "batch",
    "instance": "instance",
    "day": "day",
}
"""By its name in addresses, what a line may be of."""
OF = {
    "tenant": ("tenant",),
    "key": ("tenant", "key"),
    "model": ("model",),
    "class": ("slo_class",),
    "work": ("work",),
    "application": ("tenant", "application"),
    "batch": ("tenant", "batch"),
    "instance": ("instance",),
    "day": ("day",),
}
WITH_OWN_IDLE = ("model", "instance", "day")
"""Groups whose lines have their own idle time; in the others it is a line."""
DETAILS = {"tenant": "Title", "key": "Key"}
"""What stands next to the name of a line, by its heading."""
IDLE = "Idle"
MEASURES = ("requests", "prompt_tokens", "output_tokens", "gpu_hours", "cost_usd", "charged_usd")
SORTED_BY = ("name", *MEASURES, "idle_usd")


def _exact(name: str) -> Callable[[Any], str]:
    """Return a column of dollars whose lines add up to the cent, however many there are."""
    return lambda line: f"{line[name]:.6f}"


SUMMED: Columns = {
    "Requests": "requests",
    "Prompt (tokens)": "prompt_tokens",
    "Output (tokens)": "output_tokens",
    "KV (token-seconds)": "kv_token_s",
    "GPU time (h)": "gpu_hours",
    "Cost (USD)": _exact("cost_usd"),
    "Charged (USD)": _exact("charged_usd"),
}
NAMES: dict[str, Columns] = {
    "tenant": {"Tenant": "name", "Title": "detail"},
    "key": {"API key": "name", "Key": "detail", "Tenant": "tenant"},
    "model": {"Model": "name"},
    "class": {"SLO class": "name"},
    "work": {"Kind of work": "name"},
    "application": {"Application": "name", "Tenant": "tenant"},
    "batch": {"Batch": "name", "Tenant": "tenant"},
    "instance": {"Instance": "name"},
}

Line = dict[str, Any]


DONATED: Columns = {
    "Model": "model",
    "Donated (instance-hours)": "instance_hours",
    "GPU time (h)": "gpu_hours",
    "Cost (USD)": "cost_usd",
    "At spot price (USD)": "earned_usd",
    "Without a spot price (instance-hours)": "unpriced_hours",
}
"""Of the file of what was donated to the spot pool."""


def columns(group: str, sees_idle: bool, zone: ZoneInfo) -> Columns:
    """Of the file: those of *group*, its sums, and for groups with idle time what that cost."""
    idle: Columns = {"Idle cost (USD)": _exact("idle_usd")} if sees_idle and group in WITH_OWN_IDLE else {}
    names: Columns = NAMES.get(group, {f"Day ({zone})": "name"})
    return {**names, **SUMMED, **idle}


def lines(asked: Asked, group: str, order: Order) -> list[Line]:
    """One line for each of *group*, sorted, then what was idle."""
    named: dict[Any, Line] = {}
    idle = _line(IDLE, idle=True)
    for row in map(with_hours, usage(asked, OF[group])):
        if row["idle"] and group not in WITH_OWN_IDLE:
            _add(idle, row)
            continue
        name, key = name_of(row, group), key_of(row, group)
        line = named.setdefault(key, _line(name, **_more(row, group), key=key))
        if row["idle"]:
            line["idle_usd"] += row["cost_usd"]
        else:
            _add(line, row)
    most = max([line["cost_usd"] for line in (*named.values(), idle)], default=0.0)
    for line in (*named.values(), idle):
        line["share"] = line["cost_usd"] / most if most else 0.0
    return sorted_by(order, named.values()) + ([idle] if idle["gpu_hours"] else [])


def name_of(row: dict[str, Any], group: str) -> str:
    """What a line or a series is called."""
    match group:
        case "tenant":
            return str(row["tenant_name"])
        case "key":
            return row["key_name"] or "a key that is gone"
        case "model":
            return str(row["model"])
        case "class":
            return str(row["slo_class"])
        case "work":
            return str(Work(row["work"]).label)
        case "application" | "batch":
            return row[group] or f"no {group}"
        case "instance":
            return row["instance"] or "never placed"
    day: datetime = row["day"]
    return f"{day:%F}"


def key_of(row: dict[str, Any], group: str) -> Any:
    """What a line is known by: names of keys may be the same."""
    if group == "key":
        return row["key"]
    return (row["tenant_name"], row[group]) if group in ("application", "batch") else name_of(row, group)


def with_hours(row: dict[str, Any]) -> dict[str, Any]:
    sums = summed(row)
    return sums | {"gpu_hours": sums["gpu_s"] / 3600, "tokens": sums["prompt_tokens"] + sums["output_tokens"]}


def total(rows: Iterable[dict[str, Any]]) -> Line:
    """*rows* of `usage` in one, with the cost of what was idle in `idle_usd`."""
    whole = _line("All")
    for row in map(with_hours, rows):
        _add(whole, row)
        whole["idle_usd"] += row["cost_usd"] if row["idle"] else 0.0
    return whole


def _more(row: dict[str, Any], group: str) -> dict[str, Any]:
    if group == "key":
        revoked = ", revoked" if row["key_revoked_at"] else ""
        prefix = f"{row['key_prefix']}…{revoked}" if row["key_prefix"] else ""
        return {"detail": prefix, "tenant": row["tenant_name"]}
    if group in ("application", "batch"):
        return {"tenant": row["tenant_name"]}
    if group == "tenant":
        return {"detail": row["tenant_title"]}
    return {}


def _line(name: str, **more: Any) -> Line:
    return {"name": name, "detail": "", "idle_usd": 0.0, **dict.fromkeys((*SUMS, "gpu_hours", "tokens"), 0), **more}


def _add(line: Line, row: dict[str, Any]) -> None:
    for name in (*SUMS, "gpu_hours", "tokens"):
        line[name] += row[name]


def linked(shown: Sequence[Line], href: Callable[..., str], group: str, several_tenants: bool) -> list[Line]:
    """*shown*, each with the address that narrows the page to it and divides it further; *href* changes the query."""
    then = "tenant" if several_tenants else "model"
    narrowed: dict[str, Callable[[Line], dict[str, str]]] = {
        "tenant": lambda line: {"tenant": line["name"], "by": "key"},
        "key": lambda line: {"key": str(line["key"]), "by": "model"},
        "model": lambda line: {"model": line["name"], "by": then if several_tenants else "key"},
        "class": lambda line: {"class": line["name"], "by": then},
        "work": lambda line: {"by": "class"},
        "day": lambda line: {"period": "dates", "from": line["name"], "to": line["name"], "by": then},
    }
    if group not in narrowed:
        return list(shown)
    return [line | {"href": href(**narrowed[group](line))} if line.get("key") else line for line in shown]
