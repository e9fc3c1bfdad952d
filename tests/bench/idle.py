"""Processor time and memory of every process of `manage.py up`, without traffic and with it.

Each stack starts in its own folder, is left alone until its first plans are made, and is then watched. Memory is PSS,
which counts shared pages once over all processes; RSS counts them in each.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.bench._demo import demo
from tests.bench._soak.stack import PARTS

TICKS_S = os.sysconf("SC_CLK_TCK")
STAT_PPID, STAT_TIMES = (
    1,
    slice(11, 15),
)  # fields of /proc/PID/stat after the command: parent, and times of the process and its children


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120.0, help="how long each stack is watched")
    parser.add_argument("--settle", type=float, default=150.0, help="seconds from the sign-in link to the watch")
    parser.add_argument("--only", choices=("without_traffic", "with_traffic"), help="one of the two")


def family(ancestor: int) -> dict[int, list[str]]:
    """Return *ancestor* and all its descendants, each with the fields of its /proc/PID/stat after the command's
    name.
    """
    stats = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
    below, asked = {}, [ancestor]
    while asked:
        number = asked.pop()
        if number in stats:
            below[number] = stats[number]
            asked += [child for child, fields in stats.items() if int(fields[STAT_PPID]) == number]
    return below


def part_of(number: int) -> str:
    """Return the part that a process belongs to; children belong to their parent's part."""
    try:
        line = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "gone"
    return next((part for part, words in PARTS.items() if words in line), "supervisor")


def cpu_s(fields: list[str]) -> float:
    """Return the processor time of a process, with that of ended children."""
    return sum(map(int, fields[STAT_TIMES])) / TICKS_S


def memory_mb(number: int) -> Counter[str]:
    """Return PSS and RSS; zeros for an ended process."""
    sizes: Counter[str] = Counter()
    try:
        lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return sizes
    for line in lines:
        name, size, *_ = line.split()
        if name in ("Pss:", "Rss:"):
            sizes[name[:-1].lower()] += int(size) / 1024
    return sizes


def watched(ancestor: int, seconds: float) -> dict[str, Any]:
    """Return mean processor use over *seconds*, and memory at their end, by part."""
    before, began_s = family(ancestor), time.monotonic()
    time.sleep(seconds)
    after, elapsed_s = family(ancestor), time.monotonic() - began_s
    cores: Counter[str] = Counter()
    memory: dict[str, Counter[str]] = {"pss": Counter(), "rss": Counter()}
    for number, fields in after.items():
        part = part_of(number)
        cores[part] += (cpu_s(fields) - (cpu_s(before[number]) if number in before else 0.0)) / elapsed_s
        for kind, size in memory_mb(number).items():
            memory[kind][part] += size
    return {
        "processes": len(after),
        "cores": sum(cores.values()),
        "pss_mb": sum(memory["pss"].values()),
        "rss_mb": sum(memory["rss"].values()),
        "cores_by_part": dict(cores.most_common()),
        "pss_mb_by_part": dict(memory["pss"].most_common()),
    }


def measured(options: argparse.Namespace, *flags: str) -> dict[str, Any]:
    with demo(*flags) as stack:
        time.sleep(options.settle)
        return watched(stack.supervisor, options.seconds)


def run(options: argparse.Namespace) -> dict[str, Any]:
    kinds = {"without_traffic": ("--no-traffic",), "with_traffic": ()}
    return {kind: measured(options, *flags) for kind, flags in kinds.items() if options.only in (None, kind)}
