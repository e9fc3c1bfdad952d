"""Both launchers: processes (a shell script stands in for vLLM) and emulated instances."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scheduling.fleet.profile import Profile
from tests.workers.conftest import FAST, Emulator, eventually, lives
from workers.vllm import launcher as module
from workers.vllm import processes
from workers.vllm.client import VllmClient
from workers.vllm.launcher import VISIBLE_GPUS, EmulatedLauncher, LaunchError, ProcessLauncher
from workers.vllm.spec import LaunchSpec

# Never answers, has a child in its process group as vLLM has its engine, and logs its command line and environment.
# Its parser takes every flag but --bad.
SERVER = f"""#!/bin/sh
case "$1" in *parse_arguments.py)
    case "$2" in *--bad*) echo '{{"error": "unrecognized arguments: --bad"}}';; *) echo '{{"error": ""}}';; esac; exit;;
esac
case "$*" in *--stubborn*) trap '' TERM;; esac
echo "arguments $*"
echo "dev mode $VLLM_SERVER_DEV_MODE extra $EXTRA"
echo "sees ${{{VISIBLE_GPUS}-all}}"
sleep 600 &
echo "child $!"
wait
"""


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessLauncher]:
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    monkeypatch.setattr(processes, "FOLLOW_S", 0.2)  # the child does not end with its server, as an engine would
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    launcher = ProcessLauncher(str(python), tmp_path / "run")
    yield launcher
    for name in "abc":
        await launcher.stop(name, grace_s=0)


def spec(name: str = "a", **changes: object) -> LaunchSpec:
    return LaunchSpec(name=name, model="m", source="/models/m", **changes)  # type: ignore[arg-type]


async def logged(launcher: ProcessLauncher, wanted: LaunchSpec) -> dict[str, str]:
    """The log of *wanted* once it has started: by the first word of each line, the rest."""
    await launcher.start(wanted)
    lines: dict[str, str] = {}

    def complete() -> bool:
        text = launcher.log_file(wanted.name).read_text().rpartition("\n")[0]
        lines.update(line.partition(" ")[::2] for line in text.splitlines())
        return "child" in lines

    await eventually(complete)
    return lines


def leader(launcher: ProcessLauncher, name: str = "a") -> int:
    record = launcher.record(name)
    assert record is not None
    return record.process_id


@pytest.mark.parametrize(("flags", "grace_s"), [((), 10.0), (("--stubborn",), 0.1)])
async def test_stop_ends_the_whole_group(launcher: ProcessLauncher, flags: tuple[str, ...], grace_s: float) -> None:
    child = int((await logged(launcher, spec(extra_args=flags)))["child"])
    server = leader(launcher)
    assert await launcher.alive("a")
    assert os.getpgid(child) == server
    await launcher.stop("a", grace_s=grace_s)
    assert not await launcher.alive("a")
    assert not lives(server)
    await eventually(lambda: not lives(child))
    await launcher.stop("a")  # once more: nothing to do


async def test_starting_twice_starts_once(launcher: ProcessLauncher) -> None:
    first, second = await asyncio.gather(launcher.start(spec()), launcher.start(spec()))
    assert first == second
    again = ProcessLauncher(launcher._python, launcher._run_dir)
    assert await again.start(spec()) == first
    assert await again.alive("a")


async def test_a_crash_is_seen_and_the_next_start_cleans_up(launcher: ProcessLauncher) -> None:
    child = int((await logged(launcher, spec()))["child"])
    server = leader(launcher)
    os.kill(server, signal.SIGKILL)
    await eventually(lambda: not lives(server))
    assert not await launcher.alive("a")
    assert lives(child)
    assert (await launcher.start(spec())).process_id != server
    await eventually(lambda: not lives(child))


async def test_a_number_that_another_process_has_now_is_left_alone(launcher: ProcessLauncher) -> None:
    await launcher.start(spec())
    record = launcher.record("a")
    assert record is not None
    other = replace(record, started_ticks=record.started_ticks - 1, mark="another's")
    (launcher._run_dir / "a.json").write_text(json.dumps(asdict(other)))
    assert not await launcher.alive("a")
    await launcher.stop("a")
    assert lives(record.process_id)
    os.killpg(record.process_id, signal.SIGKILL)


async def test_command_line_environment_and_log(launcher: ProcessLauncher) -> None:
    wanted = spec(max_num_seqs=7, extra_args=("--enforce-eager",), environment={"EXTRA": "yes"})
    lines = await logged(launcher, wanted)
    assert lines["arguments"].startswith(
        "-m vllm.entrypoints.openai.api_server --model /models/m --served-model-name m"
    )
    assert "--max-num-seqs 7" in lines["arguments"]
    assert lines["arguments"].endswith("--enforce-eager")
    assert lines["dev"] == "mode 1 extra yes"


# GPUs and ports


async def test_gpus_are_exclusive_also_those_of_an_engine_whose_server_died(launcher: ProcessLauncher) -> None:
    assert (await logged(launcher, spec("a", gpus=2)))["sees"] == "0"
    os.kill(leader(launcher), signal.SIGKILL)
    assert (await logged(launcher, spec("b", gpus=2)))["sees"] == "1"
    with pytest.raises(LaunchError, match="c: it needs 1 of 2 GPUs, and other servers leave 0"):
        await launcher.start(spec("c", gpus=2))
    assert (await logged(launcher, spec("a", gpus=2)))["sees"] == "0"  # started again: the engine is ended first
    await launcher.stop("a", grace_s=0)
    assert (await logged(launcher, spec("c", gpus=2)))["sees"] == "0"


async def test_one_that_spans_several(launcher: ProcessLauncher) -> None:
    assert (await logged(launcher, spec("a", gpus=3, tensor_parallel=2)))["sees"] == "0,1"
    with pytest.raises(LaunchError, match="it needs 2 of 3 GPUs, and other servers leave 1"):
        await launcher.start(spec("b", gpus=3, tensor_parallel=2))
    assert (await logged(launcher, spec("b", gpus=3)))["sees"] == "2"


async def test_servers_that_share_gpus_have_the_same(launcher: ProcessLauncher) -> None:
    wanted = {"a": ("b",), "b": ("a", "c"), "c": ()}
    seen = [
        (await logged(launcher, spec(name, gpus=4, tensor_parallel=2, shares_gpus_with=others)))["sees"]
        for name, others in wanted.items()
    ]
    assert seen == ["0,1", "0,1", "2,3"]


async def test_without_known_hardware_vllm_chooses_and_a_machine_may_show_only_some(
    launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await logged(launcher, spec("c")))["sees"] == "all"
    monkeypatch.setenv(VISIBLE_GPUS, "4,6")
    assert [(await logged(launcher, spec(name, gpus=2)))["sees"] for name in "ab"] == ["4", "6"]


async def test_a_port_is_given_once_although_nothing_listens_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([4001, 4001, 4002])

    class Probe:
        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *error: object) -> None: ...

        def bind(self, address: tuple[str, int]) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(ports)

    monkeypatch.setattr(module.socket, "socket", Probe)
    assert module._free_port(spec("a"), {"http://127.0.0.1:4001"}) == 4002


# Refusals


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "-a", "a" * 81])
async def test_names_that_are_no_file_names(launcher: ProcessLauncher, name: str) -> None:
    with pytest.raises(LaunchError, match="not an instance name"):
        await launcher.start(spec(name))
    with pytest.raises(LaunchError, match="not an instance name"):
        await launcher.stop(name)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (spec().model_copy(update={"source": ""}), "the model m names no folder"),
        (spec(extra_args=("--bad",)), r"does not take its further flags: unrecognized arguments: --bad\."),
        (spec(host="192.0.2.1"), r"a: no server can be started at 192\.0\.2\.1 from this machine"),
    ],
)
async def test_a_specification_that_cannot_start(launcher: ProcessLauncher, wanted: LaunchSpec, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        await launcher.start(wanted)
    assert not await launcher.alive("a")


async def test_a_python_that_is_missing_or_cannot_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    launcher = ProcessLauncher(str(python), tmp_path / "run")
    with pytest.raises(LaunchError, match="VLLM_PYTHON"):
        await launcher.start(spec())
    await launcher.stop("a")
    python.write_bytes(b"\x7fELF, but not really")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot be started"):
        await launcher.start(spec())


# Emulated


async def test_emulated(emulator: Emulator) -> None:
    launcher = EmulatedLauncher(emulator.url)
    wanted = LaunchSpec(name="e", model="m", profile=Profile(**FAST), max_num_seqs=3, kv_blocks=1000)
    assert not await launcher.alive("e")
    launched = await launcher.start(wanted)
    assert (launched.url, launched.process_id) == (f"{emulator.url}/e", None)
    assert await launcher.start(wanted) == launched
    async with VllmClient(launched.url) as client:
        await eventually(client.health)
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
    plain = LaunchSpec(name="e", model="m", profile=Profile(**FAST))
    await launcher.start(plain)
    for of, wanted, message in (
        (launcher, plain.model_copy(update={"profile": None}), "needs a performance profile"),
        (launcher, plain.model_copy(update={"name": "f", "kv_blocks": 1}), "fewer than max_model_len"),
        (launcher, plain.model_copy(update={"model": "other"}), "another specification"),
        (EmulatedLauncher(f"http://127.0.0.1:{unused_tcp_port}"), plain, "cannot be reached"),
    ):
        with pytest.raises(LaunchError, match=message):
            await of.start(wanted)
