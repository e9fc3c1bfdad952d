"""SageServe's evaluation (section 7): a week of four models in three regions under each strategy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from controlplane.experiments.advisors import HOUR_S, ByProgramme
from controlplane.experiments.capability import measured_capability
from controlplane.experiments.foreseen_demand import Floats, Foreseen, Told, Windows, foresee, windows
from controlplane.experiments.measured import Row, measure_run
from controlplane.experiments.scenes import DAY_S, INTERACTIVE, OTHER, Scene
from scheduling.scaling import FLOOR, Floor, Pilothouse, make_strategy
from scheduling.simulation.strategies import Bounds, Demand, run_strategy
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import Burst, random_bursts

WINDOW_S: Final = 600.0
HOUR_WINDOWS: Final = 6
OWN_EVERY: Final = 2
"""Windows from one of our own plans to the next."""
OWN_LOOK: Final = 5
"""Windows that our own forecasts look ahead."""
STRATEGIES: Final = ("reactive", "siloed", "lt_i", "lt_u", "lt_ua", "pilothouse", "foreknown")
"""`foreknown` is no strategy but what the others can be held against: LT-I every window, by the demand that will come."""
HISTORY_WEEKS: Final = 2
BURSTS_A_DAY: Final = 2
BURST_S: Final = 600.0
BURST_FACTOR: Final = 8.0

PAPER: Final = {
    "lt_i": {"instance_hours": -0.248},
    "lt_u": {"instance_hours": -0.182},
    "lt_ua": {"instance_hours": -0.228, "waste_hours": -0.70},
}
"""Change against reactive that the paper reports: figures 11 and 15, Llama-2 on a peak day."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of a reproduction share."""

    scene: Scene
    days: float
    seed: int
    workload: Workload
    paper_forecasts: Foreseen
    own_forecasts: Foreseen
    foreknown: Foreseen
    other_work: Windows
    capability_tokens_per_s: Floats


def prepare(
    scene: Scene, days: float, seed: int, bursts: bool, forecaster: str, own_forecaster: str, told: Told
) -> Setting:
    """Draw the demand, measure what instances serve, and forecast every hour and every window of it."""
    streams = scene.streams
    past: list[Windows] = []
    for week in range(HISTORY_WEEKS):
        told("drawing the demand", week, HISTORY_WEEKS + 1)
        drawn = scene.demand(7, seed + 1000 * (HISTORY_WEEKS - week))
        past.append(windows(drawn, streams, [INTERACTIVE], WINDOW_S, 7 * DAY_S))
    history = past[0]
    for more in past[1:]:
        history = history.after(more)
    told("drawing the demand", HISTORY_WEEKS, HISTORY_WEEKS + 1)
    workload = scene.demand(days, seed, burst_times(scene, days, seed) if bursts else ())
    actual = windows(workload, streams, [INTERACTIVE], WINDOW_S, days * DAY_S)
    capability = []
    for at, model in enumerate(scene.models):
        told("measuring what instances serve", at, len(scene.models))
        mix = [client for client in scene.clients if client.model == model.name]
        found = measured_capability(model.engine(), mix, ttft_s=scene.promises[INTERACTIVE].ttft_s, seed=seed)
        of_model = slice(at * len(scene.regions), (at + 1) * len(scene.regions))
        prompt, output = history.prompt[of_model].sum(), history.output[of_model].sum()
        capability.append(found.at(float(prompt / (prompt + output))))
    paper, own = (
        lambda done, total, name=name: told(f"forecasting by {name}", done, total)
        for name in (forecaster, own_forecaster)
    )
    hourly = foresee(forecaster, hour_peaks(history.total), hour_peaks(actual.total), HOUR_S, 1, 1, paper)
    closer = foresee(own_forecaster, history.total, actual.total, WINDOW_S, OWN_EVERY, OWN_LOOK, own)
    other = windows(workload, streams, [OTHER], WINDOW_S, days * DAY_S)
    known = actual.total.T[:, :, None]
    foreknown = Foreseen("foreknown", 1, WINDOW_S, known, known, 0.0)
    return Setting(scene, days, seed, workload, hourly, closer, foreknown, other, np.array(capability))


