"""Each fault that was seen in the field (Cnn) has a test whose docstring or comment names it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent
NAMED = re.compile(r"\bC(\d\d)\b")
OF_THE_GATEWAY = {
    1, 3, 4, 6, 7, 8, 10, 11, 12, 13, 16, 17, 18, 20, 22, 23, 27, 29, 30, 44, 46, 47, 49, 50, 51, 52, 54, 55, 56, 58, 59, 60,
    61, 63, 64, 65, 66, 67, 68, 69, 72, 73, 74, 78,
}  # fmt: skip
OTHERS = {14, 25, 26, 28, 31, 33, 34, 35, 37, 39, 40, 41, 42, 43, 53, 75, 76, 77, 79, 80}
PENDING: set[int] = set()
"""Without a test yet: take out what gets one."""
FOUND_BESIDES = {1, 2, 3, 4, 5, 6}
"""Faults found when the cases were tried (En)."""


def named(form: re.Pattern[str] = NAMED) -> set[int]:
    paths = (path for path in ROOT.rglob("*.py") if path.name != Path(__file__).name)
    return {int(number) for path in paths for number in form.findall(path.read_text())}


def test_every_case_has_a_test_that_names_it() -> None:
    assert sorted((OF_THE_GATEWAY | OTHERS) - named() - PENDING) == []
    assert sorted(FOUND_BESIDES - named(re.compile(r"\bE(\d)\b"))) == []
