"""Imports run only downward: libraries know nothing of Django, and a lower app nothing of a higher one.

The source is read, not run: every `import` in it counts, whether it would be reached or not.
"""

import ast
import graphlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("controlplane", "workers", "scheduling", "forecasting")

# Lowest first. Apps of one row do not import each other either.
APPS = (
    ("accounts",),
    ("events",),
    ("tuning",),
    ("jobs",),
    ("fleet",),
    ("lengths",),
    ("dispatch",),
    ("gateway",),
    ("batches", "applications"),
    ("usage",),
    ("simulation",),
    ("planning",),
    ("alerts",),
    ("simulation.whatif",),  # its own app: it forks what plans are made of, and its result becomes one
    ("experiments",),
    ("resources",),  # what lists of rows show, on pages and in REST
    ("api", "console"),
)
# Every write is an event, so the apps below `events` write events too.
OPEN_TO_ALL = {"controlplane.events.services.record", "controlplane.events.models.Severity"}

# Imports that run upward all the same, each inside a function: (module, what it imports) and why.
EXCEPTIONS = {
    (
        "controlplane.planning.execution.rows",
        "workers.tasks.fleet",
    ): "carries commands out itself while no worker does, by the very functions that a worker calls",
    (
        "controlplane.supervisor.prepare",
        "workers.tasks.fleet",
    ): "asks launchers, before there is a worker, which servers the last run left behind",
}

# Modules that know each other's types, and why that is left. Nothing joins them, and none is added.
CIRCLES = (
    # What begins and orders a simulation is given the simulation.
    {f"scheduling.simulation.{name}" for name in ("global_scheduling", "simulator")},
)

TOP = {f"controlplane.{app}" for app in APPS[-1]}

FRAMEWORKS = ("django", "channels", "celery", "ninja", "uvicorn")


@dataclass(frozen=True)
class Rule:
    """Modules under *importers* must not import anything under *forbidden*."""

    importers: tuple[str, ...]
    forbidden: tuple[str, ...]
    but: tuple[str, ...] = ()
    """Importers to which this does not apply."""


def app_rules() -> Iterator[Rule]:
    for height, row in enumerate(APPS):
        for app in row:
            name = f"controlplane.{app}"
            others = [f"controlplane.{other}" for higher in APPS[height:] for other in higher if other != app]
            within = tuple(f"controlplane.{each}" for row in APPS for each in row if each.startswith(f"{app}."))
            # Admin pages show what is around a row, as the console does, so they stand above all but the top row.
            yield Rule((name,), tuple(others), but=(f"{name}.admin", *within))
            yield Rule((f"{name}.admin",), tuple(TOP & set(others)))


RULES = [
    Rule(("scheduling",), (*FRAMEWORKS, "forecasting", "workers", "controlplane")),
    Rule(("forecasting",), (*FRAMEWORKS, "scheduling", "workers", "controlplane")),
    Rule(("workers.vllm", "workers.emulator"), (*FRAMEWORKS, "controlplane", "workers.tasks", "workers.celery")),
    Rule(("workers.vllm",), ("workers.emulator",)),
    # Tasks run services; what asks for a task names it.
    Rule(("controlplane",), ("workers.tasks", "workers.emulator")),
    # The HTTP side talks to the decision side by records; what composes and what shows the two see both.
    Rule(
        ("controlplane.gateway",),
        (
            *(f"controlplane.dispatch.{module}" for module in ("dispatcher", "placement", "waiting_queue", "waits")),
            *(
                f"controlplane.dispatch.{module}"
                for module in ("token_accounts", "suspects", "reordering", "observation")
            ),
            "controlplane.dispatch.live_fleet",
            "scheduling.fleet",
        ),
        but=("controlplane.gateway.process", "controlplane.gateway.monitoring.summary"),
    ),
    # What serves a request may be another process than what decides: it knows the port alone, nor what composes the two.
    Rule(
        tuple(
            f"controlplane.gateway.{package}" for package in ("serving", "upstream", "admission", "lengths", "ledger")
        ),
        ("controlplane.dispatch.lease", "controlplane.dispatch.wire", "controlplane.gateway.process"),
    ),
    *app_rules(),
]

