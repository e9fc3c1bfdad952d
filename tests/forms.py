"""Count the forms that concepts have: `python -m tests.forms [--root CHECKOUT] [--pairs]`.

A record type is a dataclass, NamedTuple, TypedDict, msgspec Struct, pydantic or ninja model, or a Django model. Two of them
mirror each other where they share `SHARED` field names or more, and at least half of those of the smaller.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("controlplane", "scheduling", "forecasting", "workers")
BASES = {"NamedTuple", "TypedDict", "Struct", "BaseModel", "Schema", "ModelSchema", "FilterSchema", "Model"}
SHARED = 6


class RecordType(NamedTuple):
    """One class whose instances are records."""

    module: str
    name: str
    fields: frozenset[str]


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Module name and syntax tree of each shipped file."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "migrations" not in path.parts:
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def last_name(node: ast.expr) -> str:
    """`Model` for `models.Model`, `dataclass` for `dataclass(frozen=True)`."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def fields(one: ast.ClassDef) -> frozenset[str]:
    """Names that the class body annotates, or sets to a field of Django."""
    names = set()
    for node in one.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_") and last_name(node.annotation) != "ClassVar":
                names.add(node.target.id)
        elif isinstance(node, ast.Assign) and last_name(node.value).endswith(("Field", "ForeignKey")):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def record_types(root: Path) -> list[RecordType]:
    """All record types of the product; a class of records is one by its base as well."""
    classes = [
        (module, node) for module, tree in trees(root) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    known = set(BASES)
    while True:
        more = {node.name for _, node in classes if known & {last_name(base) for base in node.bases}} - known
        if not more:
            break
        known |= more
    return [
        RecordType(module, node.name, fields(node))
        for module, node in classes
        if known & {last_name(base) for base in node.bases}
        or "dataclass" in {last_name(each) for each in node.decorator_list}
    ]


def mirrored(records: list[RecordType]) -> list[tuple[RecordType, RecordType, int]]:
    """Pairs that mirror each other and how many fields they share, most first."""
    pairs = []
    for one, other in combinations(records, 2):
        shared = len(one.fields & other.fields)
        if shared >= SHARED and 2 * shared >= min(len(one.fields), len(other.fields)):
            pairs.append((one, other, shared))
    return sorted(pairs, key=lambda pair: -pair[2])


def loose_mappings(root: Path) -> int:
    """Annotations `Mapping[str, Any]` and `dict[str, Any]` in the product."""
    wanted = {"Mapping[str, Any]", "dict[str, Any]"}
    return sum(
        1
        for _, tree in trees(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node) in wanted
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--pairs", action="store_true", help="list the pairs that mirror each other")
    arguments = parser.parse_args()
    records = record_types(arguments.root)
    pairs = mirrored(records)
    names = Counter(record.name for record in records)
    print(f"record types            {len(records):5}")
    print(f"  with five fields up   {sum(len(record.fields) >= 5 for record in records):5}")
    print(f"mirrored pairs          {len(pairs):5}")
    print(f"types in such a pair    {len({record for pair in pairs for record in pair[:2]}):5}")
    print(f"names used twice or up  {sum(count > 1 for count in names.values()):5}")
    print(f"loose mappings          {loose_mappings(arguments.root):5}")
    if arguments.pairs:
        for one, other, shared in pairs:
            print(f"{shared:4}  {one.module}.{one.name}  {other.module}.{other.name}")


if __name__ == "__main__":
    main()
