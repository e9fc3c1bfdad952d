"""How long each periodic job of the gateway holds the event loop, with many open runs and waiting requests.

Processor milliseconds of the loop's thread at a stretch, in which nothing else is served: the median and the most of
`--repeats`. Two models, by `qlm` with request groups by rank, and by `hermes`; a system prompt in each call, so that what
runs will probably call is looked up too: `likely_calls_of_all` has those of all runs, which come in slices. An operator's
what-if asks for `snapshot_for_a_fork`; all others are periodic.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1_000, help="open runs, one call of each waits")
    parser.add_argument("--waiting", type=int, default=5_000, help="waiting requests in all")
    parser.add_argument("--instances", type=int, default=20, help="of each model")
    parser.add_argument("--repeats", type=int, default=7)


def run(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.bench._waiting_gateway import WaitingGateway

    served = WaitingGateway(options.runs, options.waiting, options.instances)
    result: dict[str, Any] = {"waiting": served.waiting, "runs": served.runs}
    for name, job in served.jobs().items():
        times_ms = [spent_ms(job) for _ in range(options.repeats + 1)][1:]
        result[f"{name}_ms"], result[f"{name}_most_ms"] = statistics.median(times_ms), max(times_ms)
    prewarming = served.dispatcher.prewarming.control
    began_s = time.thread_time()
    prewarming.act()
    while prewarming._runs_left:
        prewarming.refresh_likely()
    likely = len(prewarming.likely)
    result |= {"likely_calls": likely, "likely_calls_of_all_ms": 1e3 * (time.thread_time() - began_s)}
    return result


def spent_ms(job: Callable[[], object]) -> float:
    """Return the longest stretch of *job*."""
    began_s = time.thread_time()
    steps = job()
    longest_s, going_on = time.thread_time() - began_s, isinstance(steps, Coroutine)
    while going_on:
        began_s = time.thread_time()
        try:
            steps.send(None)
        except StopIteration:
            going_on = False
        longest_s = max(longest_s, time.thread_time() - began_s)
    return 1e3 * longest_s
