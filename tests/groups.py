"""Run the groups of the gate or of the night, two at a time, and say what each took: `python -m tests.groups gate`.

A group is a target of the Makefile, in its own process: a browser's event loop, real services and vLLM must not share
one. Groups that wait more than they compute have their own lane alongside those that compute. What a group prints is shown
when it ends; a group that fails stops no other, and the last lines name it. One that takes longer than it may is ended, as a
test that hangs is (`timeout` in pyproject.toml), so that the others say what they have.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
Lane = tuple[str, ...]
GATE: tuple[tuple[Lane, ...], ...] = (
    (("lint", "properties"), ("vllm",)),
    (("e2e", "postgres"), ("services", "vllm-tests")),
)
NIGHTLY: tuple[tuple[Lane, ...], ...] = (
    (("lint",), ("vllm",)),
    (("test",),),
    (("nightly-tests", "properties"), ("e2e", "services", "postgres")),
    (("vllm-tests",),),
)
"""Stages, one after the other; each has lanes alongside each other, and a lane its groups in order."""

GATE_LIMIT_S, NIGHTLY_LIMIT_S, GRACE_S = 25 * 60, 60 * 60, 60
ENDED = 124  # what `timeout` says then

AGAIN = re.compile(r"^RERUN .*$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """How a group ended; processor time is that of its processes and of those that they waited for."""

    name: str
    status: int
    wall_s: float
    processor_s: float
    tried_again: int


def run(name: str, variables: tuple[str, ...], limit_s: int, say: threading.Lock, running: set[int]) -> Result:
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        command = ["timeout", "-k", str(GRACE_S), str(limit_s), "make", name, *variables]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        running.add(process.pid)
        _, waited, used = os.wait4(process.pid, 0)
        running.discard(process.pid)
        process.returncode = status = os.waitstatus_to_exitcode(waited)
        output.seek(0)
        said = output.read()
    wall_s = time.monotonic() - began_s
    ended = "passed" if status == 0 else "FAILED: ended, it hangs," if status == ENDED else "FAILED"
    with say:
        print(f"\n--- {name}: {ended} in {wall_s:.0f} s\n{said.rstrip()}", flush=True)
    return Result(name, status, wall_s, used.ru_utime + used.ru_stime, len(AGAIN.findall(said)))


def run_stages(stages: tuple[tuple[Lane, ...], ...], variables: tuple[str, ...], limit_s: int) -> list[Result]:
    results: list[Result] = []
    say = threading.Lock()
    running: set[int] = set()

    def follow(lane: Lane) -> None:
        results.extend(run(name, variables, limit_s, say, running) for name in lane)

    try:
        for lanes in stages:
            threads = [threading.Thread(target=follow, args=(lane,), daemon=True) for lane in lanes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except (
        KeyboardInterrupt
    ):  # `timeout` keeps a group from the terminal's signals, and passes on what it is sent itself
        for process_id in running:
            os.kill(process_id, signal.SIGTERM)
        raise
    return results


def table(results: list[Result]) -> str:
    lines = [f"{'group':<16}{'seconds':>8}{'processor':>11}{'again':>7}"]
    for one in results:
        end = "" if one.status == 0 else "  FAILED"
        lines.append(f"{one.name:<16}{one.wall_s:>8.0f}{one.processor_s:>11.0f}{one.tried_again:>7}{end}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.groups", description="Run the gate's groups, or the night's."
    )
    parser.add_argument("which", choices=("gate", "nightly"))
    is_gate = parser.parse_args(arguments).which == "gate"
    began_s = time.monotonic()
    results = run_stages(GATE, ("GATE=1",), GATE_LIMIT_S) if is_gate else run_stages(NIGHTLY, (), NIGHTLY_LIMIT_S)
    failed = [one.name for one in results if one.status]
    print(f"\n{table(results)}\n{time.monotonic() - began_s:.0f} s in all")
    if failed:
        print(f"Failed: {', '.join(failed)}. Each alone: make NAME{' GATE=1' if is_gate else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
