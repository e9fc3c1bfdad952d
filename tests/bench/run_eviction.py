"""What ranks are worth to calls that run: `manage.py reproduce hermes` with and without, mean completion of paired seeds.

`evict N`: once a second, a running call whose run has N times the rank of a waiting one, and the cost of its KV, leaves for
it. `first rank`: a run keeps the rank of its first call, so that no later one waits for what it has used. `not counted`:
tokens of running calls count at their end alone. Values are changes against the order as it is.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from controlplane.experiments import hermes
from scheduling.applications.standings import Run, Standings
from scheduling.control.runs import Runs
from scheduling.fleet.kv_cost import eviction_cost_s
from scheduling.simulation.engine.state import sequences_in_use
from tests.bench.estimator import DATA

CASES = {"7b at 1x": ("7b", "1x", 1.0), "7b at 3x": ("7b", "3x", 1.0), "alike at 3x": ("alike", "3x", 1.0),
         "70b at 3x": ("70b", "3x", 0.2)}  # fmt: skip
MOST = 8
"""Calls that leave an endpoint in a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factors", type=float, nargs="*", default=[2.0, 10.0])
    parser.add_argument("--systems", nargs="*", default=["Hermes", "oracle"])


def evict(runs: Runs, factor: float) -> None:
    """Evict calls of runs that are behind, each once at most, so that the first of those that wait have room."""
    fleet: Any = runs.fleet
    world, waiting = fleet.simulation.world, fleet.waiting
    at = world.engines.sequences[sequences_in_use(world.engines)]
    emitted, produced, ranks = fleet._emitted(at), fleet.produced(), dict[int, Any]()
    for endpoint in np.flatnonzero(runs.by_run() & (waiting.size[: len(fleet.endpoints)] > 0)).tolist():
        by, behind = fleet.endpoints[endpoint].policy.run_demand, []
        of = (world.fleet.endpoint[at["instance"]] == endpoint) & (at["evicted"] == 0) & (emitted > 0)
        for one, tokens in zip(at[of], (at["prompt_tokens"] + emitted)[of].tolist(), strict=True):
            run, row, instance = runs.standings._of_call[int(one["request"])], int(one["request"]), int(one["instance"])
            if run.number not in ranks:
                ranks[run.number] = runs.standings.refreshed(run, fleet.now_s, produced, by)
            if world.outcomes["evictions"][row] == 0:
                cost_s = float(eviction_cost_s(world.fleet, world.endpoints, instance, float(tokens)))
                held = max(int(one["expected_tokens"]), tokens)
                behind.append((ranks[run.number].rank_s, row, instance, held, cost_s, run))
        behind.sort(key=lambda each: -each[0])
        free = dict.fromkeys(
            world.endpoints.members[slice(*world.endpoints.first[endpoint : endpoint + 2])].tolist(), 0
        )
        free = {one: int(world.fleet.kv_capacity_tokens[one] - world.fleet.kv_tokens[one]) for one in free}
        slots = np.flatnonzero((waiting.position >= 0) & (waiting.endpoint == endpoint))
        left = MOST
        for slot in slots[np.argsort(waiting.key[slots])][:MOST].tolist():
            rank_s = float(world.standings[fleet.row_at(slot), 2])
            needed = int(waiting.prompt_tokens[slot] + waiting.output_tokens[slot])
            for instance in free:
                room, cost_s, chosen = free[instance], 0.0, []
                for one in [each for each in behind if each[2] == instance]:
                    cost_s += one[4]
                    if room >= needed or factor * rank_s + cost_s >= one[0]:
                        break
                    chosen.append(one)
                    room += one[3]
                if room >= needed and len(chosen) <= left:
                    for one in chosen:
                        behind.remove(one)
                        fleet.record_standing([one[1]], ranks[one[5].number])
                        fleet.evict(one[1])
                    left, free[instance] = left - len(chosen), room - needed
                    break
            else:
                break


def variant(name: str, factor: float) -> Any:
    """Return the patch of *name*; none for the order as it is."""
    refresh, refreshed = Runs.refresh_ranks, Standings.refreshed

    def evicting(self: Runs, *given: Any) -> list[int]:
        changed = refresh(self, *given)
        evict(self, factor)
        return changed

    def kept(self: Standings, run: Run, *given: Any) -> Any:
        known = self.__dict__.setdefault("kept", {})
        return known.get(run.number) or known.setdefault(run.number, refreshed(self, run, *given))

    def not_counted(self: Standings, run: Run, now_s: float, produced: Any = None, by: str = "graph") -> Any:
        return refreshed(self, run, now_s, None, by)

    changes = {"first rank": ("refreshed", kept), "not counted": ("refreshed", not_counted)}
    of, (method, function) = (Standings, changes[name]) if name in changes else (Runs, ("refresh_ranks", evicting))
    return patch.object(of, method, function)


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for title, (part, window, scale) in CASES.items():
        for system in options.systems:
            settings = {"scale": scale, "data": Path(DATA), "intensities": [window], "systems": system}
            for case in hermes.cases(part, settings):

                def means_s(case: Any = case) -> Any:
                    return np.array(
                        [hermes.measured(case.simulate(1 + seed))["mean_s"] for seed in range(options.seeds)]
                    )

                base_s, changes = means_s(), {}
                ways = ["first rank", "not counted"] if system != "oracle" else []
                for name, factor in [
                    *((each, 0.0) for each in ways),
                    *((f"evict {each:g}", each) for each in options.factors),
                ]:
                    with variant(name, factor):
                        each = means_s() / base_s - 1
                    changes[name] = {"mean": round(float(each.mean()), 3), "seeds": each.round(3).tolist()}
                rows[f"{title}, {system}"] = changes
    return rows
