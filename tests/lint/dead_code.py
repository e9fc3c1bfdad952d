"""No dead code: every name that a shipped module defines is used by a shipped module.

What only tests use belongs into `tests`, the slow twins of kernels into `tests/oracles`. This looks at functions, classes
and constants of modules, and at methods of classes without bases. A name is used where its own module reads it outside its
own definition, where another module imports it or reads it from the module, or where a string names it
(`workers.beat:Scheduler`); a method, where any attribute, string or template has its name. A framework uses what a decorator
registers with it, and the names in `BY_FRAMEWORK`.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from tests.lint.source import ROOT, imports, modules

SCRIPTS = ("Makefile", "pyproject.toml", "templates/**/*.html")
LONGEST_ANNOTATION = 100  # characters of a string that may be an annotation in quotes

BY_FRAMEWORK = {
    r"controlplane\.settings": r"[A-Z0-9_]+",
    r"controlplane(\.\w+)*\.apps": r"\w+Config",
    r"controlplane(\.\w+)*\.urls": r"urlpatterns|app_name|handler\d+",
    r"controlplane(\.\w+)*\.management\.commands\.\w+": "Command",
    r"controlplane\.formats\.en\.formats": r"[A-Z_]+",
    r"scheduling\.compiled": r"Locator\.\w+",
    r"scheduling\.linking": r"_NoEngine\.\w+",
    r"scheduling\.queueing\.reordering\.scheduler": "judged",  # to go with the next change of that module
}
"""Names (regular expressions) that Django, Celery and Numba look up, by module."""

REGISTER_NOTHING = {"cache", "compiled", "compiled_inline", "compiled_internal", "compiled_without_gil", "contextmanager",
                    "asynccontextmanager", "dataclass", "lru_cache", "overload", "runtime_checkable",
                    "total_ordering", "cached_property", "classmethod", "property", "staticmethod"}  # fmt: skip
"""Decorators that leave it to others to use what they decorate; every other one registers it."""


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Names that are to be used by something, and the statements that define them."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if all(is_inert(decorator) for decorator in statement.decorator_list):
                yield statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith("__"):
                    yield node.id, statement


def methods(tree: ast.Module) -> Iterator[str]:
    """`Class.method` of the classes in *tree* that have no base, whose methods no framework calls."""
    for one in ast.walk(tree):
        for each in one.body if isinstance(one, ast.ClassDef) and not one.bases else ():
            is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("__")
            if is_function and all(is_inert(decorator) for decorator in each.decorator_list):
                yield f"{one.name}.{each.name}"


def is_inert(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)) in REGISTER_NOTHING


def read_inside(name: str, tree: ast.Module) -> Iterator[str]:
    """Dotted its own names that the module *name* reads, each outside its own definition."""
    definitions: dict[ast.stmt, set[str]] = {}
    for defined_name, statement in defined(tree):
        definitions.setdefault(statement, set()).add(defined_name)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            continue
        own = definitions.get(statement, set())
        for node in ast.walk(statement):
            words: list[str] = []
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                words = [node.id]
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < LONGEST_ANNOTATION
            ):
                words = re.findall(r"\w+", node.value)
            yield from (f"{name}.{word}" for word in words if word not in own)


def read_outside(nodes: Sequence[ast.AST], imports: dict[str, str]) -> Iterator[str]:
    """Dotted names of other modules that a module reads by attribute or names in a string; *imports* by local name."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and (path := attribute_path(node)):
            first, *rest = path
            yield ".".join([imports.get(first, first), *rest])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from dotted(node.value)


def attribute_path(node: ast.expr) -> list[str]:
    """`a.b.c` as a list of names; empty for an attribute of anything but a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def dotted(text: str) -> list[str]:
    return [word.replace(":", ".") for word in re.findall(r"\w+(?:[.:]\w+)+", text)]


def faults() -> Iterator[str]:
    """Return the names that nothing uses, and those that a package hands on to nobody."""
    known = dict(modules())
    scripts = "\n".join(path.read_text(encoding="utf-8") for name in SCRIPTS for path in sorted(ROOT.glob(name)))
    names, in_classes, reexports = list[str](), list[str](), dict[str, str]()
    uses, words = set[str](), set(re.findall(r"\w+", scripts))
    for name, module in known.items():
        nodes = list(ast.walk(module.tree))
        local = {each.local: each.target for each in imports(name)}
        uses |= {*read_inside(name, module.tree), *read_outside(nodes, local)}
        names += [f"{name}.{each}" for each, _ in defined(module.tree) if not is_by_framework(name, each)]
        in_classes += [f"{name}.{each}" for each in methods(module.tree) if not is_by_framework(name, each)]
        words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        words |= {word for text in strings for word in re.findall(r"\w+", text)}
        if module.is_package:  # what it imports is used if another module imports it from there
            reexports |= {f"{name}.{each}": target for each, target in local.items() if target not in known}
        else:
            uses |= set(local.values())
    while more := {target for name, target in reexports.items() if name in uses} - uses:
        uses |= more
    unread = [name for name in in_classes if name.rpartition(".")[2] not in words]
    yield from (f"{name} is used by tests at most" for name in [*names, *reexports] if name not in uses)
    yield from (f"{name} is used by tests at most" for name in unread)


def is_by_framework(module: str, name: str) -> bool:
    return any(re.fullmatch(where, module) and re.fullmatch(what, name) for where, what in BY_FRAMEWORK.items())
