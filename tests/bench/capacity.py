"""Capacity plans: three drawn fleets, each settled by simulation, and the programme for a growth of three times.

Of a new process: processor time until its imports, kernels and first answer, in order. Of a drawn fleet: `first_s` until the
first answer, `checked_s` with the search by simulation, its GPUs before and after, the lowest share of requests in time, and
of how many places one instance less breaks a promise. `programme_40x5x6_s` solves 40 models, 5 regions and 6 GPU types for
three times their demand, all of it also without any one region.
"""

import argparse
import os
import time
from typing import Any

import numpy as np

from scheduling.planning.sizing import Sought, least, settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fleets", type=int, default=3, help="drawn fleets")


def large(seed: int) -> Sought:
    """Return a drawn question of 40 models, 5 regions and 6 GPU types."""
    random = np.random.default_rng(seed)
    models, regions, types = 40, 5, 6
    price, size = np.sort(random.uniform(0.8, 6, types)), random.lognormal(0, 0.8, (models, 1))
    gpus = random.choice([1, 1, 2, 4, 8], (models, types))
    able = gpus * price * 2000 / size * random.uniform(0.7, 1.4, (models, types))
    able[(random.random(able.shape) < 0.15) & (np.arange(types) > 0)] = 0
    names = ([f"{name}-{number}" for number in range(count)]
             for name, count in (("model", models), ("region", regions), ("gpu", types)))  # fmt: skip
    return Sought(*names, random.lognormal(9, 0.8, (models, regions)), able, gpus, price, survives_loss=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from controlplane.simulation.running import warm_up
    from tests.planning.drawn_capacity import drawn, offering

    cold: dict[str, float] = {}
    for name, step in (("imports", int), ("kernels", warm_up), ("first", lambda: least(drawn(0)[0]))):
        step()
        cold[f"{name}_cpu_s"] = time.process_time() - sum(cold.values())
    offering._measured.cache_clear()
    result: dict[str, Any] = {"new_process": cold}
    for seed in range(options.fleets):
        began_s = time.perf_counter()
        sought, fleet = drawn(seed, survives_loss=bool(seed % 2))
        first = least(sought)
        first_s = time.perf_counter() - began_s
        settled = settle(sought, fleet.draws, fleet.wanted)
        best = settled.cheapest(fleet.wanted)
        counts = np.array([one.counts for one in best])
        result[f"fleet_{seed}"] = {
            "first_s": first_s, "checked_s": time.perf_counter() - began_s, "simulations": settled.runs,
            "first_gpus": int((first * sought.gpus[:, None, :]).sum()),
            "least_gpus": int((counts * sought.gpus[:, None, :]).sum()),
            "met_ratio": float(np.nanmin([one.worst for one in best])), "places": int((counts > 0).sum()),
            "one_less_breaks": int(settled.tried[counts > 0].sum()),
        }  # fmt: skip
    began_s = time.perf_counter()
    least(large(0), 3.0)
    result["programme_40x5x6_s"] = time.perf_counter() - began_s
    return result
