"""Starting parts, waiting for them, starting them again, and stopping them in order with nothing left behind."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from controlplane.supervisor import keeper as keeper_module
from controlplane.supervisor.child import kill_marked
from controlplane.supervisor.keeper import Keeper, Part, PartError
from tests.supervisor.conftest import alive, program, until

SLEEP = "import time; time.sleep(600)"
# Writes its name to the file when asked to end, after a moment.
POLITE = """
    import pathlib, signal, sys, time
    name, path = sys.argv[1:]
    def end(*_):
        time.sleep(0.1)
        with open(path, "a") as file:
            file.write(name + " ")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path(path + "." + name).touch()
    time.sleep(600)
"""


def exists(path: Path) -> Callable[[], object]:
    async def probe() -> str | None:
        return "it is there" if os.path.exists(path) else None  # noqa: ASYNC240 (a moment)

    return probe


async def test_a_part_is_ready_when_its_probe_says_so(keeper: Keeper, said: Callable[[], str], tmp_path: Path) -> None:
    source = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    await keeper.start(Part("web", program(source, str(tmp_path / "up")), exists(tmp_path / "up")))
    assert said().startswith("  web         it is there")


@pytest.mark.parametrize(
    ("argv", "trouble"),
    [
        (
            program("raise SystemExit('port is taken')"),
            r"web ended before it was ready \(exit status 1; last line: port is taken\)",
        ),
        (program(SLEEP), r"web was not ready within 0\.2 s"),
        (["/nowhere/web"], "web cannot be started: /nowhere/web: No such file or directory"),
    ],
    ids=["ends", "is never ready", "is missing"],
)
async def test_a_part_that_does_not_start_is_named_with_the_reason(
    keeper: Keeper, tmp_path: Path, argv: list[str], trouble: str
) -> None:
    ready_within_s = 0.2 if "0" in trouble else 60.0
    with pytest.raises(PartError, match=f"^{trouble}$"):
        await keeper.start(Part("web", argv, exists(tmp_path / "never"), ready_within_s=ready_within_s))


async def test_a_step_that_fails(keeper: Keeper) -> None:
    lines: list[str] = []
    await keeper.run(Part("prepare", program("print('done')")), lines.append)
    assert lines == ["done"]
    with pytest.raises(PartError, match=r"^prepare failed \(exit status 1; last line: no such table\)$"):
        await keeper.run(Part("prepare", program("raise SystemExit('no such table')")))


async def test_output_carries_the_parts_name_unless_it_is_quiet(keeper: Keeper, said: Callable[[], str]) -> None:
    await keeper.run(Part("web", program("print('hello')")))
    await keeper.run(Part("redis", program("print('chatter')"), quiet=True))
    assert "web        | hello\n" in said()
    assert "chatter" not in said()


async def test_a_part_that_dies_is_started_again(keeper: Keeper, said: Callable[[], str], tmp_path: Path) -> None:
    """Its first two lives end at once, and what must follow a restart fails once."""
    hooks: list[int] = []

    async def on_restart() -> None:
        hooks.append(len(hooks))
        if len(hooks) == 1:
            raise PartError("prepare failed (exit status 1)")

    source = """
        import sys, time
        with open(sys.argv[1], "a") as file:
            file.write(".")
        if len(open(sys.argv[1]).read()) < 3:
            sys.exit("life is short")
        time.sleep(600)
    """
    lives = tmp_path / "lives"
    await keeper.start(Part("emulator", program(source, str(lives)), on_restart=on_restart))
    await until(lambda: "prepare failed (exit status 1); starting it again" in said())
    await until(
        lambda: len(lives.read_text()) == 3 and said().rstrip().rpartition("\n")[2].startswith("emulator is back")
    )
    assert "emulator ended (exit status 1; last line: life is short); starting it again in 0.05 s" in said()
    assert "starting it again in 0.1 s" in said()


async def test_a_probe_that_raises_says_not_ready_and_why(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path
) -> None:
    """Like the Celery probe while Redis is away."""
    broken = [True]

    async def probe() -> str | None:
        if broken[0]:
            raise OperationalError("Connection refused")
        return "it answers"

    with pytest.raises(PartError, match=r"^beat was not ready within 0\.2 s \(OperationalError: Connection refused\)$"):
        await keeper.start(Part("beat", program(SLEEP), probe, ready_within_s=0.2))
    broken[0] = False
    await keeper.start(Part("celery", program(SLEEP), probe, ready_within_s=0.2))
    broken[0] = True
    os.kill(keeper.process_id("celery"), signal.SIGKILL)
    await until(lambda: "was not ready within 0.2 s (OperationalError: Connection refused); starting it" in said())
    await until(lambda: "was not ready within 0.4 s" in said())  # a busy machine is given longer each time
    broken[0] = False
    await until(lambda: "celery is back" in said())


async def test_parts_killed_one_by_one_together_and_again_while_they_start(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path
) -> None:
    """Like kill -9 of Redis, then of Celery, whose probe needs Redis: nothing that can be restarted ends the stack."""
    names = ("redis", "celery", "web")
    published: list[dict[str, dict[str, object]]] = []
    keeper._publish = lambda parts: published.append({str(part["name"]): part for part in parts})

    async def needs_redis() -> str | None:
        if published[-1]["redis"]["state"] != "running":
            raise OperationalError("Connection refused")
        return "ready"

    for name in names:
        part = Part(name, program(SLEEP), needs_redis if name == "celery" else None, max_back_off_s=0.1)
        await keeper.start(part)

    def kill(name: str) -> None:
        os.kill(keeper.process_id(name), signal.SIGKILL)

    def running() -> bool:
        return all(
            published[-1][name]["state"] == "running"
            and published[-1][name]["process_id"] == keeper.process_id(name)
            and alive(keeper.process_id(name))
            for name in names
        )

    deaths = 0
    for victims in [*[(name,) for name in names], ("redis", "celery"), ("celery", "web", "redis"), *[("redis",)] * 5]:
        for name in victims:
            kill(name)
            deaths += 1
        await until(lambda count=deaths: sum(int(p["restarts"]) for p in published[-1].values()) >= count)  # type: ignore[misc]
        await until(running)
    for _ in range(2):  # the same one again during its start
        before = keeper.process_id("celery")
        kill("celery")
        await until(lambda pid=before: keeper.process_id("celery") != pid)  # type: ignore[misc]
        with contextlib.suppress(ProcessLookupError):
            kill("celery")
        await until(running)
    assert said().count("redis ended (SIGKILL); starting it again") == 8


async def test_stopping_goes_stage_by_stage(keeper: Keeper, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("redis", "web", "traffic", "unnamed"):
        ready = exists(tmp_path / f"log.{name}")
        await keeper.start(Part(name, program(POLITE, name, str(log)), ready, stop_within_s=10))
    assert await keeper.stop([["traffic"], ["web", "absent"], ["redis"]]) == []
    assert log.read_text() == "unnamed traffic web redis "


async def test_a_part_asked_early_ends_while_others_are_waited_for(keeper: Keeper, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("web", "celery"):
        ready = exists(tmp_path / f"log.{name}")
        part = Part(name, program(POLITE, name, str(log)), ready, stop_within_s=10, stop_early=name == "celery")
        await keeper.start(part)
    # Ends only when someone else has: the one asked early, since the other is not asked before this one is gone.
    patient = """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1] + ".traffic").touch()
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
    """
    ready = exists(tmp_path / "log.traffic")
    await keeper.start(Part("traffic", program(patient, str(log)), ready, stop_within_s=10))
    await keeper.stop([["traffic"], ["web"], ["celery"]])
    assert log.read_text() == "celery web "


async def test_those_that_do_not_obey_are_killed_and_named(keeper: Keeper, tmp_path: Path) -> None:
    source = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    """
    ready = exists(tmp_path / "up")
    await keeper.start(Part("web", program(source, str(tmp_path / "up")), ready, stop_within_s=0.1))
    assert await keeper.stop([["web"]]) == ["web"]


