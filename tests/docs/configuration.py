"""The table of `docs/operate/configuration.md`, made from `controlplane/env.py`.

`python -m tests.docs.configuration` writes it again after a change there; a test compares the two.
"""

import sys
from pathlib import Path
from typing import Literal, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from controlplane.env import Environment, is_secret, variable_of
from controlplane.tunable import PER_MODEL, Tunable, limits_of, unit_of

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "configuration.md"
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


def tuned_of(name: str) -> str:
    """Where a row may go before the variable."""
    if name not in Tunable.model_fields:
        return ""
    return "for each model" if PER_MODEL in Tunable.model_fields[name].metadata else "yes"


def table() -> str:
    rows = ["| variable | type | unit | default | limits | while running | |", "|---|---|---|---|---|---|---|"]
    for name, field in Environment.model_fields.items():
        purpose = " ".join((field.description or "").split())
        cells = [f"`{variable_of(name)}`", kind_of(field), unit_of(field), default_of(field), limits_of(field)]
        cells += [tuned_of(name), purpose]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
