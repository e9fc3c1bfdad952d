"""Memory and processor time of the latencies and counts of the last minutes, for many instances."""

import argparse
import random
import time
import tracemalloc
from typing import Any

from controlplane.dispatch.monitoring.windows import Count, Latency, Windows

SECONDS = 70


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=1000, help="requests a second, on any of them")


def run(options: argparse.Namespace) -> dict[str, Any]:
    drawn = random.Random(3)
    tracemalloc.start()
    windows = Windows()
    names = [
        ("fleet", f"model {at % 10}", f"endpoint {at % 10} {at % 100}", f"instance {at}")
        for at in range(options.instances)
    ]
    groups = [tuple(map(windows.group, each)) for each in names]
    for second in range(SECONDS):
        windows.advance(second)
        for _ in range(options.rate):
            of = groups[drawn.randrange(options.instances)]
            windows.count(of[:3], Count.FINISHED)
            for what in Latency:
                windows.latency(of, what, drawn.lognormvariate(5, 1))
    windows.advance(SECONDS)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begun_s = time.process_time()
    for of in groups:
        windows.percentiles(of[3], Latency.TTFT, (95,))
    read_s = time.process_time() - begun_s
    return {
        "memory_mb": held / 1e6,
        "most_memory_mb": most / 1e6,
        "read_us_per_instance": read_s / options.instances * 1e6,
    }
