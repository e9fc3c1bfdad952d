"""Output of the stack in the terminal: a line for each part that starts, and the children's output by name."""

import os
import sys
from typing import TextIO

NAME_WIDTH = 10
TEXT_WIDTH = 62
# Readable on dark and light backgrounds; red is kept for trouble.
COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94)
RED, BOLD, DIM = 31, 1, 2


class Screen:
    """Writes to *stream*; colours only on a terminal, and not when `NO_COLOR` is set (no-color.org)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.coloured = self.stream.isatty() and "NO_COLOR" not in os.environ
        self._colour_of: dict[str, int] = {}

    def title(self, text: str) -> None:
        self._write(self._paint(BOLD, text))

    def started(self, name: str, text: str, took_s: float) -> None:
        """One part is ready: name, what it is, how long it took; aligned with the others."""
        self._write(f"  {self._named(name)}  {text:<{TEXT_WIDTH}} {self._paint(DIM, f'{took_s:6.1f} s')}")

    def line(self, name: str, text: str) -> None:
        """One line of a child's own output."""
        self._write(f"{self._named(name)} | {text}")

    def note(self, text: str) -> None:
        self._write(text)

    def trouble(self, text: str) -> None:
        self._write(self._paint(RED, text))

    def _named(self, name: str) -> str:
        colour = self._colour_of.setdefault(name, COLOURS[len(self._colour_of) % len(COLOURS)])
        return self._paint(colour, f"{name:<{NAME_WIDTH}}")

    def _paint(self, colour: int, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.coloured else text

    def _write(self, text: str) -> None:
        try:
            print(text, file=self.stream, flush=True)
        except (BrokenPipeError, ValueError):  # the reader of our output went away: that is no reason to end the stack
            self.stream = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the screen)
            self.coloured = False
