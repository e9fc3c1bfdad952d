"""Mixes of work on which nothing was chosen: the search of the global scheduler beside simple rules, evictions for all.

Lengths, profiles, promises and seeds are others than those of the paper's workloads. Arrivals are a renewal process with
gamma distributed gaps, of a coefficient of variation of 1 (Poisson) or more (bursts); an output is predicted with an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from controlplane.experiments.qlm.systems import Made, ends_per_s, nodes_of, one_model
from controlplane.experiments.qlm.workloads import LLAMA_NODE, MISTRAL_A10, MISTRAL_NODE, VICUNA_NODE, Tuned
from controlplane.experiments.shared.scenes import ServedModel
from scheduling.simulation.workload.requests import Requests, make_requests

ARRIVING_S: Final = 120.0
AT_ONCE: Final = 1000
"""Requests that all come together, to find what an instance ends in the long run."""
FIRST_SEED: Final = 900
PREDICTION_SPREAD: Final = 0.5
"""Standard deviation of the logarithm of predicted over true output."""
RULES: Final = ("fcfs", "sjf", "edf", "edf-per-queue", "edf-earliest-completion")
"""With evictions, in place of the search."""
OF_ONE_MODEL: Final = ("qlm", *(f"{rule}+evictions" for rule in RULES), "edf", "priority")
OF_SEVERAL: Final = ("qlm", *(f"{rule}+evictions" for rule in RULES), "edf", "edf-swapping")


@dataclass(frozen=True, slots=True)
class Mix:
    """Lognormal lengths (mean, standard deviation of the logarithm, most), promises by class and the class's share."""

    served: ServedModel
    prompt: tuple[float, float, int]
    output: tuple[float, float, int]
    slo_s: tuple[float, ...]
    shares: tuple[float, ...]
    models: tuple[Tuned, ...] = ()
    """That share the instances; none: *served* alone."""

    def requests(self, arrival_s: Any, random: np.random.Generator) -> Requests:
        """Requests at these moments."""
        count = arrival_s.size
        prompt, output = (
            np.clip(np.rint(mean * np.exp(spread * random.standard_normal(count) - spread**2 / 2)), 4, most)
            for mean, spread, most in (self.prompt, self.output)
        )
        slo_class = random.choice(len(self.shares), count, p=self.shares)
        noise = np.exp(PREDICTION_SPREAD * random.standard_normal(count))
        return make_requests(
            arrival_s,
            prompt.astype(np.int64),
            output.astype(np.int64),
            predicted_tokens=np.clip(np.rint(output * noise), 1, self.output[2]).astype(np.int64),
            model=random.integers(0, max(1, len(self.models)), count),
            slo_class=slo_class,
            priority=slo_class,
            deadline_s=np.array(self.slo_s)[slo_class],
        )


MIXES: Final = {
    "short answers": Mix(MISTRAL_A10, (700.0, 1.0, 3000), (150.0, 0.9, 900), (4.0, 30.0, 300.0), (0.5, 0.3, 0.2)),
    "long prompts": Mix(VICUNA_NODE, (1500.0, 0.7, 2500), (300.0, 0.6, 1200), (10.0, 45.0, 900.0), (0.4, 0.3, 0.3)),
    "three models": Mix(
        MISTRAL_NODE,
        (400.0, 0.9, 2000),
        (250.0, 0.8, 1500),
        (15.0, 60.0, 600.0),
        (0.3, 0.4, 0.3),
        (
            Tuned("first", MISTRAL_NODE, 0, 14.5),
            Tuned("second", VICUNA_NODE, 0, 26.0),
            Tuned("third", LLAMA_NODE, 0, 138.0),
        ),
    ),
}
INSTANCES: Final = {"short answers": 8, "long prompts": 3, "three models": 4}


def arrivals(per_s: float, variation: float, random: np.random.Generator) -> Any:
    """Moments within `ARRIVING_S`, of gaps with that coefficient of variation."""
    shape, count = variation**-2, int(2 * per_s * ARRIVING_S) + 200
    gaps = random.gamma(shape, 1.0 / (shape * per_s), count)
    moments = np.cumsum(gaps)
    return moments[moments < ARRIVING_S]


def full_per_s(mix: Mix, served: ServedModel) -> float:
    """Requests a second that an instance ends while it never runs out of work."""
    requests = mix.requests(np.zeros(AT_ONCE), np.random.default_rng(FIRST_SEED))
    return ends_per_s(served, requests._replace(model=requests.model * 0))


def mixes(
    names: Sequence[str], loads: Sequence[float], variations: Sequence[float], scale: float
) -> Iterator[tuple[str, str, float, Callable[[int], Made]]]:
    """What is varied, the system, requests a second, and from a seed to fleet and requests."""
    for name in names:
        mix, count = MIXES[name], max(1, round(INSTANCES[name] * scale))
        each = [full_per_s(mix, tuned.base) for tuned in mix.models] or [full_per_s(mix, mix.served)]
        rate = count * len(each) / sum(1.0 / per_s for per_s in each)
        for variation in variations:
            for load in loads:
                for system in OF_SEVERAL if mix.models else OF_ONE_MODEL:
                    yield (
                        f"{name}, load {load:g}, CV {variation:g}",
                        system,
                        load * rate,
                        partial(_made, mix, count, load * rate, variation, system),
                    )


def _made(mix: Mix, count: int, per_s: float, variation: float, system: str, seed: int) -> Made:
    random = np.random.default_rng([FIRST_SEED, seed])
    requests = mix.requests(arrivals(per_s, variation, random), random)
    if mix.models:
        return nodes_of(mix.models, count, system, requests)
    return one_model([(mix.served, "GPU")] * count, system, requests)
