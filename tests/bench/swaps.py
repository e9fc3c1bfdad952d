"""Models on one instance: swaps in the order of the virtual queue against swaps on demand, and whose weights stay in memory.

16 sequences, Poisson arrivals: `tests/scheduling/simulation/shared_gpus.py`. `in_time` is the share with a first token
within the time allowed, by seed, and `swaps` their number. With --memory, six models share CPU memory for half of their
weights, and the rules that choose whose stay there are compared: `most swaps` is `scheduling.fleet.sleep_level`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from scheduling.simulation.cluster.description import Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.swapping import Swapping
from tests.scheduling.simulation.shared_gpus import simulated

WORKLOADS = (
    ((1.0, 1.0), (30.0, 200.0)),
    ((2.0, 2.0), (30.0, 300.0)),
    ((2.5, 2.5), (30.0, 300.0)),
    ((2.5, 2.5), (60.0, 120.0)),
    ((2.2, 2.2), (90.0, 90.0)),
    ((2.0, 0.5), (20.0, 400.0)),
)
"""Requests a second of each model, and its TTFT target in seconds."""
SIZES_GB = (15, 15, 28, 28, 65, 140)
PER_S = 2.0 / np.arange(1, 7) / (1.0 / np.arange(1, 7)).sum()
"""Requests a second of six models, by Zipf's law."""
SCENES: dict[str, dict[str, Any]] = {
    "by queue": {},
    "equal sizes": {"sizes_gb": (28,) * 6},
    "rates change": {"change": True},
    "unlike disks": {"sizes_gb": (28, 28, 28, 28, 65, 65), "disks_gb_s": (1.0, 3.0, 8.0)},
    "on demand": {"by_queue": False},
}
RULES: dict[str, Callable[["Ruled"], Any]] = {
    "first come": lambda at: np.ones(6),
    "none": lambda at: np.ones(6),
    "smallest": lambda at: 1 / at.instances["weights_bytes"],
    "most requests": lambda at: at.requests(),
    "most swaps": lambda at: at.instances["swaps"].copy(),
    "saved seconds": lambda at: at.swaps() * at.saves_s / at.instances["weights_bytes"],
}


class Ruled(Swapping):
    """Has the members of its group ranked by *rule* where the kernel counts swaps, and counts loads by tier."""

    def __init__(self, simulation: Any, rule: str) -> None:
        super().__init__(simulation)
        self.simulation, self.rule = simulation, rule
        self.instances = simulation.world.lives.instances
        self.saves_s = self.instances["reload_s"] - self.instances["wake_s"]
        if rule == "none":
            simulation.world.lives.groups["memory_bytes"] = -1.0

    def requests(self) -> Any:
        arrivals = self.simulation.world.arrivals
        return np.bincount(arrivals.model[arrivals.arrival_s <= self.simulation.now_s], minlength=6)

    def changes(self) -> Any:
        return self.simulation.world.lives.changes[: int(self.simulation.world.run_state["changes"][0])]

    def swaps(self) -> Any:
        changes = self.changes()
        return np.bincount(changes["instance"][changes["after"] == State.WAKING], minlength=6)

    def loads(self) -> tuple[int, int]:
        """Return how many members came from CPU memory, and from storage."""
        began_s, warm, cold = {}, 0, 0
        for at_s, instance, _, before, after in self.changes().tolist():
            if after == State.WAKING:
                began_s[instance] = at_s
            elif before == State.WAKING:
                is_warm = at_s - began_s[instance] < self.instances["wake_s"][instance] + 1.0
                warm, cold = warm + is_warm, cold + (not is_warm)
        return int(warm), int(cold)

    def __call__(self, simulation: Any) -> None:
        if self.rule != "most swaps":
            self.instances["swaps"] = 1e18 * RULES[self.rule](self)  # one swap more or less is nothing to it
        super().__call__(simulation)


def in_memory(
    rule: str, seed: int, for_s: float, sizes_gb: Any = SIZES_GB, disks_gb_s: Any = (3.0,), change: bool = False,
    by_queue: bool = True,
) -> tuple[float, float, int, int]:  # fmt: skip
    random, made = np.random.default_rng([seed, 5]), list[Ruled]()
    sizes, disks = random.permutation(sizes_gb), random.permutation(np.resize(disks_gb_s, 6))
    sharing = [
        Sharing("six", 1.0 + gb / 80, 2.0 + gb / 80, 5.0 + gb / disk, gb * 1e9, sizes.sum() * 0.5e9)
        for gb, disk in zip(sizes.tolist(), disks.tolist(), strict=True)
    ]
    per_s, later_per_s = random.permutation(PER_S).tolist(), random.permutation(PER_S).tolist()

    def swapping(simulation: Any) -> Ruled:
        made.append(Ruled(simulation, rule))
        return made[0]

    outcomes, in_time, _ = simulated(
        per_s, random.permutation((60.0, 300.0) * 3).tolist(), seed=seed, by_queue=by_queue, sharing=sharing,
        swapping=swapping, for_s=for_s, later_per_s=later_per_s if change else None,
    )  # fmt: skip
    return round(float(in_time.mean()), 4), round(float(outcomes["ttft_s"].mean()), 1), *made[0].loads()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 up to this one")
    parser.add_argument(
        "--memory", nargs="*", choices=SCENES, metavar="SCENE", help="compare rules on these, or on all"
    )
    parser.add_argument("--seconds", type=float, default=1200.0, help="of arrivals with --memory")


def run(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    seeds = range(1, options.seeds + 1)
    if options.memory is not None:
        for name in options.memory or SCENES:
            for rule in RULES:
                came = [in_memory(rule, seed, options.seconds, **SCENES[name]) for seed in seeds]
                rows = zip(("in_time", "mean_wait_s", "warm", "cold"), zip(*came, strict=True), strict=True)
                result.setdefault(name, {})[rule] = {measure: list(each) for measure, each in rows}
        return result
    for per_s, slo_s in WORKLOADS:
        for name, by_queue in (("by_queue", True), ("on_demand", False)):
            came = [simulated(per_s, slo_s, seed=seed, by_queue=by_queue) for seed in seeds]
            asked = f"{per_s[0]:g} and {per_s[1]:g} a second within {slo_s[0]:g} and {slo_s[1]:g} s"
            shares = [round(float(in_time.mean()), 4) for _, in_time, _ in came]
            result.setdefault(asked, {})[name] = {"in_time": shares, "swaps": [swaps for *_, swaps in came]}
    return result
