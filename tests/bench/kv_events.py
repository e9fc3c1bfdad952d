"""What KV events cost the gateway, and what they win where memory is short.

Costs are of one core, medians. Batches of events, from their bytes to the table: `store_and_evict`, a prompt of 4,096 tokens
is stored (256 blocks) and removed; `decode`, eight requests each fill a block. A request: `cut`, its tokens are hashed;
`look_up`, eight instances have its whole prompt of 4,096 tokens; `count`, its blocks are counted where it runs and dropped.

`fork`: the state of 1,200 requests with prompts of 125 blocks at 20 instances, in milliseconds of the gateway and kilobytes
of JSON, where routers know nothing of prompts, their text, or their tokens too.

`agents` are simulated, where there are data: runs of tau-bench on four instances whose caches together have room for some of
those that are open, or all.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=30, help="batches timed; the median of their means is reported")
    parser.add_argument("--calls", type=int, default=20, help="calls in a batch")
    parser.add_argument("--data", type=Path, help="folder of the data sets, for the simulated agents")
    parser.add_argument("--runs", type=int, default=600, help="runs of the simulated agents")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
        }
        import django

        django.setup()
        from tests.bench._kv_events import measured

        return measured(options)
