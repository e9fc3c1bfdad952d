"""The table of `docs/papers/experiments.md`, made from `controlplane/experiments/registry.py`.

`python -m tests.docs.experiments` writes it again after a change there; a test compares the two.
"""

import sys
from pathlib import Path

from controlplane.experiments.registry import EXPERIMENTS

PAGE = Path(__file__).parents[2] / "docs" / "papers" / "experiments.md"
BEGIN, END = "<!-- table: python -m tests.docs.experiments -->\n", "<!-- end of table -->\n"


def table() -> str:
    rows = ["| experiment | paper, section | measures | command | results |", "|---|---|---|---|---|"]
    for each in EXPERIMENTS.values():
        page, _, anchor = each.results.partition("#")
        heading = anchor.replace("-", " ")
        rows.append(
            f"| {each.name} | {each.paper}, {each.section} | {each.measures} | `manage.py reproduce {each.name}` |"
            f" [{page.removesuffix('.md')}: {heading}]({each.results}) |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
