"""The exact model in a subprocess that is killed at its time limit, which HiGHS does not always keep.

`multiprocessing` is not possible: Celery's workers may not have such children. Run as a
program, this module is the subprocess.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import Problem
from scheduling.planning.programme import OutOfTime, Solved, SolverLost, solve_exact

ASKED_SHARE = 0.7
"""Share of the time that HiGHS gets as its limit, so that its result by then is not lost with the process."""


def solve_in_subprocess(
    problem: Problem,
    gap: float,
    time_limit_s: float,
    start: NDArray[np.int64] | None = None,
    shortage: bool = False,
) -> Solved:
    """Like `solve_exact`, with an enforced time limit. Raise OutOfTime at the limit, SolverLost if the process died."""
    request = pickle.dumps((problem, gap, ASKED_SHARE * time_limit_s, start, shortage))
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduling.planning.exact_subprocess"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # The parent's path, in case it was changed after the start.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        answer, complaint = process.communicate(request, timeout=time_limit_s)
    except subprocess.TimeoutExpired as error:
        raise OutOfTime(f"HiGHS was stopped after {time_limit_s:.1f} s") from error
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        last = complaint.decode(errors="replace").strip().splitlines()
        raise SolverLost(f"HiGHS died with {process.returncode}{': ' + last[-1] if last else ''}")
    result: Solved | SolverLost = pickle.loads(answer)  # noqa: S301 - written by our own process
    if isinstance(result, SolverLost):
        raise result
    return result


def main() -> None:
    """Solve the problem on standard input, and write the answer to standard output."""
    request = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - written by our own parent
    answer_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # solver output goes to standard error
    try:
        result: Solved | SolverLost = solve_exact(*request)
    except SolverLost as lost:
        result = lost
    with answer_to:
        pickle.dump(result, answer_to)


if __name__ == "__main__":
    main()
