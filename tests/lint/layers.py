"""Imports run only downward: libraries know nothing of Django, a lower app nothing of a higher one, and none in a circle."""

import graphlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.lint.source import imports, modules

# Lowest first. Apps of one row do not import each other either.
APPS = (
    *(("accounts",), ("events",), ("tuning",), ("jobs",), ("fleet",), ("lengths",), ("dispatch",), ("gateway",)),
    *(("batches", "applications"), ("usage",), ("simulation",), ("planning",), ("alerts",)),
    ("simulation.whatif",),  # its own app: it forks what plans are made of, and its result becomes one
    ("planning.sizing",),  # it simulates what it plans, from the requests of a what-if's fork
    *(("experiments",), ("resources",), ("api", "console")),
)
# Every write is an event, so the apps below `events` write events too.
OPEN_TO_ALL = {"controlplane.events.services.record", "controlplane.events.models.Severity"}
# Upward, inside a function: `rows` carries commands out while no worker does, `prepare` asks what the last run left.
EXCEPTIONS = {
    ("controlplane.planning.execution.rows", "workers.tasks.fleet"),
    ("controlplane.supervisor.prepare", "workers.tasks.fleet"),
}
FRAMEWORKS = ("django", "channels", "celery", "ninja", "uvicorn")
SHOWN_BY = ("views", "api", "consumers", "admin")
"""Rows never know who shows them."""


class Rule(NamedTuple):
    """Modules under *importers*, but not those under *but*, import nothing under *forbidden*."""

    importers: tuple[str, ...]
    forbidden: tuple[str, ...]
    but: tuple[str, ...] = ()


def under(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


def of_apps() -> Iterator[Rule]:
    every = [app for row in APPS for app in row]
    for height, row in enumerate(APPS):
        for app in row:
            others = under("controlplane", *(other for higher in APPS[height:] for other in higher if other != app))
            within = under("controlplane", *(each for each in every if each.startswith(f"{app}.")))
            # Admin pages show what is around a row, as the console does, so they stand above all but the top row.
            yield Rule((f"controlplane.{app}",), others, but=(f"controlplane.{app}.admin", *within))
            yield Rule((f"controlplane.{app}.admin",), under("controlplane", *(set(APPS[-1]) - {app})))


RULES = [
    Rule(("scheduling",), (*FRAMEWORKS, "forecasting", "workers", "controlplane")),
    Rule(
        under("scheduling", "fleet", "routing", "queueing", "lookahead", "applications", "scaling"),
        under("scheduling", "control", "simulation"),
    ),
    Rule(("scheduling.control",), ("scheduling.simulation",)),
    Rule(("forecasting",), (*FRAMEWORKS, "scheduling", "workers", "controlplane")),
    Rule(under("workers", "vllm", "emulator", "ray"), (*FRAMEWORKS, "controlplane", "workers.tasks", "workers.celery")),
    Rule(("workers.vllm",), ("workers.emulator", "workers.ray")),
    Rule(("controlplane",), ("workers.tasks", "workers.emulator")),  # tasks run services; who asks for one names it
    # The HTTP side talks to the decision side by records; what composes and what shows the two see both.
    Rule(
        ("controlplane.gateway",),
        (
            *under("controlplane.dispatch", "dispatcher", "placement", "waiting_queue", "waits", "token_accounts"),
            *under("controlplane.dispatch", "suspects", "reordering", "observation", "live_fleet"),
            "scheduling.fleet",
        ),
        but=("controlplane.gateway.process",),
    ),
    # What serves a request may be another process than what decides: it knows the port alone, nor what composes the two.
    Rule(
        under("controlplane.gateway", "serving", "upstream", "admission", "lengths", "ledger"),
        ("controlplane.dispatch.lease", "controlplane.dispatch.wire", "controlplane.gateway.process"),
    ),
    *of_apps(),
]


def is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def faults() -> Iterator[str]:
    missing = {name.split(".")[1] for name in modules() if name.endswith(".apps")} - {
        app for row in APPS for app in row
    }
    yield from (f"{app} has no place in APPS" for app in sorted(missing))
    for name in modules():
        parts = name.split(".")
        shown = parts[0] == "controlplane" and parts[2:3] == ["models"]
        rules = [rule for rule in RULES if is_under(name, rule.importers) and not is_under(name, rule.but)]
        for each in imports(name):
            wrong = any(is_under(each.target, rule.forbidden) for rule in rules) and each.target not in OPEN_TO_ALL
            excepted = each.is_late and any(name == one and is_under(each.target, [it]) for one, it in EXCEPTIONS)
            target = each.target.split(".")
            if (wrong and not excepted) or (shown and target[0] == "controlplane" and {*SHOWN_BY} & {*target[2:]}):
                yield f"{name}:{each.line} imports {each.target}"
    yield from (f"in a circle: {', '.join(circle)}" for circle in circles())


def circles() -> list[list[str]]:
    """Return the largest sets of modules that import each other outside functions, directly or not."""
    known = modules()
    graph = {
        name: {
            target
            for each in imports(name)
            if not each.is_late
            for target in [each.target if each.target in known else each.target.rpartition(".")[0]]
            if target in known and target != name
        }
        for name in known
    }
    found: dict[str, set[str]] = {}  # by the first of its names, which stands for all in the graph
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            circle = set(error.args[1])
        else:
            return sorted(sorted(one) for one in found.values())
        first = min(circle)
        found[first] = set().union(*(found.pop(name, {name}) for name in circle))
        graph[first] = set().union(*(graph.pop(name) for name in circle))
        for name, targets in graph.items():
            graph[name] = {first if target in circle else target for target in targets} - {name}
