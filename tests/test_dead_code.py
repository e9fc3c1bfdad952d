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
from pathlib import Path

import pytest

from tests.test_layers import imported_from, sources

ROOT = Path(__file__).parent.parent
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
}
"""Names (regular expressions) that Django, Celery and Numba look up, by module."""

REGISTER_NOTHING = {"cache", "compiled", "compiled_inline", "compiled_internal", "compiled_without_gil", "contextmanager",
                    "asynccontextmanager", "dataclass", "lru_cache", "overload", "runtime_checkable",
                    "total_ordering", "cached_property", "classmethod", "property", "staticmethod"}  # fmt: skip
"""Decorators that leave it to others to use what they decorate; every other one registers it."""

Modules = dict[str, tuple[str, bool]]
"""(source, whether it is a package) by name."""


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


def imports_of(name: str, is_package: bool, nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What the module *name* imports, in dotted names, by local name."""
    imports = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = imported_from(node, name, is_package)
            imports |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: alias.name for alias in node.names}
    return imports


def dotted(text: str) -> list[str]:
    return [word.replace(":", ".") for word in re.findall(r"\w+(?:[.:]\w+)+", text)]


def unused(modules: Modules, scripts: str = "") -> list[str]:
    """Dotted names that *modules* define or packages re-export, and that no module uses, nor a string in *scripts*."""
    uses, names, reexports = set(dotted(scripts)), list[str](), dict[str, str]()
    in_classes, words = list[str](), set(re.findall(r"\w+", scripts))
    for name, (source, is_package) in modules.items():
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        imports = imports_of(name, is_package, nodes)
        uses |= {*read_inside(name, tree), *read_outside(nodes, imports)}
        names += [f"{name}.{each}" for each, _ in defined(tree) if not is_by_framework(name, each)]
        in_classes += [f"{name}.{each}" for each in methods(tree) if not is_by_framework(name, each)]
        words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        words |= {word for text in strings for word in re.findall(r"\w+", text)}
        if is_package:  # what it imports is used if another module imports it from there; modules are there to register
            handed_on = {local: target for local, target in imports.items() if target not in modules}
            reexports |= {f"{name}.{local}": target for local, target in handed_on.items()}
        else:
            uses |= set(imports.values())
    while more := {target for name, target in reexports.items() if name in uses} - uses:
        uses |= more
    unread = [name for name in in_classes if name.rpartition(".")[2] not in words]
    return [name for name in (*names, *reexports) if name not in uses] + unread


def is_by_framework(module: str, name: str) -> bool:
    return any(re.fullmatch(where, module) and re.fullmatch(what, name) for where, what in BY_FRAMEWORK.items())


def test_every_name_is_used_by_what_is_shipped():
    modules = sources() | {"manage": ((ROOT / "manage.py").read_text(encoding="utf-8"), False)}
    shipped = {name: module for name, module in modules.items() if ".migrations" not in name}
    scripts = "\n".join(path.read_text(encoding="utf-8") for name in SCRIPTS for path in sorted(ROOT.glob(name)))
    assert unused(shipped, scripts) == [], "used by tests at most: remove it, or move it into tests"


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        ("def f(): pass", "", ["one.f"]),
        ("def f(): f()", "", ["one.f"]),
        ("def f(): pass\nx = f()", "", ["one.x"]),
        ("A = B = 1\nclass C:\n    x = A", "", ["one.B", "one.C"]),
        ("@dataclass\nclass C: pass", "from three import C", ["one.C"]),
        ("@router.get('/')\ndef page(): pass", "", []),
        ("@compiled\ndef f(): pass", "from one import f as g", []),
        ("def f(): pass", "import one\none.f()", []),
        ("def f(): pass", "def late():\n    from one import f\nlate()", []),
        ("def f(): pass", "late('one:f')", []),
        ("class C: pass\ndef f(c: 'list[C]'): pass", "from one import f", []),
        ("class C:\n    def m(self): pass\n    def n(self): self.n\nC()", "", ["one.C.m"]),
        ("class C(Base):\n    def m(self): pass\nC()", "", []),
    ],
)
def test_what_counts_as_used(one, two, names):
    assert unused({"one": (one, False), "two": (two, False)}) == names


def test_a_package_hands_names_on():
    modules = {
        "package": ("from package.one import f, g\n__all__ = ['f', 'g']", True),
        "package.one": ("def f(): pass\ndef g(): pass", False),
        "two": ("from package import f", False),
    }
    assert unused(modules) == ["package.one.g", "package.g"]