async def test_a_server_in_a_separate_session_does_not_stay_behind(keeper: Keeper, tmp_path: Path) -> None:
    """Like a vLLM server started by a Celery worker: neither our child nor in a group of ours."""
    source = f"""
        import subprocess, sys, pathlib, time
        child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
        pathlib.Path(sys.argv[1]).write_text(str(child.pid))
        time.sleep(600)
    """
    path = tmp_path / "pid"
    await keeper.start(Part("celery", program(source, str(path)), exists(path)))
    await until(path.read_text)
    assert alive(int(path.read_text()))
    await keeper.stop([["celery"]])
    await until(lambda: not alive(int(path.read_text())))


async def test_a_killed_supervisor_leaves_no_child_and_the_next_start_finds_the_rest(tmp_path: Path) -> None:
    """`kill -9`: the kernel ends the children; a server in its own session is found by the mark."""
    source = f"""
        import asyncio, os, sys
        from controlplane.supervisor.keeper import Keeper, Part
        from controlplane.supervisor.screen import Screen
        async def main():
            keeper = Keeper(Screen(), os.environ, sys.argv[1])
            own = "import os, subprocess, sys, time; " \\
                "p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); " \\
                "print('pids', os.getpid(), p.pid, flush=True); time.sleep(600)"
            await keeper.start(Part("web", [sys.executable, "-c", own]))
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable,
        *program(source, str(tmp_path))[2:],
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert supervisor.stdout is not None
    while b"pids" not in (line := await supervisor.stdout.readline()):
        assert line, "the supervisor ended"
    child, server = (int(word) for word in line.split()[-2:])
    assert alive(child)
    os.kill(supervisor.pid, signal.SIGKILL)
    await until(lambda: not alive(child))
    assert alive(server)
    kill_marked(str(tmp_path))
    await until(lambda: not alive(server))
    await supervisor.communicate()


# Writes each start, signal and end to the file; ends on SIGTERM when the file `release` is there, on SIGINT at once.
DRAINING = """
    import os, pathlib, signal, sys, time
    path = pathlib.Path(sys.argv[1])
    def log(what):
        with open(path / "log", "a") as file:
            file.write(f"{what} {os.getpid()}\\n")
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    signal.signal(signal.SIGINT, lambda *_: (log("stopped"), os._exit(0)))
    log("began")
    while not (asked and (path / "release").exists()):
        time.sleep(0.02)
    log("ended")
