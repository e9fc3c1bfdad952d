"""`constraints.txt` pins everything that `pyproject.toml` asks for, to versions that it allows, and names nothing else."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line)


def test_every_line_is_a_name_and_a_version() -> None:
    pinned = re.compile(r"[a-z0-9][a-z0-9._-]*==([0-9]+!)?[0-9][0-9a-z.]*")
    wrong = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not pinned.fullmatch(line)]
    assert not wrong, f"versions only, no addresses or local builds: {wrong}"


def test_every_requirement_is_pinned_to_a_version_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = pins()
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["models"], *extras["dev"]]:
        wanted = Requirement(line)
        if wanted.name == project["name"]:
            continue  # one extra has another
        assert wanted.name in known, f"{wanted.name} has no pin: make pins"
        assert known[wanted.name] in wanted.specifier, f"{wanted.name}=={known[wanted.name]} is not {wanted.specifier}"
