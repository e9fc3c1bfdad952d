"""Memory that the processes of a server use, on GPUs by `nvidia-smi`."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workers.vllm import processes
from workers.vllm.gpu_faults import address_of

MIB = 2**20
QUERY_LIMIT_S = 15.0
GPU_QUERY = ("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
PROCESS_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class HardwareError(Exception):
    """`nvidia-smi` could not be queried; the text says why."""


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


def gpu_addresses() -> dict[str, str]:
    """Return the addresses on the bus (`gpu_faults.address_of`) of this machine's GPUs by number; none if unknown."""
    try:
        text = _nvidia_smi(GPU_QUERY) or ""
    except HardwareError:
        return {}
    rows = (line.partition(",") for line in text.splitlines())
    return {index.strip(): address for index, _, rest in rows if (address := address_of(rest))}


def driver_messages(since_s: float) -> str:
    """Return what the NVIDIA driver has written to the kernel's log from *since_s* (seconds after boot) on; "" where that
    may not be read.
    """
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    stamped = (re.match(r"\[ *([\d.]+)\] (NVRM: .*)", line) for line in done.stdout.splitlines())
    return "".join(f"{found[2]}\n" for found in stamped if found and float(found[1]) >= since_s)


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
