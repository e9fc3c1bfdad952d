"""Waits that the running demo estimated, against those that followed, while its traffic is a multiple of the usual."""

import json
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urljoin

import numpy as np

from tests.bench._demo import demo

SETTLE_S = 180.0
"""Time under load before requests are judged: profiles, lengths and waits are learned."""
SEND = """
import asyncio, os
from dataclasses import replace
import django
django.setup()
from controlplane.planning.demo_traffic import senders, streams_to
from workers.traffic.__main__ import new_key
from workers.traffic.waves import Waves
sources = [replace(each, share={times} * each.share) for row in senders() for each in streams_to(row, new_key(row))]
asyncio.run(Waves(os.environ["URL"], sources, 0).run())
"""
READ = """
import json
from controlplane.gateway.models import LedgerRow
rows = LedgerRow.objects.filter(estimated_wait_s__gt=0, queue_ms__isnull=False).order_by("arrived_at")
columns = "model", "slo_class", "arrived_at", "estimated_wait_s", "estimated_wait_p99_s", "queue_ms"
print("ROWS", json.dumps([[*row[:2], row[2].timestamp(), *row[3:]] for row in rows.values_list(*columns)]))
"""


def run(minutes: float, times: float) -> dict[str, Any]:
    """Return how well the demo estimates its waits under *times* its usual traffic, over *minutes* after `SETTLE_S`."""
    with demo("--no-traffic") as stack:
        environment = stack.environment()
        url = urljoin(stack.link, "/v1")
        its = environment | {"URL": url, "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
        traffic = subprocess.Popen([sys.executable, "-c", SEND.format(times=times)], env=its)
        try:
            time.sleep(SETTLE_S)
            from_s = time.time()
            time.sleep(60 * minutes)
        finally:
            traffic.terminate()
            traffic.wait()
        shell = [sys.executable, "manage.py", "shell", "-v", "0", "-c", READ]
        printed = subprocess.run(shell, env=environment, check=True, capture_output=True, text=True).stdout
    (said,) = (line.removeprefix("ROWS ") for line in printed.splitlines() if line.startswith("ROWS "))
    judged = [row for row in json.loads(said) if row[2] >= from_s]
    by_endpoint: dict[str, list[Any]] = {}
    for row in judged:
        by_endpoint.setdefault(f"{row[0]} {row[1]}", []).append(row)
    return {"minutes": minutes, "times": times, "all": quality(judged)} | {
        "waits": {name: quality(rows) for name, rows in sorted(by_endpoint.items()) if len(rows) >= 50}
    }


def quality(rows: list[Any]) -> dict[str, float]:
    """Return measures of *rows* of `READ`; R2 is NaN where all waits are equal."""
    estimated_s, p99_s, waited_ms = np.array([row[3:] for row in rows], float).reshape(-1, 3).T
    waited_s = waited_ms / 1000
    left = ((waited_s - waited_s.mean()) ** 2).sum()
    return {
        "requests": len(rows),
        "wait_s": round(float(waited_s.mean()), 1),
        "longest_s": round(float(waited_s.max()), 1),
        "r2": round(float(1 - ((waited_s - estimated_s) ** 2).sum() / left), 3),
        "below_p99": round(float((waited_s <= p99_s).mean()), 3),
        "mean_excess": round(float(estimated_s.mean() / waited_s.mean() - 1), 3),
    }
