"""Compile kernels before they are needed: `python -m controlplane.kernels [--background] [GROUP ...]`, by default all.

The parts of a group (`scheduling.compiling.GROUPS`) are compiled in parallel processes, under the group's lock. If that was
done for these sources on this machine, in any checkout, nothing is loaded, which takes tenths of a second. `manage.py up`
compiles what requests need before the web process starts, and the rest in the background.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from scheduling.compiled import cache_bases
from scheduling.compiling import COMPILES, GROUPS, Progress, compiling
from scheduling.compiling import progress as progress_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("scheduling", "forecasting")
BACKGROUND: Final = 10
"""Niceness of a process that compiles while a stack runs."""


def sources() -> Iterator[Path]:
    """Return the sources of the kernels and of the calls that compile them."""
    yield Path(__file__)
    for name in PACKAGES:
        yield from sorted((ROOT / name).rglob("*.py"))


def processor() -> str:
    """Return the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@functools.cache
def state() -> str:
    """Return a digest of what identifies a kernel on disk: sources, versions, the processor."""
    machine = (sys.version, importlib.metadata.version("numba"), importlib.metadata.version("llvmlite"), processor())
    digest = hashlib.sha256(repr(machine).encode())
    for path in sources():
        digest.update(os.path.relpath(path, ROOT).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def stamp(folder: Path, group: str) -> Path:
    """Return the file that marks *group* as compiled. Its folder, like those of kernels, is removed after a week unused."""
    return folder / f"kernels-all-{state()}" / group


def kept(since_s: float) -> set[str]:
    """Return the compiled kernels on disk whose folders were used since then."""
    bases = {base for name in PACKAGES for base in cache_bases(ROOT / name)}
    folders = [folder for base in bases for folder in base.glob("kernels-*") if folder.stat().st_mtime >= since_s]
    return {str(path) for folder in folders for path in folder.glob("*.nbc")}


def is_done(stamp: Path) -> bool:
    """Return whether *stamp* was written for the current state and its compiled kernels still exist."""
    try:
        os.utime(stamp.parent)
        files = stamp.read_text().splitlines()
    except OSError:
        return False
    return all(map(os.path.exists, files))


def note_done(stamp: Path, files: Iterable[str]) -> None:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text("\n".join(sorted(files)))


def compile_requests() -> None:
    """Compile the kernels on a request's path."""
    from forecasting.lengths import LengthQuery, bundled
    from scheduling import dispatch
    from scheduling.queueing.waits import waiting_in_queues, waiting_time
    from scheduling.scaling import view

    dispatch.warm_up()
    waiting_time.warm_up()
    waiting_in_queues.warm_up()
    view.warm_up()
    bundled().predict_one(LengthQuery("hello", 1))


def compile_orders() -> None:
    """Compile the search for the order of queues, which the gateway uses too."""
    from scheduling.queueing import global_scheduler

    global_scheduler.warm_up()


def compile_simulation() -> None:
    """Compile the simulator's loop and strategies' views of endpoints. Django is not set up here."""
    import numpy as np

    from controlplane.simulation.running import SMALL
    from scheduling.simulation.cluster.dispatcher import count_blocks
    from scheduling.simulation.engine.lookahead import memory_held
    from scheduling.simulation.engine.prefix_cache import warm_prefix
    from scheduling.simulation.scenario import Scenario
    from scheduling.simulation.simulator import Simulation
    from scheduling.simulation.staging import stage

    for strategy in (
        "preserve",
        "reactive",
    ):  # one asks for look-ahead maps of endpoints, the other for their utilisation only
        scaling = {"strategy": strategy, "min_instances": 1, "max_instances": 4}
        staged = stage(Scenario.model_validate({**SMALL, "scaling": scaling}), Path("small"))
        staged.run(advisor=_Silent())
    world = Simulation(staged.cluster, staged.requests).world
    memory_held(
        world.fleet, world.endpoints, world.engines, np.zeros(1), np.zeros(1)
    )  # the scaling that experiments use
    warm_prefix(world.engines, 0, np.zeros(1, np.int64), 0, 0)  # forks and prewarming, where there are prefix caches
    count_blocks(world, 0, 0)


class _Silent:
    """Planner without advice."""

    def advise(self, _now_s: float, views: Sequence[object]) -> list[None]:
        return [None] * len(views)


PARTS: Final[dict[str, dict[str, Callable[[], None]]]] = {
    "requests": {"requests": compile_requests, "orders": compile_orders},
    "simulation": {"simulation": compile_simulation},
}


def base() -> Path | None:
    """Return the folder of this machine's kernels and compile locks; None where nothing can be written."""
    for folder in cache_bases(ROOT / PACKAGES[0]):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


def progress() -> Progress | None:
    """Return the progress of the process that compiles kernels on this machine; None if none does."""
    if (folder := base()) is None:
        return None
    return next((now for group in GROUPS if (now := progress_of(folder, group))), None)


def missing() -> list[str]:
    """Return the groups that are not fully compiled on this machine."""
    folder = base()
    return [group for group in GROUPS if folder is None or not is_done(stamp(folder, group))]


def compile_group(group: str) -> int:
    """Compile what *group* lacks, one process per part; return the worst exit status."""
    folder = base()
    if folder is None or is_done(done := stamp(folder, group)):
        return 0  # without a cache each process compiles for itself
    with compiling(folder, group):
        if is_done(done):  # compiled by the process that held the lock before
            return 0
        began_s = time.time()
        environment = os.environ | {COMPILES: "1"}
        command = [sys.executable, "-m", "controlplane.kernels", "--part"]
        parts = [subprocess.Popen([*command, part], cwd=ROOT, env=environment) for part in PARTS[group]]
        failed = max([part.wait() for part in parts])
        if not failed:
            note_done(done, kept(began_s))
            sys.stdout.write(f"of {group}, compiled for this machine in {time.time() - began_s:.0f} s\n")
            sys.stdout.flush()
        return failed


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--part"]:
        {name: part for parts in PARTS.values() for name, part in parts.items()}[arguments[1]]()
        return 0
    background = arguments[:1] == ["--background"]
    if unknown := set(arguments[background:]) - set(GROUPS):
        known = ", ".join(GROUPS)
        sys.stderr.write(f"No group of kernels is named {', '.join(sorted(unknown))}; there are {known}\n")
        return 2
    if background:  # sequentially
        os.nice(BACKGROUND)
        return max(map(compile_group, arguments[1:] or GROUPS))
    with ThreadPoolExecutor(len(GROUPS)) as threads:
        return max(threads.map(compile_group, arguments or GROUPS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
