"""Small fake children, written as one-line Python programs."""

import asyncio
import io
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from controlplane.supervisor import keeper as keeper_module
from controlplane.supervisor.keeper import Keeper
from controlplane.supervisor.screen import Screen

PATIENCE_S = 20.0  # of waits for what must happen; generous, for busy machines


def program(source: str, *arguments: str) -> list[str]:
    """Return the command line of a Python program."""
    return [sys.executable, "-I", "-c", textwrap.dedent(source), *arguments]


def alive(process_id: int) -> bool:
    """Whether the process exists and has not ended (an uncollected zombie has)."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds; fail if it does not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


@pytest.fixture
def screen() -> Screen:
    return Screen(io.StringIO())


@pytest.fixture
def said(screen: Screen) -> Callable[[], str]:
    """Return everything on the screen so far."""
    assert isinstance(screen.stream, io.StringIO)
    return screen.stream.getvalue


@pytest_asyncio.fixture
async def keeper(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(keeper_module, "FIRST_BACK_OFF_S", 0.05)
    keeper = Keeper(screen, os.environ, str(tmp_path))
    yield keeper
    keeper.kill()
    await keeper.stop([])