"""


def draining(path: Path, **options: object) -> Part:
    return Part("relay-1", program(DRAINING, str(path)), exists(path / "log"), stop_signal=signal.SIGINT, **options)  # type: ignore[arg-type]


def logged(path: Path) -> list[str]:
    return [line.split()[0] for line in (path / "log").read_text().splitlines()]


async def test_a_restart_begins_the_next_one_while_the_last_ends_what_it_has_begun(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LEAVES_S", 0.1)
    await keeper.start(draining(tmp_path, overlaps=True, drain_within_s=60.0))
    before = keeper.process_id("relay-1")
    await keeper.restart("relay-1")
    await until(lambda: logged(tmp_path) == ["began", "began"])
    assert keeper.process_id("relay-1") != before
    assert alive(before)
    (tmp_path / "release").touch()
    await keeper.drained()
    assert logged(tmp_path) == ["began", "began", "ended"]
    assert "starting it again" not in said()
    os.kill(keeper.process_id("relay-1"), signal.SIGKILL)
    await until(lambda: "relay-1 is back" in said())


async def test_a_part_that_does_not_overlap_ends_before_the_next_one_begins(keeper: Keeper, tmp_path: Path) -> None:
    await keeper.start(draining(tmp_path))
    await until(lambda: logged(tmp_path))
    (tmp_path / "release").touch()
    await keeper.restart("relay-1")
    await until(lambda: logged(tmp_path)[:3] == ["began", "ended", "began"])
    assert keeper._draining == []


async def test_one_that_does_not_drain_in_time_is_killed(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path
) -> None:
    await keeper.start(draining(tmp_path, drain_within_s=0.1))
    await until(lambda: logged(tmp_path))
    await keeper.restart("relay-1")
    assert "relay-1 did not end within 0.1 s and was killed\n" in said()


async def test_a_stop_ends_what_drains_too(keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "LEAVES_S", 0.1)
    await keeper.start(draining(tmp_path, overlaps=True, stop_within_s=10))
    await until(lambda: logged(tmp_path))
    await keeper.restart("relay-1")
    await until(lambda: len(logged(tmp_path)) == 2)
    assert await keeper.stop([["relay-1"]]) == []
    assert logged(tmp_path) == ["began", "began", "stopped", "stopped"]


async def test_a_part_that_is_ended_is_not_started_again(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path
) -> None:
    published: list[list[dict[str, object]]] = []
    keeper._publish = published.append
    await keeper.start(draining(tmp_path))
    await until(lambda: logged(tmp_path))
    (tmp_path / "release").touch()
    keeper.end("relay-1")
    await keeper.drained()
    await keeper.start(Part("beat", program(SLEEP)))
    assert [part["name"] for part in published[-1]] == ["beat"]
    assert "again" not in said()


async def test_ending_what_was_never_started_or_did_not_come_up(keeper: Keeper, tmp_path: Path) -> None:
    keeper.end("relay-3")
    with pytest.raises(PartError):
        await keeper.start(Part("relay-3", program(SLEEP), exists(tmp_path / "never"), ready_within_s=0.1))
    process = keeper.process_id("relay-3")
    keeper.end("relay-3")
    await keeper.drained()
    assert not alive(process)


async def test_a_part_that_does_not_come_back_is_tried_again(
    keeper: Keeper, said: Callable[[], str], tmp_path: Path
) -> None:
    """What is restarted after it is left as it is; once the cause is mended, it comes back."""
    source = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if pathlib.Path(sys.argv[1]).exists():
            sys.exit("no such table")
        pathlib.Path(sys.argv[1] + ".up").touch()
        time.sleep(600)
    """
    broken = tmp_path / "broken"
    await keeper.start(Part("web", program(source, str(broken)), exists(tmp_path / "broken.up")))
    broken.touch()
    (tmp_path / "broken.up").unlink()
    with pytest.raises(PartError, match=r"web ended before it was ready \(exit status 1; last line: no such table\)"):
        await keeper.restart("web")
    broken.unlink()
    await until(lambda: "web is back" in said())
