"""Both launchers: real processes (a small server that stands in for vLLM) and emulated instances."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scheduling.fleet.profile import Profile
from tests.workers.conftest import FAST, Emulator, eventually
from workers.vllm import processes
from workers.vllm.client import VllmClient
from workers.vllm.launcher import EmulatedLauncher, LaunchError, LaunchSpec, ProcessLauncher
from workers.vllm.serve import arguments

# Answers /health, has a child in its process group as vLLM has its engine, and writes its command line to its log.
SERVER = """
import http.server, os, signal, subprocess, sys, threading
print("arguments", " ".join(sys.argv[1:]), flush=True)
print("dev mode", os.environ["VLLM_SERVER_DEV_MODE"], "extra", os.environ.get("EXTRA"), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *arguments): pass
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessLauncher]:
    monkeypatch.setattr(processes, "FOLLOW_S", 0.2)  # the child does not end with its server, as an engine would
    server = tmp_path / "server.py"
    server.write_text(textwrap.dedent(SERVER))
    python = tmp_path / "python"
    # Its parser takes every flag but --bad.
    python.write_text(f"""#!/bin/sh
case "$1" in *parse_arguments.py)
    case "$2" in *--bad*) echo '{{"error": "unrecognized arguments: --bad"}}';; *) echo '{{"error": ""}}';; esac; exit;;
esac
exec {sys.executable} {server} "$@"
""")
    python.chmod(0o755)
    launcher = ProcessLauncher(str(python), tmp_path / "run")
    yield launcher
    for name in ("a", "b"):
        await launcher.stop(name, grace_s=0)


def spec(name: str = "a", **changes: object) -> LaunchSpec:
    return LaunchSpec(name=name, model="m", source="/models/m", **changes)  # type: ignore[arg-type]


async def up(url: str) -> None:
    async with VllmClient(url) as client:
        await eventually(client.health, limit_s=20)


async def child_of(launcher: ProcessLauncher, name: str) -> int:
    lines: list[str] = []

    def logged() -> bool:
        lines[:] = [x for x in launcher.log_file(name).read_text().splitlines() if x.startswith("child ")]
        return bool(lines)

    await eventually(logged, limit_s=20)
    return int(lines[-1].split()[1])


