"""Compile every kernel once, before test processes start: `python -m tests.compile_kernels`.

Kernels are kept on disk, and several processes that miss one at the same time would each compile it. The simulator's loop
takes as long as all others together, so it has a process of its own. When all of that was done for these sources on this
machine, in any checkout, and is still there, nothing is loaded, which takes some tenths of a second.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scheduling.compiled import cache_bases

ROOT = Path(__file__).parents[1]
PACKAGES = ("scheduling", "forecasting")
TESTS_READ = ROOT / "tests" / "__pycache__" / "read"
"""Is there once the test modules of this checkout are compiled."""


def sources() -> Iterator[Path]:
    """Whatever the kernels, or the calls that compile them, are made of."""
    yield Path(__file__)
    for name in PACKAGES:
        yield from sorted((ROOT / name).rglob("*.py"))


def processor() -> str:
    """Its model and abilities."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def state() -> str:
    """A digest of what a kernel on disk is found by: sources, versions, the processor."""
    machine = (sys.version, importlib.metadata.version("numba"), importlib.metadata.version("llvmlite"), processor())
    digest = hashlib.sha256(repr(machine).encode())
    for path in sources():
        digest.update(os.path.relpath(path, ROOT).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def stamp() -> Path:
    """The file that is there once all was compiled; its folder goes when unused for a week, as those of kernels."""
    return cache_bases(ROOT / PACKAGES[0])[0] / f"kernels-all-{state()}" / "files"


def kept(since_s: float) -> set[str]:
    """Compiled kernels on disk whose folders have been asked for since then."""
    bases = {base for name in PACKAGES for base in cache_bases(ROOT / name)}
    folders = [folder for base in bases for folder in base.glob("kernels-*") if folder.stat().st_mtime >= since_s]
    return {str(path) for folder in folders for path in folder.glob("*.nbc")}


def is_done(stamp: Path) -> bool:
    """Whether *stamp* was written for what is here now, and what was compiled then is still there."""
    try:
        os.utime(stamp.parent)
        files = stamp.read_text().splitlines()
    except OSError:
        return False
    return all(map(os.path.exists, files))


def note_done(stamp: Path, files: Iterable[str]) -> None:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text("\n".join(sorted(files)))


class Silent:
    """A planner that advises nothing."""

    def advise(self, now_s: float, views: Sequence[object]) -> list[None]:
        return [None] * len(views)


def compile_simulator() -> None:
    import numpy as np

    from scheduling.scaling import make_strategy
    from scheduling.simulation.engine.lookahead import memory_held
    from scheduling.simulation.simulator import Simulation
    from scheduling.simulation.state import work
    from scheduling.simulation.strategies import Bounds, run_strategy
    from scheduling.simulation.workload.requests import make_requests
    from tests.scheduling.simulation.small import cluster, instance

    requests = make_requests([0.0, 0.1], [100, 100], [20, 20])
    for name in ("reactive", "preserve"):  # one asks for the load of endpoints, the other for their look-ahead maps too
        strategy = make_strategy(name)
        advisor = Silent() if strategy.plans_for else None
        run_strategy(cluster(instance()), requests, strategy, bounds=Bounds(1, 2), advisor=advisor, until_s=60.0)
    world = Simulation(cluster(instance()), requests).world
    memory_held(world.fleet, world.endpoints, world.engines, np.zeros(1), np.zeros(1))  # what experiments scale by
    work.warm_up(world)


def compile_others() -> None:
    from forecasting.lengths import LengthQuery, bundled
    from forecasting.lengths.service import cache
    from scheduling import dispatch
    from scheduling.planning import planner
    from scheduling.queueing import global_scheduler
    from scheduling.queueing.waits import waiting_in_queues, waiting_time

    dispatch.warm_up()
    waiting_time.warm_up()
    waiting_in_queues.warm_up()
    cache.warm_up()
    global_scheduler.warm_up()
    planner.warm_up()
    bundled().predict_one(LengthQuery("hello", 1))


def read_tests() -> None:
    """Let pytest write the test modules as it runs them, once in a checkout, or each of its processes would."""
    if TESTS_READ.exists():
        return
    command = [sys.executable, "-m", "pytest", "-qq", "-n", "0", "--collect-only"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    TESTS_READ.parent.mkdir(exist_ok=True)
    TESTS_READ.touch()


PARTS = {"simulator": compile_simulator, "others": compile_others}


def main() -> int:
    if is_done(stamp()):
        read_tests()
        return 0
    began_s = time.time()
    parts = [subprocess.Popen([sys.executable, "-m", "tests.compile_kernels", part]) for part in PARTS]
    read_tests()  # beside the simulator's loop, which takes the longest
    failed = max([part.wait() for part in parts])
    if not failed:
        note_done(stamp(), kept(began_s))
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 2:
        PARTS[sys.argv[1]]()
    else:
        sys.exit(main())
