"""The table of `docs/configuration.md`, made from `controlplane/env.py`.

`python -m tests.docs.configuration` writes it anew after a change there; a test compares the two.
"""

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MultipleOf
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from controlplane.env import Environment, Unit, is_secret, variable_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- table: python -m tests.docs.configuration -->\n", "<!-- end of table -->\n"


def kind_of(field: FieldInfo) -> str:
    if is_secret(field):
        return "secret" if field.annotation is SecretStr else "list of secrets"
    if get_origin(field.annotation) is Literal:
        return "choice"
    return {bool: "boolean", int: "integer", float: "number", str: "string", list[str]: "list"}[field.annotation]


def default_of(field: FieldInfo) -> str:
    match field.default:
        case "" | []:
            return ""
        case SecretStr():
            return ""
        case bool(value):
            return "`1`" if value else "`0`"
        case list(values):
            return f"`{','.join(values)}`"
        case value:
            return f"`{value}`"


def limits_of(field: FieldInfo) -> str:
    """What a value must be: one of some words, or within bounds."""
    limits = [f"`{word}`" for word in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    for limit in field.metadata:
        match limit:
            case Ge(ge=low):
                limits.append(f"at least {low}")
            case Gt(gt=low):
                limits.append(f"above {low}")
            case Le(le=high):
                limits.append(f"at most {high}")
            case MultipleOf(multiple_of=step):
                limits.append(f"a multiple of {step}")
    return ", ".join(limits)


def unit_of(field: FieldInfo) -> str:
    return next((unit.name for unit in field.metadata if isinstance(unit, Unit)), "")


def table() -> str:
    rows = ["| variable | type | unit | default | limits | |", "|---|---|---|---|---|---|"]
    for name, field in Environment.model_fields.items():
        purpose = " ".join((field.description or "").split())
        cells = f"`{variable_of(name)}`", kind_of(field), unit_of(field), default_of(field), limits_of(field), purpose
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
