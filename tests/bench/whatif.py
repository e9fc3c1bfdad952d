"""What-ifs as operators run them, on a demo started for it, and on a day of 1.5 million requests.

On the demo with its traffic, by its workers: `fork_ms`, one fork of the live fleet (median of FORKS); `first_result_s`,
from submission until the first run is done; `six_by_five_s`, until all of 6 futures x 5 seeds of the next hour are;
`six_by_five_cpu_s`, processor seconds of the workers for it, their other work included. `alone` has the same three of a
scenario of the demo's size, with nothing but the workers running. `day_x4_s`: a day of 1.5 million requests under 4
strategies, one seed. Workers have two processes, warmed by a small what-if. `run_cpu_s`: processor seconds of one run
of that scenario in one process, with plans and without, the first of a process and the median of later seeds; other
work on the machine affects them less than the others.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from tests.bench._demo import demo
from tests.simulation.whatif.workers import ROOT, Place, place

FUTURES = ("pilothouse", "sageserve-reactive", "qlm", "ssjf", "fcfs-jsq")
STRATEGIES = ("lt_u", "lt_ua", "pilothouse")
"""Compared with the reactive one, which is the scenario's."""
HOUR_S = 3600.0
FORKS = 7
SEEDS = 6
"""Of `run_cpu_s`."""
SPANS = """
from controlplane.simulation.whatif.models import FutureSeed, WhatIf
from django.db.models import Max, Min
what_if = WhatIf.objects.get(pk={pk})
runs = FutureSeed.objects.filter(future__what_if=what_if)
ends = runs.aggregate(first=Min("ended_at"), all=Max("ended_at"))
print("MADE", *[(ends[name] - what_if.submitted_at).total_seconds() for name in ("first", "all")], what_if.state)
"""
FORK = """
import time
from controlplane.simulation.whatif.fork import fork_fleet
for _ in range({forks}):
    began_s = time.perf_counter()
    fork_fleet({horizon_s})
    print("MADE", time.perf_counter() - began_s)
"""
RUNS = """
import json, statistics, time
from types import SimpleNamespace
from django.utils import timezone
from controlplane.simulation.running import simulate, warm_up
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif import results, working
from controlplane.simulation.whatif.start import Start, stage_start
start = Start(kind="synthetic", at=timezone.now(), scenario=json.loads({scenario!r}))
asked = SimpleNamespace(horizon_s={horizon_s}, warmup_s=0.0, edits=[])
warm_up()
for preset in ("pilothouse", "sageserve-reactive"):
    took_s = []
    for seed in range(1, {seeds} + 1):
        began_s = time.process_time()
        changed = working.changed(asked, SimpleNamespace(changes=PRESETS[preset].changes), start)
        staged = stage_start(start, changed.scenario, seed, (), asked.horizon_s)
        results.packed(simulate(changed.scenario, staged), working.counted_of(asked, changed))
        took_s.append(time.process_time() - began_s)
    print("MADE", preset, took_s[0], statistics.median(took_s[1:]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2, help="of the worker")
    parser.add_argument(
        "--settle", type=float, default=150.0, help="seconds from the start of the demo to the first fork"
    )
    parser.add_argument("--without-demo", action="store_true", help="leave out what needs a demo")
    parser.add_argument("--without-workers", action="store_true", help="leave out what needs workers")
    parser.add_argument("--without-day", action="store_true", help="leave out the day of 1.5 million requests")


def demo_hour() -> dict[str, Any]:
    """Return two regions with the load of six models on a fleet of the demo's size: 24 requests a second."""
    values = tomllib.loads((ROOT / "docs/scenarios/reactive.toml").read_text())
    return scaled(values, 24.0, 12)


def scaled(values: dict[str, Any], requests_per_s: float, instances: int) -> dict[str, Any]:
    """Return the scenario with that total rate, and at most that many instances in each region."""
    now = sum(client["requests_per_s"] for client in values["clients"])
    for client in values["clients"]:
        client["requests_per_s"] *= requests_per_s / now
    for group in values["fleet"]:
        group.update(instances=instances // 2, spot=0, empty=instances - instances // 2)
    values.setdefault("scaling", {}).update(min_instances=2, max_instances=instances)
    return values


def made_by(where: Place, script: str) -> list[list[str]]:
    """Return the words of every line marked by *script*."""
    lines = where.manage("shell", "-v", "0", "-c", script).splitlines()
    return [line.split()[1:] for line in lines if line.startswith("MADE")]


def asked(where: Place, body: dict[str, Any]) -> dict[str, float]:
    """Submit *body*; return seconds until the first run and until all are done, by the rows, and processor seconds."""
    before_s = workers_cpu_s(where)
    made, _ = where.asking(body).communicate()
    took_s = workers_cpu_s(where) - before_s
    [(first, last, state)] = made_by(where, SPANS.format(pk=json.loads(made)["id"]))
    assert state == "done", made
    spans = {"first_result_s": float(first), "six_by_five_s": float(last), "six_by_five_cpu_s": took_s}
    return {name: round(value, 2) for name, value in spans.items()}


def workers_cpu_s(where: Place) -> float:
    """Return the total processor seconds of its Celery workers so far."""
    folder, ticks = f"PILOTHOUSE_STATE_DIR={where.environment['PILOTHOUSE_STATE_DIR']}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"celery" in words and b"worker" in words and folder in (process / "environ").read_bytes().split(b"\0"):
                ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:  # already ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def warm(where: Place, body: dict[str, Any], processes: int) -> None:
    """Make every worker process load its kernels."""
    asked(where, body | {"seeds": processes, "horizon_s": 300.0})


def run(options: argparse.Namespace) -> dict[str, Any]:
    body = {"horizon_s": HOUR_S, "seeds": 5, "futures": [{"preset": name} for name in FUTURES]}
    result: dict[str, Any] = {"processes": options.processes}
    if not options.without_demo:
        with tempfile.TemporaryDirectory(prefix="pilothouse-what-if-") as folder, demo() as stack:
            time.sleep(options.settle)
            where = Place(Path(folder), stack.environment())
            forks_s = [float(seconds) for (seconds,) in made_by(where, FORK.format(forks=FORKS, horizon_s=HOUR_S))]
            result["fork_ms"] = round(1000 * statistics.median(forks_s), 1)
            warm(where, body, options.processes)
            result |= asked(where, body)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pilothouse-what-if-"))
        where = stack.enter_context(place(Path(folder)))
        runs = RUNS.format(scenario=json.dumps(demo_hour()), horizon_s=HOUR_S, seeds=SEEDS)
        for preset, first_s, later_s in made_by(where, runs):
            result.setdefault("run_cpu_s", {})[preset] = [round(float(first_s), 2), round(float(later_s), 2)]
        if options.without_workers:
            return result
        with where.worker("bench", options.processes):
            synthetic = body | {"begin": {"kind": "synthetic", "scenario": demo_hour()}}
            warm(where, synthetic, options.processes)
            result["alone"] = asked(where, synthetic)
            if not options.without_day:
                day = scaled(tomllib.loads((ROOT / "docs/scenarios/reactive.toml").read_text()), 1_500_000 / 86_400, 16)
                futures = [{"changes": [{"kind": "policy", "part": "strategy", "value": name}]} for name in STRATEGIES]
                begin = {"kind": "synthetic", "scenario": day}
                took = asked(where, {"begin": begin, "horizon_s": 86_400.0, "seeds": 1, "futures": futures})
                result["day_x4_s"] = took["six_by_five_s"]
    return result
