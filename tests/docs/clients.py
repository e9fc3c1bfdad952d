"""The table of `docs/tenants/clients.md`, made from the list in `tests/clients/environments.py`.

`python -m tests.docs.clients` writes it again after a change there; a test compares the two.
"""

import sys
from pathlib import Path

from tests.clients.environments import CLIENTS

PAGE = Path(__file__).parents[2] / "docs" / "tenants" / "clients.md"
BEGIN, END = "<!-- table: python -m tests.docs.clients -->\n", "<!-- end of table -->\n"


def table() -> str:
    rows = [
        "| client | packages | pointed at the gateway by | tried with | emulated | real vLLM |",
        "|---|---|---|---|---|---|",
    ]
    for each in CLIENTS:
        packages = ", ".join(f"`{package}`" for package in each.packages)
        command = "make clients ALL=1" if each.nightly else "make clients"
        runs = f"`{command}` | `{command} VLLM=1`"
        rows.append(f"| {each.title} | {packages} | {each.pointed} | {each.tried} | {runs} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