def hour_peaks(tokens_per_s: Floats) -> Floats:
    """The highest window of every hour, the last one also if it is not over: "the maximum TPS expected in the next hour"."""
    missing = -tokens_per_s.shape[1] % HOUR_WINDOWS
    whole = np.pad(tokens_per_s, ((0, 0), (0, missing)))
    return np.asarray(whole.reshape(whole.shape[0], -1, HOUR_WINDOWS).max(axis=2))


def burst_times(scene: Scene, days: float, seed: int) -> list[Burst]:
    """Two a day, of eight times the load, on every model (section 7.3.4)."""
    count = max(1, round(BURSTS_A_DAY * days))
    return random_bursts(days * DAY_S, count, BURST_S, factor=BURST_FACTOR, seed=seed)


def advisor(setting: Setting, strategy: str) -> ByProgramme:
    """The planner that *strategy* follows: SageServe's by the hour, or our own, closer and oftener."""
    scene = setting.scene
    theirs = ByProgramme(
        models=[model.name for model in scene.models],
        regions=list(scene.regions),
        foreseen=setting.paper_forecasts,
        other_work=setting.other_work,
        capability_tokens_per_s=setting.capability_tokens_per_s,
        capacity=scene.instances * len(scene.models),
        usd_per_hour=scene.usd_per_hour,
    )
    if strategy == "foreknown":
        return replace(theirs, foreseen=setting.foreknown, every_s=WINDOW_S, look_s=WINDOW_S)
    if strategy != "pilothouse":
        return theirs
    return replace(
        theirs,
        foreseen=setting.own_forecasts,
        every_s=OWN_EVERY * WINDOW_S,
        look_s=(OWN_EVERY + 1) * WINDOW_S,
        later_s=OWN_LOOK * WINDOW_S,
        upper=Pilothouse.plans_for.soon,
        later_upper=Pilothouse.plans_for.kept,
    )


def run(setting: Setting, names: Sequence[str], told: Told, floor: Floor | None = FLOOR) -> list[Row]:
    """Simulate the demand under each of *names*."""
    scene, rows = setting.scene, []
    promises = [scene.promises[INTERACTIVE], scene.promises[OTHER]]
    demand = None
    for name in names:
        cluster = scene.cluster(siloed=name == "siloed")
        requests = scene.requests(cluster, setting.workload, setting.seed)
        if name not in ("reactive", "siloed") and demand is None:
            demand = Demand(cluster, requests)
        began_s = time.monotonic()
        made = run_strategy(
            cluster,
            requests,
            make_strategy("lt_i" if name == "foreknown" else name),
            bounds=Bounds(scene.min_instances, scene.max_instances),
            floor=floor,
            advisor=None if name in ("reactive", "siloed") else advisor(setting, name),
            demand=demand,
            seed=setting.seed,
            until_s=setting.days * DAY_S,
            progress=partial(told, f"simulating {name}"),
        )
        row = measure_run(made, promises, scene.usd_per_hour, time.monotonic() - began_s)
        rows.append(replace(row, strategy=name))
    return rows


def against_reactive(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Change of hours, hours of the busiest model, waste and TTFT against `reactive`, by strategy; empty without that.

    None where reactive had none.
    """
    base = next((row for row in rows if row.strategy == "reactive"), None)
    if base is None:
        return {}
    busiest = next(iter(base.hours_by_model))

    def change(value: float, before: float) -> float | None:
        return round(value / before - 1, 4) if before > 1e-6 else None

    return {
        row.strategy: {
            "instance_hours": change(row.instance_hours, base.instance_hours),
            "busiest_hours": change(row.hours_by_model[busiest], base.hours_by_model[busiest]),
            "waste_hours": change(row.waste_hours, base.waste_hours),
            "ttft_p95_s": change(row.ttft_p95_s, base.ttft_p95_s),
        }
        for row in rows
        if row is not base
    }
