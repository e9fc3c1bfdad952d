"""Rows a second that retention deletes beside the ledger's writes, and how long those wait for it.

On the database of DATABASE_URL; without one, on a SQLite file of its own; with --postgres on a new cluster.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import orjson

from tests.postgres import cluster

BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=150_000, help="old rows at the start")
    parser.add_argument("--rate", type=int, default=2_000, help="rows written a second beside it")
    parser.add_argument("--seconds", type=float, default=30.0, help="of deleting")
    parser.add_argument("--postgres", action="store_true")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(cluster()) if options.postgres else f"sqlite:///{folder}/db.sqlite3"
        given = os.environ | {"DJANGO_SETTINGS_MODULE": "controlplane.settings", "PILOTHOUSE_DEBUG": "1",
                              "PILOTHOUSE_STATE_DIR": folder, "DATABASE_URL": url}  # fmt: skip
        subprocess.run([sys.executable, "manage.py", "migrate", "-v", "0"], env=given, check=True)
        code = "import sys; from tests.bench.retention import measure; measure(*map(float, sys.argv[1:]))"
        command = [sys.executable, "-c", code, str(options.rows), str(options.rate), str(options.seconds)]
        done = subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    return result


def measure(rows: float, rate: float, seconds: float) -> None:
    import django

    django.setup()
    from django.db import connection
    from django.utils import timezone

    from controlplane.accounts.models import Tenant
    from controlplane.fleet.models import SloClass
    from controlplane.gateway.ledger.entry import Row
    from controlplane.gateway.ledger.writer import write
    from controlplane.gateway.models import LedgerRow
    from tests.gateway.rows import ledger_row
    from workers.tasks import housekeeping

    of = SloClass.objects.create(name="interactive", title="I", kind="interactive")
    tenant = Tenant.objects.create(name="acme", default_slo_class=of)

    def entries(begin_s: float, number: int) -> list[Row]:
        return [
            ledger_row(
                request_id=f"{begin_s}-{at}", arrived_at=begin_s + at / 1000, tenant_id=tenant.pk, model="m",
                slo_class="interactive", instance=f"m-{at % 20}", outcome="done", status_code=200, prompt_tokens=900,
                output_tokens=200, e2e_ms=9_000.0, trace='[{"policy":"join_shortest_queue","why":"' + "x" * 300 + '"}]',
            )
            for at in range(number)
        ]  # fmt: skip

    old_s = (timezone.now() - timedelta(days=40)).timestamp()
    for at in range(0, int(rows), 2_000):
        write(entries(old_s + at / 1000, 2_000))
    waits_s: list[float] = []
    stop = threading.Event()

    def writer() -> None:
        due_s = time.monotonic()
        while not stop.is_set():
            batch = entries(time.time(), BATCH)
            begun_s = time.monotonic()
            write(batch)
            waits_s.append(time.monotonic() - begun_s)
            due_s += BATCH / rate
            stop.wait(max(0.0, due_s - time.monotonic()))
        connection.close()

    def written(run_s: float) -> list[float]:
        waits_s.clear()
        thread = threading.Thread(target=writer)
        stop.clear()
        thread.start()
        if run_s:
            stop.wait(run_s)
        else:
            nonlocal_deleted.append(housekeeping.prune_ledger())
        stop.set()
        thread.join()
        return sorted(waits_s)

    nonlocal_deleted: list[int] = []
    alone = written(5.0)
    housekeeping.RUN_S = seconds
    begun_s = time.monotonic()
    beside = written(0.0)
    took_s = time.monotonic() - begun_s
    p99 = {name: each[int(len(each) * 0.99)] * 1000 for name, each in (("alone", alone), ("beside", beside))}
    result = {
        "database": connection.vendor,
        "deleted_per_s": nonlocal_deleted[0] / took_s,
        "written_per_s": len(beside) * BATCH / took_s,
        "write_p99_ms_alone": p99["alone"],
        "write_p99_ms_beside": p99["beside"],
        "write_max_ms_beside": beside[-1] * 1000,
        "old_rows_left": LedgerRow.objects.filter(arrived_at__lt=timezone.now() - timedelta(days=30)).count(),
    }
    print(orjson.dumps(result).decode())
