"""Compile every kernel once, before test processes start: `python -m tests.compile_kernels`.

Kernels are kept on disk, and several processes that miss one at the same time would each compile it. The simulator's loop
takes as long as all others together, so it has a process of its own. When all of that was done for these sources on this
machine, and is still there, nothing is loaded, which takes some tenths of a second.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMP = ROOT / "scheduling" / "__pycache__" / "kernels.compiled"
PACKAGES = ("scheduling", "forecasting")
WHERE = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")


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
    """A digest of what Numba finds a kernel on disk by: times and sizes of sources, versions, the processor."""
    machine = (sys.version, importlib.metadata.version("numba"), importlib.metadata.version("llvmlite"), processor())
    digest = hashlib.sha256(repr((machine, [os.environ.get(name) for name in WHERE])).encode())
    for path in sources():
        about = path.stat()
        digest.update(f"{path} {about.st_mtime_ns} {about.st_size}\n".encode())
    return digest.hexdigest()


def kept() -> set[str]:
    """Compiled kernels beside the sources."""
    return {str(path) for name in PACKAGES for path in (ROOT / name).rglob("*.nbc")}


def is_done(stamp: Path) -> bool:
    """Whether *stamp* was written for what is here now, and what was compiled then is still there."""
    if not stamp.is_file():
        return False
    before, *files = stamp.read_text().splitlines()
    return before == state() and set(files) <= kept()


def note_done(stamp: Path) -> None:
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text("\n".join([state(), *sorted(kept())]))


class Silent:
    """A planner that advises nothing."""

    def advise(self, now_s: float, views: Sequence[object]) -> list[None]:
        return [None] * len(views)


def compile_simulator() -> None:
    import numpy as np

    from scheduling.scaling import make_strategy
    from scheduling.simulation.engine.lookahead import memory_held
    from scheduling.simulation.simulator import Simulation
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


def compile_others() -> None:
    from forecasting.lengths import LengthQuery, bundled
    from forecasting.lengths.service import cache
    from scheduling import dispatch
    from scheduling.planning.planner import plan_fast
    from scheduling.queueing import global_scheduler, waiting_in_queues, waiting_time
    from tests.scheduling.planning.problems import synthetic

    dispatch.warm_up()
    waiting_time.warm_up()
    waiting_in_queues.warm_up()
    cache.warm_up()
    global_scheduler.warm_up()
    plan_fast(synthetic(1, 1, 1, seed=0))
    bundled().predict_one(LengthQuery("hello", 1))


def read_tests() -> None:
    """Let pytest write the test modules as it runs them, which each of its processes would do for itself."""
    command = [sys.executable, "-m", "pytest", "-qq", "-n", "0", "--collect-only"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


PARTS = {"simulator": compile_simulator, "others": compile_others}


def main() -> int:
    if is_done(STAMP):
        return 0
    STAMP.unlink(missing_ok=True)
    simulator, others = (subprocess.Popen([sys.executable, "-m", "tests.compile_kernels", part]) for part in PARTS)
    failed = others.wait()
    read_tests()  # while the simulator's loop is still compiled
    failed = max(failed, simulator.wait())
    if not failed:
        note_done(STAMP)
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 2:
        PARTS[sys.argv[1]]()
    else:
        sys.exit(main())