def lives(process_id: int) -> bool:
    """A zombie is dead: in a container it may wait for a reaper for ever."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_start_serves_and_stop_ends_the_whole_group(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(spec())
    assert launched.process_id is not None
    await up(launched.url)
    child = await child_of(launcher, "a")
    assert await launcher.alive("a")
    assert os.getpgid(child) == launched.process_id
    await launcher.stop("a")
    assert not await launcher.alive("a")
    assert not lives(launched.process_id)
    await eventually(lambda: not lives(child))
    await launcher.stop("a")  # once more: nothing to do


async def test_starting_twice_starts_once(launcher: ProcessLauncher) -> None:
    first, second = await asyncio.gather(launcher.start(spec()), launcher.start(spec()))
    assert first == second
    again = ProcessLauncher(launcher._python, launcher._run_dir)
    assert await again.start(spec()) == first
    assert await again.alive("a")


async def test_each_name_has_its_own_process_and_port(launcher: ProcessLauncher) -> None:
    first, second = await launcher.start(spec("a")), await launcher.start(spec("b"))
    assert first.url != second.url
    await launcher.stop("a")
    assert await launcher.alive("b")


async def test_servers_that_share_gpus_have_the_same(
    launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, others in (("a", ("b",)), ("b", ("a", "c")), ("d", ())):
        await launcher.start(spec(name, gpus=4, tensor_parallel=2, shares_gpus_with=others))
    gpus = {}
    for name in "abd":
        record = launcher.record(name)
        assert record is not None
        gpus[name] = list(record.gpus)
        await launcher.stop(name, grace_s=0.5)
    assert gpus == {"a": ["0", "1"], "b": ["0", "1"], "d": ["2", "3"]}


def test_sleep_mode_is_asked_for_once() -> None:
    flag = "--enable-sleep-mode"
    assert flag not in arguments("python", spec(), 8000)
    assert arguments("python", spec(sleep_mode=True), 8000).count(flag) == 1
    assert arguments("python", spec(sleep_mode=True, extra_args=(flag,)), 8000).count(flag) == 1


async def test_a_stubborn_server_is_killed(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(spec(extra_args=("--stubborn",)))
    await up(launched.url)
    await launcher.stop("a", grace_s=0.1)
    assert launched.process_id is not None
    assert not lives(launched.process_id)


async def test_a_crash_is_seen_and_the_next_start_cleans_up(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(spec())
    assert launched.process_id is not None
    await up(launched.url)
    child = await child_of(launcher, "a")
    os.kill(launched.process_id, signal.SIGKILL)
    await eventually(lambda: not lives(launched.process_id or 0))
    assert not await launcher.alive("a")
    assert lives(child)
    second = await launcher.start(spec())
    assert second.process_id != launched.process_id
    await eventually(lambda: not lives(child))
    await up(second.url)


async def test_a_number_that_another_process_has_now_is_left_alone(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(spec())
    record = launcher._read("a")
    assert record is not None
    pid_file = launcher._run_dir / "a.json"
    other = replace(record, started_ticks=record.started_ticks - 1, mark="another's")
    pid_file.write_text(json.dumps(asdict(other)))
    assert not await launcher.alive("a")
    await launcher.stop("a")
    assert launched.process_id is not None
    assert lives(launched.process_id)
    os.killpg(launched.process_id, signal.SIGKILL)


async def test_command_line_environment_and_log(launcher: ProcessLauncher) -> None:
    launched = await launcher.start(spec(max_num_seqs=7, extra_args=("--enforce-eager",), environment={"EXTRA": "yes"}))
    await up(launched.url)
    log = launcher.log_file("a").read_text()
    assert "-m vllm.entrypoints.openai.api_server --model /models/m --served-model-name m" in log
    assert "--max-num-seqs 7" in log
    assert "--enforce-eager" in log
    assert "dev mode 1 extra yes" in log


def test_arguments() -> None:
    line = " ".join(arguments("python", spec(tensor_parallel=4, max_num_queued_reqs=9, scheduling_policy="fcfs"), 81))
    assert "--port 81" in line
    assert "--tensor-parallel-size 4" in line
    assert "--max-num-queued-reqs 9" in line
    assert "--scheduling-policy fcfs" in line
    assert "--tensor-parallel-size" not in " ".join(arguments("python", spec(), 81))


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "-a", "a" * 81])
async def test_names_that_are_no_file_names(launcher: ProcessLauncher, name: str) -> None:
    with pytest.raises(LaunchError, match="not an instance name"):
        await launcher.start(spec(name))
    with pytest.raises(LaunchError, match="not an instance name"):
        await launcher.stop(name)


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    launcher = ProcessLauncher(str(tmp_path / "none"), tmp_path / "run")
    with pytest.raises(LaunchError, match="VLLM_PYTHON"):
        await launcher.start(spec())
    with pytest.raises(LaunchError, match="no folder"):
        await launcher.start(LaunchSpec(name="a", model="m"))
    assert not await launcher.alive("a")
    await launcher.stop("a")


async def test_a_python_that_cannot_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF, but not really")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot be started"):
        await ProcessLauncher(str(python), tmp_path / "run").start(spec())


async def test_emulated(emulator: Emulator) -> None:
    launcher = EmulatedLauncher(emulator.url)
    wanted = LaunchSpec(name="e", model="m", profile=Profile(**FAST), max_num_seqs=3, kv_blocks=1000)
    assert not await launcher.alive("e")
    launched = await launcher.start(wanted)
    assert (launched.url, launched.process_id) == (f"{emulator.url}/e", None)
    assert await launcher.start(wanted) == launched
    await up(launched.url)
    async with VllmClient(launched.url) as client:
        assert (await client.metrics()).kv_cache_size_tokens == 16_000
    assert emulator.fleet.instances["e"].spec.max_num_seqs == 3
    await emulator.call("POST", "/emulator/instances/e/fault", {"kind": "crash"})
    assert not await launcher.alive("e")
    await launcher.start(wanted)
    assert await launcher.alive("e")
    await launcher.stop("e")
    await launcher.stop("e")
    assert not await launcher.alive("e")


async def test_emulated_refusals(emulator: Emulator, unused_tcp_port: int) -> None:
    launcher = EmulatedLauncher(emulator.url)
    with pytest.raises(LaunchError, match="needs a performance profile"):
        await launcher.start(LaunchSpec(name="e", model="m"))
    with pytest.raises(LaunchError, match="fewer than max_model_len"):
        await launcher.start(LaunchSpec(name="e", model="m", profile=Profile(**FAST), kv_blocks=1))
    await launcher.start(LaunchSpec(name="e", model="m", profile=Profile(**FAST)))
    with pytest.raises(LaunchError, match="another specification"):
        await launcher.start(LaunchSpec(name="e", model="other", profile=Profile(**FAST)))
    with pytest.raises(LaunchError, match="cannot be reached"):
        await EmulatedLauncher(f"http://127.0.0.1:{unused_tcp_port}").start(
            LaunchSpec(name="e", model="m", profile=Profile(**FAST))
        )
