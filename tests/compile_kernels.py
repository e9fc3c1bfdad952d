"""Compile every kernel once, before test processes start: `python -m tests.compile_kernels`.

Kernels are kept on disk, and several processes that miss one at the same time would each compile it. The simulator's loop
takes as long as all others together, so it has a process of its own. With everything on disk this takes some three seconds.
"""

import subprocess
import sys


def compile_simulator() -> None:
    from scheduling.simulation.simulator import Simulation
    from scheduling.simulation.workload.requests import make_requests
    from tests.scheduling.simulation.small import cluster, instance

    requests = make_requests([0.0, 0.1], [100, 100], [20, 20])
    Simulation(cluster(instance()), requests).run()


def compile_others() -> None:
    from forecasting.lengths import LengthQuery, bundled
    from forecasting.lengths.service import cache
    from scheduling import dispatch
    from scheduling.planning.planner import plan_fast
    from scheduling.queueing import waiting_in_queues, waiting_time
    from scheduling.queueing.reordering import scheduler
    from tests.scheduling.planning.problems import synthetic

    dispatch.warm_up()
    waiting_time.warm_up()
    waiting_in_queues.warm_up()
    cache.warm_up()
    scheduler.warm_up()
    plan_fast(synthetic(1, 1, 1, seed=0))
    bundled().predict_one(LengthQuery("hello", 1))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        {"simulator": compile_simulator, "others": compile_others}[sys.argv[1]]()
    else:
        parts = [
            subprocess.Popen([sys.executable, "-m", "tests.compile_kernels", part]) for part in ("simulator", "others")
        ]
        sys.exit(max(part.wait() for part in parts))
