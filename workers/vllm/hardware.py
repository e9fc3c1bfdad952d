"""A machine's hardware for vLLM: GPUs as `nvidia-smi` lists them, or CPUs; and its use by processes."""

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.vllm import processes

MIB = 2**20
QUERY_LIMIT_S = 15.0
GPU_QUERY = ("--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits")
PROCESS_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class HardwareError(Exception):
    """The machine could not be queried; the text says why."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine's hardware; *gpus* is empty where it computes on its CPUs."""

    gpus: tuple[Gpu, ...]
    memory_bytes: int


def machine() -> Machine:
    """Return this machine. Raises HardwareError if it has `nvidia-smi` and that fails."""
    return Machine(gpus(), _kib(Path("/proc/meminfo").read_text(), "MemTotal:"))


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none without `nvidia-smi`. Raises HardwareError."""
    text = _nvidia_smi(GPU_QUERY)
    return parse_gpus(text) if text is not None else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi --query-gpu=index,name,memory.total,uuid --format=csv,noheader,nounits`. Raises HardwareError."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(("index", "name", "memory", "uuid")):
            continue
        try:
            gpus.append(Gpu(int(fields[0]), fields[1], int(float(fields[2]) * MIB), fields[3]))
        except ValueError as error:  # "[N/A]" of a GPU that has fallen off the bus
            raise HardwareError(f"nvidia-smi says of GPU {fields[0]} ({fields[1]}): memory {fields[2]}") from error
    return tuple(gpus)


def parse_processes(text: str) -> dict[int, int]:
    """Return bytes of GPU memory by process, from `--query-compute-apps=pid,used_memory`; skip "[N/A]" (WSL, MIG)."""
    used: dict[int, int] = {}
    for line in text.splitlines():
        process, _, memory = line.partition(",")
        with suppress(ValueError):
            used[int(process)] = used.get(int(process), 0) + int(float(memory) * MIB)
    return used


def gpu_memory_of(members: Mapping[int, object]) -> int | None:
    """Return the bytes of GPU memory that *members* use; None if unknown."""
    try:
        text = _nvidia_smi(PROCESS_QUERY)
    except HardwareError:
        return None
    return None if text is None else sum(size for process, size in parse_processes(text).items() if process in members)


def processes_of(leader: int) -> dict[int, int]:
    """Return bytes of memory by process of the session that *leader* began; shared pages count proportionally (PSS)."""
    ids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    members = [each for each in ids if (stat := processes.status_of(each)) is not None and stat.session == leader]
    return {each: _kib(processes.read(each, "smaps_rollup").decode(), "Pss:") for each in members}


def command_line_of(process: int) -> list[str]:
    """Return the arguments of a process; none when it has ended."""
    words = processes.read(process, "cmdline").decode(errors="replace").rstrip("\0")
    return words.split("\0") if words else []


def _kib(table: str, name: str) -> int:
    """Return the bytes on the line *name* of a table of KiB in `/proc`; 0 without it."""
    for line in table.splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _nvidia_smi(query: tuple[str, ...]) -> str | None:
    """Return the program's output; None where it is not installed. Raises HardwareError."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HardwareError(f"{program} does not answer: {error}") from error
    if done.returncode:
        raise HardwareError(f"{program}: {(done.stdout + done.stderr).strip()[:200]}")
    return done.stdout
