"""The source of the product: modules, their trees, and what they import."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("controlplane", "workers", "scheduling", "forecasting")


class Module(NamedTuple):
    name: str
    source: str
    tree: ast.Module
    is_package: bool


class Import(NamedTuple):
    """`from a import b` is `a.b`, which stands for both: b may be a module or a thing in a."""

    target: str
    local: str
    line: int
    is_late: bool
    """Inside a function: the others run on import or are for type checking."""


@cache
def modules() -> dict[str, Module]:
    """Return every module of the product but migrations, by name."""
    made = {}
    for path in [
        ROOT / "manage.py",
        *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    ]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name, source = ".".join(parts[:-1] if is_package else parts), path.read_text(encoding="utf-8")
        if "migrations" not in parts:
            made[name] = Module(name, source, ast.parse(source), is_package)
    return made


@cache
def imports(name: str) -> tuple[Import, ...]:
    """Return what the module *name* imports, made absolute."""
    module = modules()[name]
    return tuple(_imports(module, module.tree, False))


def _imports(module: Module, node: ast.AST, is_late: bool) -> Iterator[Import]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import):
            for alias in each.names:
                yield Import(alias.name, alias.asname or alias.name, each.lineno, is_late)
        elif isinstance(each, ast.ImportFrom):
            parents = module.name.split(".")
            parents = parents[: len(parents) - each.level + module.is_package] if each.level else []
            base = ".".join([*parents, *filter(None, [each.module])])
            for alias in each.names:
                yield Import(f"{base}.{alias.name}", alias.asname or alias.name, each.lineno, is_late)
        elif isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _imports(module, each, is_late or isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
