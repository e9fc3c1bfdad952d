"""Twelve drawn fleets on which estimates of waits are judged: what was said on arrival beside what came.

One to four instances, or two models on the same GPUs; the orders `fcfs`, `deadline`, `ssjf` and `qlm`; one to four SLO
classes; load that swings by up to 30% around a mean of 0.7 to 1.3. `r2` is the coefficient of determination of estimated and
actual waits, `below_p90` the share of waits below their 90th percentile.
`r2_by_length` is of the simplest rule: the requests that wait, over the rate at which the last 64 ended.
"""

from collections import deque
from math import inf
from typing import Any

import numpy as np

from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.promises import ClassTerms
from scheduling.simulation import swapping
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests

COUNT, RATE_WINDOW = 6000, 64
JUDGED = range(1500, 4000)
"""Those before teach; those after still come while these wait."""
SHARED = "shared"
"""Two models on the same GPUs, in the order `qlm`."""
ORDERS = (*("fcfs",) * 2, *("deadline",) * 3, *("ssjf",) * 3, *("qlm",) * 2, *(SHARED,) * 2)
SCENES = len(ORDERS)
SLOTS = 16
PROFILE = Profile(0.02, 0.01, 5e-5, 0.0, 0.02, 4e-4, 1e-6)
CLASSES = ((2.0, 0), (15.0, 1), (60.0, 1), (300.0, 2))  # first token due, priority
SWAP_EVERY_S = 1.0


class Scene:
    """A fleet, and what comes to it."""

    def __init__(self, seed: int, number: int) -> None:
        random = np.random.default_rng([seed, number])
        self.shares, ordering = ORDERS[number] == SHARED, ORDERS[number].replace(SHARED, "qlm")
        instances, load = int(random.integers(1, 5)), float(random.uniform(0.7, 1.3))
        engine = EngineConfig(SLOTS, 512, 16, 900, "fcfs" if ordering == "fcfs" else "priority", 4096, PROFILE)
        specs = [InstanceSpec("m", "here", engine)] * instances
        if self.shares:
            sleep_s, wake_s = random.uniform(0.5, 2.0), random.uniform(2.0, 6.0)
            gpus = Sharing("pair", sleep_s, wake_s, 20.0, 1.0)
            instances, load = 1, 0.7 * load
            specs = [
                InstanceSpec("m", "here", engine, sharing=gpus),
                InstanceSpec("n", "here", engine, state=State.ASLEEP, sharing=gpus),
            ]
        sort = random.choice(len(CLASSES), int(random.integers(1, 5)), replace=False)
        share = random.dirichlet(np.full(sort.size, 3.0))
        output = np.clip(random.lognormal(np.log(80), 0.8, COUNT), 1, 800).astype(int)
        prompt = np.clip(random.lognormal(np.log(150), 0.8, COUNT), 4, 1000).astype(int)
        predicted = np.clip(output * random.lognormal(0.0, 0.5, COUNT), 1, None).astype(int)
        chosen = sort[random.choice(sort.size, COUNT, p=share)]
        output = np.where(chosen == 3, 2 * output, output)
        step_s = PROFILE.step_time_s(0, SLOTS, SLOTS * 250) + SLOTS / output.mean() * 150 * 5e-5
        per_s = load * instances * SLOTS / step_s / output.mean()
        swing, period = random.uniform(0.0, 0.3), random.uniform(0.1, 0.4) * COUNT
        rates = per_s * (1.0 + swing * np.sin(2.0 * np.pi * np.arange(COUNT) / period))
        due = np.array([each[0] for each in CLASSES])[chosen]
        self.requests = make_requests(
            np.cumsum(random.exponential(1.0 / rates)), prompt, output, predicted_tokens=predicted,
            model=random.choice(2, COUNT, p=[0.6, 0.4]) if self.shares else 0, slo_class=chosen,
            priority=np.array([each[1] for each in CLASSES])[chosen], deadline_s=due, judged=1,
        )  # fmt: skip
        self.cluster = Cluster(
            specs,
            policies=EndpointPolicy(ordering=ordering, queue_bound=None, ordering_stretch=10.0),
            sweeps=True,
            delays=Delays(local_weights_s=6.0),
            classes=[ClassTerms(str(at), priority, due_s) for at, (due_s, priority) in enumerate(CLASSES)],
        )
        self.drawn = {
            "order": ORDERS[number],
            "instances": instances,
            "load": round(load, 2),
            "classes": int(sort.size),
        }


def judged(seed: int, number: int) -> dict[str, Any]:
    """Return how well the waits of one scene were estimated."""
    scene = Scene(seed, number)
    simulation = Simulation(scene.cluster, scene.requests)
    assert simulation.waits is not None
    control, fleet = simulation.waits.control, simulation.bound
    placed, estimated, ended = control.placed, control.estimated, control.ended
    said: dict[int, tuple[float, float, float]] = {}
    came: dict[int, float] = {}
    ends = deque[float](maxlen=RATE_WINDOW)

    def note_ended(*arguments: Any) -> None:
        ends.append(arguments[2])
        ended(*arguments)

    def note_estimated(row: int) -> Any:
        first = row not in control.estimates
        one = estimated(row)
        if first and one is not None and one.wait is not None and row not in said:
            rate = len(ends) / max(fleet.now_s - ends[0], 1e-3) if len(ends) > 1 else inf
            p90_s = control.quantile_s(row, one.wait, 0.9)
            said[row] = one.wait.mean_s, p90_s, float(fleet.waiting.size.sum()) / rate
        return one

    def note_placed(row: int, instance: int, since_s: float, placed_s: float) -> None:
        came.setdefault(row, placed_s - since_s)
        placed(row, instance, since_s, placed_s)

    simulation.waits.control.__dict__.update(placed=note_placed, estimated=note_estimated, ended=note_ended)
    simulation.run(swapping.Swapping(simulation) if scene.shares else None, SWAP_EVERY_S)
    simulation.waits.refresh()
    rows = np.array([row for row in said if row in came and row in JUDGED])
    waited = np.array([came[row] for row in rows])
    mean_s, p90_s, rule_s = np.array([said[row] for row in rows]).T
    left = ((waited - waited.mean()) ** 2).sum()
    return scene.drawn | {
        "requests": int(rows.size),
        "wait_s": round(float(waited.mean()), 1),
        "r2": round(float(1.0 - ((waited - mean_s) ** 2).sum() / left), 3),
        "r2_by_length": round(float(1.0 - ((waited - rule_s) ** 2).sum() / left), 3),
        "below_p90": round(float((waited <= p90_s).mean()), 3),
        "mean_excess": round(float(mean_s.mean() / waited.mean() - 1.0), 3),
    }


def run(seed: int, number: int | None) -> dict[str, Any]:
    """Return what `judged` does, by scene, and the means over them."""
    scenes = {str(at): judged(seed, at) for at in (range(SCENES) if number is None else [number])}
    each = list(scenes.values())
    return {"scenes": scenes, "seed": seed} | {
        "mean_r2": round(float(np.mean([one["r2"] for one in each])), 3),
        "mean_r2_by_length": round(float(np.mean([one["r2_by_length"] for one in each])), 3),
        "covered": sum(0.85 <= one["below_p90"] <= 0.95 for one in each),
    }
