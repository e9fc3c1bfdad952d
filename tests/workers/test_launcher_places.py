"""Where servers on one machine are put: each has GPUs and a port that no other one has."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.conftest import eventually
from workers.vllm import launcher as module
from workers.vllm.launcher import VISIBLE_GPUS, LaunchError, LaunchSpec, ProcessLauncher

NAMES = ("a", "b", "c")
# Loads for ever, with an engine in its process group, and says which GPUs it may see.
SERVER = f"""#!/bin/sh
sleep 600 &
echo "sees ${{{VISIBLE_GPUS}-all}}"
exec sleep 600
"""


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessLauncher]:
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    python = tmp_path / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    launcher = ProcessLauncher(str(python), tmp_path / "run")
    yield launcher
    for name in NAMES:
        await launcher.stop(name, grace_s=0)


def spec(name: str, **changes: object) -> LaunchSpec:
    return LaunchSpec(name=name, model="m", source="/models/m", **changes)  # type: ignore[arg-type]


async def sees(launcher: ProcessLauncher, wanted: LaunchSpec) -> str:
    """The GPUs that *wanted* sees when it has started."""
    await launcher.start(wanted)
    log = launcher.log_file(wanted.name)
    await eventually(lambda: log.read_text().endswith("\n"))
    return log.read_text().split()[-1]


async def test_each_has_gpus_of_its_own(launcher: ProcessLauncher) -> None:
    assert await sees(launcher, spec("a", gpus=2)) == "0"
    assert await sees(launcher, spec("b", gpus=2)) == "1"
    with pytest.raises(LaunchError, match="c: it needs 1 of 2 GPUs, and other servers leave 0"):
        await launcher.start(spec("c", gpus=2))
    await launcher.stop("a", grace_s=0)
    assert await sees(launcher, spec("c", gpus=2)) == "0"


async def test_one_that_spans_several(launcher: ProcessLauncher) -> None:
    assert await sees(launcher, spec("a", gpus=3, tensor_parallel=2)) == "0,1"
    with pytest.raises(LaunchError, match="it needs 2 of 3 GPUs, and other servers leave 1"):
        await launcher.start(spec("b", gpus=3, tensor_parallel=2))
    assert await sees(launcher, spec("b", gpus=3)) == "2"


async def test_a_machine_may_show_only_some(launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_GPUS, "4,6")
    assert [await sees(launcher, spec(name, gpus=2)) for name in ("a", "b")] == ["4", "6"]


async def test_where_no_hardware_is_kept_vllm_chooses(launcher: ProcessLauncher) -> None:
    assert await sees(launcher, spec("a")) == "all"


async def test_an_engine_whose_server_died_still_has_its_gpu(launcher: ProcessLauncher) -> None:
    await sees(launcher, spec("a", gpus=2))
    record = launcher._read("a")
    assert record is not None
    os.kill(record.process_id, signal.SIGKILL)
    assert await sees(launcher, spec("b", gpus=2)) == "1"
    assert await sees(launcher, spec("a", gpus=2)) == "0"  # started again: the engine is ended first


async def test_a_port_is_given_once_although_nobody_listens_yet(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_another_machine_is_said(launcher: ProcessLauncher) -> None:
    with pytest.raises(LaunchError, match=r"a: no server can be started at 192\.0\.2\.1 from this machine"):
        await launcher.start(spec("a", host="192.0.2.1"))
