"""The table of `docs/configuration.md`, made from `controlplane/env.py`.

`python -m tests.docs.configuration` writes it anew after a change there; a test compares the two.
"""

import sys
from pathlib import Path

from controlplane.env import ENV, Variable

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- table: python -m tests.docs.configuration -->\n", "<!-- end of table -->\n"


def default_of(variable: Variable) -> str:
    match variable.default:
        case "" | []:
            return ""
        case bool(value):
            return "`1`" if value else "`0`"
        case list(values):
            return f"`{','.join(values)}`"
        case value:
            return f"`{value}`"


def table() -> str:
    rows = ["| variable | kind | default | |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {v.kind} | {default_of(v)} | {v.help} |" for name, v in ENV.items()]
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
