"""What processes take of memory, on GPUs by nvidia-smi."""

import subprocess
import sys
from pathlib import Path

import pytest

from workers.vllm import hardware
from workers.vllm.hardware import parse_processes

# The format of nvidia-smi 535 to 580 for `--format=csv,noheader,nounits`.
USED = "4242, 71230\n4243, 512\n4242, 100\n4244, [N/A]\n"


def test_memory_of_processes() -> None:
    assert parse_processes(USED) == {4242: 71330 * 2**20, 4243: 512 * 2**20}


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_memory_of({1: 0}) is None  # without GPUs
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{USED}'\n")
    program.chmod(0o755)
    assert hardware.gpu_memory_of({4242: 0, 1: 0}) == 71330 * 2**20
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert hardware.gpu_memory_of({4242: 0}) is None


def test_processes_of_a_session_and_their_memory() -> None:
    # Memory that is one process's alone: PSS divides the interpreter's own pages among all that run.
    holds = "held = b'x' * (4 << 20)"
    inner = f"import os; {holds}; print(os.getpid(), flush=True); input()"
    child = f"import subprocess as s, sys; {holds}; s.Popen([sys.executable, '-c', {inner!r}]).wait()"
    leader = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    other = int(leader.stdout.readline())
    memory = hardware.processes_of(leader.pid)
    assert set(memory) == {leader.pid, other}
    assert all(size > 4 << 20 for size in memory.values())
    assert hardware.command_line_of(leader.pid)[1:] == ["-c", child]
    leader.communicate("\n")
    assert hardware.processes_of(leader.pid) == {}
    assert hardware.command_line_of(leader.pid) == []