# Alongside the rules by package: rows never know who shows them.
SHOWN_BY = ("views", "api", "consumers", "admin")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, tuple[str, bool]]:
    """(source, whether it is a package) by module name."""
    return {
        module_name(path): (path.read_text(encoding="utf-8"), path.name == "__init__.py")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements, and whether each is inside a function: the others run on import or are for type checking."""
    nodes: list[tuple[Any, bool]] = [(tree, False)]
    while nodes:
        node, is_late = nodes.pop()
        if isinstance(node, ast.stmt):
            yield node, is_late
        is_late |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # statements stand in nothing else
            if isinstance(inside := getattr(node, block, ()), list):
                nodes.extend((each, is_late) for each in inside)


def imported_from(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """The module that *node* imports from, made absolute; *name* is the module that it stands in."""
    base = node.module or ""
    if not node.level:
        return base
    parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
    return ".".join([*parents, base] if base else parents)


def imported(name: str, source: str, is_package: bool, everywhere: bool) -> list[tuple[str, int]]:
    """Dotted names that the module *name* imports, made absolute, and their lines."""
    return [(target, line) for target, line, is_late in _imports(name, source, is_package) if everywhere or not is_late]


@cache
def _imports(name: str, source: str, is_package: bool) -> list[tuple[str, int, bool]]:
    """Each import with its line, and whether it is inside a function.

    `from a import b` gives `a.b`, which stands for both: b may be a module or a thing in a.
    """
    targets: list[tuple[str, int, bool]] = []
    for node, is_late in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets += [(alias.name, node.lineno, is_late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = imported_from(node, name, is_package)
            targets += [(f"{base}.{alias.name}", node.lineno, is_late) for alias in node.names]
    return targets


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def is_under_any(name: str, prefixes: Iterable[str]) -> bool:
    return any(is_under(name, prefix) for prefix in prefixes)


def is_models(name: str) -> bool:
    """Whether *name* is an app's rows: `controlplane.fleet.models` and what is below, and no page of that name."""
    parts = name.split(".")
    return parts[0] == "controlplane" and parts[2:3] == ["models"]


def violations(modules: dict[str, tuple[str, bool]]) -> list[str]:
    """Every wrong import, as `module:line imports name`."""
    wrong = []
    for name, (source, is_package) in modules.items():
        for rule in RULES:
            if not is_under_any(name, rule.importers) or is_under_any(name, rule.but):
                continue
            wrong += [
                f"{name}:{line} imports {target}"
                for target, line in imported(name, source, is_package, everywhere=True)
                if is_under_any(target, rule.forbidden)
                and target not in OPEN_TO_ALL
                and not any(name == importer and is_under(target, allowed) for importer, allowed in EXCEPTIONS)
            ]
        if is_models(name):
            wrong += [
                f"{name}:{line} imports {target}"
                for target, line in imported(name, source, is_package, everywhere=True)
                if target.startswith("controlplane.") and any(part in SHOWN_BY for part in target.split(".")[2:])
            ]
    return wrong


def circles(modules: dict[str, tuple[str, bool]]) -> list[set[str]]:
    """Modules that import each other, directly or not, when they are imported or for type checking alone; largest sets."""
    graph = {name: _targets(modules, name) - {name} for name in modules}
    known: list[set[str]] = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            circle = set(error.args[1])
        else:
            return known
        together = circle.union(*(one for one in known if one & circle))
        known = [one for one in known if not one & circle] + [together]
        for name in together:  # as one module: what imports any of them, or they import
            graph[name] = set()
        first = min(together)
        for name, targets in graph.items():
            if name not in together and targets & together:
                graph[name] = (targets - together) | {first}
        graph[first] = {target for name in together for target in _targets(modules, name)} - together


def _targets(modules: dict[str, tuple[str, bool]], name: str) -> set[str]:
    targets = {target for target, _ in imported(name, *modules[name], everywhere=False)}
    return {target if target in modules else target.rpartition(".")[0] for target in targets} & set(modules)


def test_imports_run_only_downward():
    assert violations(sources()) == []


def test_every_exception_is_needed_and_inside_a_function():
    modules = sources()
    for importer, allowed in EXCEPTIONS:
        source, is_package = modules[importer]
        late = [target for target, _ in imported(importer, source, is_package, everywhere=True)]
        assert any(is_under(target, allowed) for target in late)
        at_once = [target for target, _ in imported(importer, source, is_package, everywhere=False)]
        assert not any(is_under(target, allowed) for target in at_once)


def test_no_modules_import_each_other_in_a_circle():
    assert sorted(map(sorted, circles(sources()))) == sorted(map(sorted, CIRCLES))


def test_every_package_and_app_is_walked():
    names = set(sources())
    assert set(PACKAGES) <= names
    assert {f"controlplane.{app}.models" for app in ("accounts", "events", "fleet", "gateway")} <= names
    apps = {path.parent.name for path in (ROOT / "controlplane").glob("*/apps.py")}
    assert apps <= {app for row in APPS for app in row}, "give the new app its place in APPS"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("scheduling.routing.routers", "import django"),
        ("scheduling.routing.routers", "from django.db import models"),
        ("scheduling.simulation.engine.reference", "def late():\n    import forecasting.prior"),
        ("scheduling.routing.routers", "from workers.vllm import client"),
        ("forecasting.prior", "from scheduling import fleet"),
        ("forecasting.prior", "if TYPE_CHECKING:\n    from controlplane.fleet.models import Model"),
        ("workers.vllm.client", "from controlplane.fleet.models import Instance"),
        ("workers.emulator.server", "try:\n    import celery\nexcept ImportError:\n    pass"),
        ("workers.vllm.client", "from ..tasks import fleet"),
        ("workers.vllm.client", "from workers import emulator"),
        ("controlplane.fleet.services", "from workers.tasks.fleet import run_command"),
        ("controlplane.accounts.services", "from controlplane.events.selectors import events_of"),
        ("controlplane.accounts.services", "from controlplane.events import services"),
        ("controlplane.accounts.services", "def late():\n    from controlplane.fleet.services import notify"),
        ("controlplane.accounts.services", "if TYPE_CHECKING:\n    from controlplane.fleet.models import Model"),
        ("controlplane.dispatch.observation", "def late():\n    from controlplane.planning.execution import rows"),
        ("controlplane.dispatch.dispatcher", "from controlplane.gateway.errors import ApiError"),
        (
            "controlplane.gateway.upstream.client",
            "if TYPE_CHECKING:\n    from controlplane.dispatch.live_fleet.topology import Replica",
        ),
        ("controlplane.gateway.serving.completions", "if TYPE_CHECKING:\n    from controlplane.gateway import process"),
        ("controlplane.gateway.ledger.accounting", "from controlplane.dispatch.wire import SUMMARY_KEY"),
        ("controlplane.fleet.services", "def late():\n    from workers.tasks.fleet import run_command"),
        ("controlplane.fleet.admin", "from controlplane.console import formats"),
        ("controlplane.fleet.models.instances", "import controlplane.gateway.models"),
        ("controlplane.fleet.services", "from ..console import hub"),
        ("controlplane.gateway.process", "from controlplane import api"),
        ("controlplane.api.urls", "class Inner:\n    from controlplane.console import hub"),
        ("controlplane.console.live.feed", "from controlplane.api.urls import api"),
        ("controlplane.fleet.models", "def late():\n    from controlplane.fleet.views import page"),
        ("controlplane.gateway.models", "from controlplane.gateway import consumers"),
        ("controlplane.accounts.models", "from .api import router"),
    ],
)
def test_a_wrong_import_is_caught(module, line):
    assert len(violations({module: (f"'''A module.'''\n{line}\n", False)})) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("scheduling.routing.routers", "import numpy as np\nfrom scheduling.fleet.arrays import FleetArrays"),
        ("scheduling.routing.routers", "import django_like_name"),
        ("workers.emulator.instance", "from scheduling.simulation.engine.reference import ReferenceEngine"),
        ("workers.tasks.fleet", "from controlplane.fleet import services"),
        (
            "controlplane.gateway.process",
            "from controlplane.fleet.models import Instance\nimport scheduling.routing.routers",
        ),
        ("controlplane.console.live.feed", "from controlplane.gateway.monitoring import summary"),
        ("controlplane.accounts.services", "from controlplane.events.services import record"),
        ("controlplane.gateway.upstream.client", "from controlplane.dispatch.port import Placed"),
        ("controlplane.planning.execution.rows", "def late():\n    from workers.tasks.fleet import run_command"),
        ("controlplane.accounts.admin", "from controlplane.fleet.services import notify"),
        ("controlplane.fleet.admin", "from controlplane.fleet import views"),
    ],
)
def test_a_right_import_is_left_alone(module, line):
    assert violations({module: (f"{line}\n", False)}) == []


def test_a_circle_is_found():
    modules = {
        "one": ("from two import thing", False),
        "two": ("import three.four", True),
        "three.four": ("from one import other", False),
        "five": ("import one", False),
    }
    assert circles(modules) == [{"one", "two", "three.four"}]
    modules["six"] = ("if TYPE_CHECKING:\n    from one import thing", False)
    assert circles(modules) == [{"one", "two", "three.four"}]
    modules["two"] = ("import three.four, six", True)
    assert circles(modules) == [{"one", "two", "three.four", "six"}]
    modules["three.four"] = ("def late():\n    from one import other", False)
    assert circles(modules) == [{"one", "two", "six"}]
    modules["six"] = ("", False)
    assert circles(modules) == []


def test_relative_imports_are_made_absolute():
    source = "from . import a\nfrom .b import c\nfrom ..d import e\n"
    absolute = [name for name, _ in imported("one.two.three", source, False, True)]
    assert sorted(absolute) == ["one.d.e", "one.two.a", "one.two.b.c"]
    absolute = [name for name, _ in imported("one.two", source, True, True)]
    assert sorted(absolute) == ["one.d.e", "one.two.a", "one.two.b.c"]
