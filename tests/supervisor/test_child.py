"""One child: its output, its last line, its end and that of its children."""

import asyncio
import os
import signal
import socket

import pytest

from controlplane.supervisor.child import LINE_CHARS, Child
from tests.supervisor.conftest import alive, program, until

LISTENS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(600)
"""
PARENT = """
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
"""


async def start(source: str, lines: list[str], **options) -> Child:
    return await Child.start(program(source), environment=os.environ, on_line=lines.append, **options)


@pytest.mark.parametrize(
    ("source", "given", "lines", "epitaph"),
    [
        (
            "import sys; print('one', flush=True); print('two\\n', file=sys.stderr)",
            b"",
            ["one", "two"],
            "exit status 0; last line: two",
        ),
        ("raise SystemExit('no such table')", b"", ["no such table"], "exit status 1; last line: no such table"),
        ("import os; os.kill(os.getpid(), 9)", b"", [], "SIGKILL"),
        ("import sys; print(sys.stdin.read())", b"secret", ["secret"], "exit status 0; last line: secret"),
    ],
    ids=["output and errors", "its last line", "a signal", "standard input"],
)
async def test_output_and_end(source: str, given: bytes, lines: list[str], epitaph: str) -> None:
    shown: list[str] = []
    child = await start(source, shown, standard_input=given)
    await child.wait()
    assert (shown, child.epitaph, child.running) == (lines, epitaph, False)


async def test_a_line_without_an_end_is_cut_and_kept() -> None:
    lines: list[str] = []
    child = await start("print('x' * 300_000, end='')", lines)
    await child.wait()
    assert lines
    assert all(len(line) <= LINE_CHARS for line in lines)


@pytest.mark.parametrize(("source", "within_s", "end"), [(LISTENS, 10, "SIGTERM"), (DEAF, 0.1, "SIGKILL")])
async def test_it_is_asked_and_then_killed(source: str, within_s: float, end: str) -> None:
    lines: list[str] = []
    child = await start(source, lines)
    await until(lambda: lines)
    assert await child.stop(within_s) == (end == "SIGTERM")
    assert child.end == end


async def test_its_children_end_with_it() -> None:
    lines: list[str] = []
    child = await start(PARENT, lines)
    await child.wait()
    await until(lambda: not alive(int(lines[0])))


async def test_a_program_that_is_missing() -> None:
    with pytest.raises(FileNotFoundError):
        await Child.start(["/nowhere/at-all"], environment={}, on_line=print)


async def test_it_has_the_socket_and_hears_each_signal_once() -> None:
    source = """
        import signal, socket, time
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: print(signal.Signals(number).name, flush=True))
        socket.socket(fileno=NUMBER).accept()[0].sendall(b"served")
        time.sleep(600)
    """
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        number, address = server.fileno(), server.getsockname()
        options = {"stop_signal": signal.SIGINT, "sockets": [number]}
        child = await start(source.replace("NUMBER", str(number)), lines, **options)
    with socket.create_connection(address) as client:  # ours is closed
        assert await asyncio.to_thread(client.recv, 100) == b"served"
    for asked in (signal.SIGTERM, signal.SIGTERM, None, None):
        child.ask(asked)
        await until(lambda: lines)
        await asyncio.sleep(0.05)
    await until(lambda: len(lines) == 2)
    assert lines == ["SIGTERM", "SIGINT"]
    child.kill()
    await child.wait()
