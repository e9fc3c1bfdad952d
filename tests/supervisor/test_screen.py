"""Start-up lines line up; colours only on a terminal that wants them."""

import io

import pytest

from controlplane.supervisor.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_line_up() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.started("redis", "Redis 7.0", 0.12)
    screen.started("database", "SQLite, 14 migrations applied", 10.04)
    first, second = stream.getvalue().splitlines()
    assert first.index("Redis") == second.index("SQLite")
    assert (first[-5:], second[-6:]) == ("0.1 s", "10.0 s")
    assert len(first) == len(second)
    assert "\033" not in stream.getvalue()


def test_each_part_has_its_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    screen = Screen(stream)
    screen.line("web", "hello")
    screen.line("celery", "hello")
    screen.line("web", "again")
    first, second, third = stream.getvalue().splitlines()
    assert first.partition("web")[0] == third.partition("web")[0] != second.partition("celery")[0]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Screen(plain).trouble("taken")
    assert plain.getvalue() == "taken\n"


def test_a_reader_that_went_away_does_not_end_the_stack() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    screen = Screen(Broken())
    screen.note("first")
    screen.note("second")
    screen.stream.close()
