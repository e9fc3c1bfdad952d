"""In-process cost of one request in the dispatcher: queued, placed, explained, and released.

One instance with room, 31 running requests. `by_policy_us` by routing and ordering policy; the minimum over batches,
which a busy machine disturbs least.
"""

import argparse
import os
import tempfile
from typing import Any

POLICIES = (
    ("join_shortest_queue", "fcfs"),
    ("join_shortest_queue", "priority"),
    ("preserve", "ssjf"),
    ("least_delay", "priority"),
    ("join_shortest_queue", "qlm"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=60, help="batches timed; the least of their means is reported")
    parser.add_argument("--requests", type=int, default=300, help="requests in a batch")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
        }
        import django

        django.setup()
        return measured(options.batches, options.requests)


def measured(batches: int, requests: int) -> dict[str, Any]:
    from tests.bench._dispatched import Served

    by_policy_us = {}
    for routing, ordering in POLICIES:
        served = Served(routing, ordering)
        by_policy_us[f"{routing} {ordering}"] = min(served.batch_us(requests) for _ in range(batches))
        if served.placed != served.number:
            raise RuntimeError(f"{routing}, {ordering}: {served.placed} of {served.number} requests were placed")
    return {"request_us": max(by_policy_us.values()), "by_policy_us": by_policy_us}
