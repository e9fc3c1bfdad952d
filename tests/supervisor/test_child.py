"""One child: its output, its last words, its end and that of its children."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from controlplane.supervisor.child import LINE_CHARS, Child
from controlplane.supervisor.guard import Guard
from tests.supervisor.conftest import alive, program, until

DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
"""


@pytest_asyncio.fixture
async def guard() -> AsyncIterator[Guard]:
    guard = Guard("test")
    yield guard
    guard.release()


async def start(source: str, guard: Guard, lines: list[str], **options) -> Child:
    return await Child.start(program(source), environment=os.environ, guard=guard, on_line=lines.append, **options)


async def test_output_comes_line_by_line_with_errors_among_it(guard: Guard) -> None:
    lines: list[str] = []
    child = await start("import sys; print('one', flush=True); print('two\\n', file=sys.stderr)", guard, lines)
    assert await child.wait() == "exit status 0"
    assert lines == ["one", "two"]
    assert child.last_line == "two"
    assert not child.running


async def test_a_line_without_an_end_is_cut_and_kept(guard: Guard) -> None:
    lines: list[str] = []
    child = await start("print('x' * 300_000, end='')", guard, lines)
    await child.wait()
    assert lines
    assert all(len(line) <= LINE_CHARS for line in lines)


async def test_the_epitaph_says_how_it_ended_and_its_last_words(guard: Guard) -> None:
    child = await start("raise SystemExit('no such table')", guard, [])
    await child.wait()
    assert child.epitaph == "exit status 1; last line: no such table"
    child = await start("import os; os.kill(os.getpid(), 9)", guard, [])
    await child.wait()
    assert child.epitaph == "SIGKILL"


async def test_standard_input_is_given_and_closed(guard: Guard) -> None:
    lines: list[str] = []
    child = await start("import sys; print(sys.stdin.read())", guard, lines, standard_input=b"secret")
    await child.wait()
    assert lines == ["secret"]


async def test_asking_is_enough_for_one_that_listens(guard: Guard) -> None:
    lines: list[str] = []
    child = await start("import time; print('up', flush=True); time.sleep(600)", guard, lines)
    await until(lambda: lines)
    assert await child.stop(within_s=10)
    assert child.end == "SIGTERM"


async def test_a_deaf_one_is_killed(guard: Guard) -> None:
    lines: list[str] = []
    child = await start(DEAF, guard, lines)
    await until(lambda: lines)
    assert not await child.stop(within_s=0.1)
    assert child.end == "SIGKILL"


async def test_its_children_end_with_it(guard: Guard) -> None:
    lines: list[str] = []
    source = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
    """
    child = await start(source, guard, lines)
    await child.wait()
    await until(lambda: not alive(int(lines[0])))


async def test_a_program_that_is_not_there(guard: Guard) -> None:
    with pytest.raises(FileNotFoundError):
        await Child.start(["/nowhere/at-all"], environment={}, guard=guard, on_line=print)
