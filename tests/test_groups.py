"""The runner of the gate's groups: nothing stops it, and it says what failed."""

import os
import re
from pathlib import Path

import pytest

from tests import groups

MAKE = """#!/bin/sh
echo "made $*"
case $1 in
  bad) echo "RERUN tests/test_a.py::test_b"; exit 3;;
esac
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `make` whose target `bad` fails after it has tried a test again."""
    program = tmp_path / "make"
    program.write_text(MAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("stages", [groups.GATE, groups.NIGHTLY], ids=["gate", "nightly"])
def test_every_group_is_a_target(stages: tuple[tuple[groups.Lane, ...], ...]) -> None:
    targets = re.findall(r"^([a-z0-9-]+)(?=[^=\n]*:(?!=))", (groups.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for lanes in stages for lane in lanes for name in lane} <= set(targets)


def test_a_group_that_fails_stops_no_other_and_is_named(
    make: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(groups, "GATE", ((("bad", "after"), ("beside",)), (("last",),)))
    assert groups.main(["gate"]) == 1
    said = capsys.readouterr().out
    for name in ("after", "beside", "last"):
        assert re.search(rf"--- {name}: passed in \d+ s\nmade {name} GATE=1", said)
    assert "--- bad: FAILED in 0 s\nmade bad GATE=1" in said
    assert re.search(r"^bad +\d+ +\d+ +1  FAILED$", said, re.MULTILINE)
    assert "Failed: bad. Each alone: make NAME GATE=1" in said


def test_where_all_pass_the_night_succeeds(make: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "NIGHTLY", ((("good",),),))
    assert groups.main(["nightly"]) == 0
