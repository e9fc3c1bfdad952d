"""The table of usage: lines by what they are grouped by, with what was idle, and its columns as a file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from controlplane.resources.filters import Order
from controlplane.resources.tables import Columns, sorted_by
from controlplane.usage.models import SUMS, Work
from controlplane.usage.selectors import UsageScope, summed, usage


@dataclass(frozen=True, slots=True)
class Group:
    """What a line may be of: in words, and the columns of `usage` that it is grouped by."""

    title: str
    of: tuple[str, ...]
    names: Columns
    """Of the file."""
    detail: str = ""
    """Heading of what stands next to the name of a line."""
    own_idle: bool = False
    """Whether lines have their own idle time; else it is a line."""


TENANT: Columns = {"Tenant": "tenant"}
GROUPS = {
    "tenant": Group("tenant", ("tenant",), {"Tenant": "name", "Title": "detail"}, "Title"),
    "key": Group("API key", ("tenant", "key"), {"API key": "name", "Key": "detail", **TENANT}, "Key"),
    "model": Group("model", ("model",), {"Model": "name"}, own_idle=True),
    "gpu_type": Group("GPU type", ("gpu_type",), {"GPU type": "name"}, own_idle=True),
    "class": Group("SLO class", ("slo_class",), {"SLO class": "name"}),
    "work": Group("kind of work", ("work",), {"Kind of work": "name"}),
    "application": Group("application", ("tenant", "application"), {"Application": "name", **TENANT}),
    "batch": Group("batch", ("tenant", "batch"), {"Batch": "name", **TENANT}),
    "instance": Group("instance", ("instance",), {"Instance": "name"}, own_idle=True),
    "day": Group("day", ("day",), {"Day": "name"}, own_idle=True),
}
"""By the name in addresses."""
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
Line = dict[str, Any]


def columns(group: str, sees_idle: bool, zone: ZoneInfo) -> Columns:
    """Of the file: those of *group*, its sums, and for groups with idle time what that cost."""
    names = {f"Day ({zone})": "name"} if group == "day" else GROUPS[group].names
    idle: Columns = {"Idle cost (USD)": _exact("idle_usd")} if sees_idle and GROUPS[group].own_idle else {}
    return {**names, **SUMMED, **idle}


def lines(asked: UsageScope, group: str, order: Order) -> list[Line]:
    """One line for each of *group*, sorted, then what was idle."""
    named: dict[Any, Line] = {}
    idle = _line(IDLE, idle=True)
    for row in map(with_hours, usage(asked, GROUPS[group].of)):
        if row["idle"] and not GROUPS[group].own_idle:
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
        case "gpu_type":
            return row["gpu_type"] or "never placed"
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
