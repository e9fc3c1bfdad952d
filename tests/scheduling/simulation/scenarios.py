"""Random small fleets and traces on which the compiled engine must agree with the reference.

Times and coefficients are multiples of powers of two, so that sums are exact and ties, of which there are many, are ties for
both; or they are drawn at random, so that there are none.
"""

from dataclasses import dataclass

import numpy as np

from scheduling.profile import Profile
from scheduling.simulation.cluster import Batching, Cluster, InstanceSpec
from scheduling.simulation.engine import EngineConfig
from scheduling.simulation.requests import Requests, make_requests

KINDS = ("light", "memory", "overload", "priorities", "chunked", "mixed")


@dataclass(frozen=True)
class Scenario:
    cluster: Cluster
    requests: Requests
    seed: int
    kind: str


def scenario(kind: str, seed: int, *, prefix_caching: bool = False) -> Scenario:
    """The scenario of *kind* with *seed*: many seeds, many sizes."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    exact = bool(random.integers(2))

    def number(low: float, high: float) -> float:
        drawn = random.uniform(low, high)
        return round(drawn * 1024) / 1024 if exact else drawn

    def chance(share: float) -> bool:
        return bool(random.random() < share)

    def profile() -> Profile:
        return Profile(
            number(0, 0.5), number(-0.01, 0.5), number(0.002, 0.02), round(number(0, 2)) / 2**20 if chance(0.3) else 0.0,
            number(0.01, 0.6), number(0, 0.1), round(number(0, 3)) / 1024 if chance(0.7) else 0.0,
        )  # fmt: skip

    tight = kind in ("memory", "mixed") and chance(0.9)
    longest = 60 if tight else 200
    policy = "priority" if kind == "priorities" or chance(0.2) else "fcfs"
    profiles = [profile() for _ in range(2)]
    models = int(random.integers(1, 3))
    regions = int(random.integers(1, 4)) if kind in ("light", "mixed") else 1
    over = chance(0.5)

    def spec(model: int, region: int) -> InstanceSpec:
        block = int(random.choice([1, 2, 4, 5, 16]))
        seqs = int(random.integers(1, 12 if kind == "overload" else 8))
        spare = int(random.integers(0, 12)) if kind == "chunked" else int(random.integers(0, 100))
        blocks = -(-longest // block) + (int(random.integers(0, 8)) if tight else 1000)
        return InstanceSpec(
            f"m{model}",
            f"r{region}",
            EngineConfig(seqs, seqs + spare, block, blocks, policy, longest + 1, profiles[model % 2], prefix_caching),
            # The dispatcher may give more than the engine runs at once, or believe in more memory than there is.
            dispatch_max_num_seqs=int(random.integers(1, 20)) if over else None,
            dispatch_kv_tokens=blocks * block * int(random.integers(1, 4)) if over else None,
        )

    specs = [spec(m, r) for m in range(models) for r in range(regions) for _ in range(random.integers(1, 4))]
    ways = np.zeros((regions, regions))
    if chance(0.5):
        ways = np.array([[0.0 if a == b else number(0.01, 0.3) for b in range(regions)] for a in range(regions)])
    cluster = Cluster(
        specs,
        latency_s=ways,
        routing=str(random.choice(["round_robin", "least_request", "minimum_use", "join_shortest_queue"])),
        ordering=str(random.choice(["fcfs", "priority", "shortest", "deadline"])),
        batching=Batching("none") if kind == "light" and chance(0.2) else Batching(),
        queue_bound=int(random.integers(1, 10)) if kind == "overload" and chance(0.3) else None,
        threshold=float(random.choice([0.2, 0.7, 1.5])),
    )
    count = int(random.integers(1, 60))
    rate = {"light": 0.3, "memory": 4.0, "overload": 20.0}.get(kind, float(random.choice([0.5, 3.0, 20.0])))
    arrival_s = np.cumsum(random.exponential(1 / rate, count))
    if exact:
        arrival_s = np.floor(arrival_s * 4) / 4
    prompt = random.integers(1, longest // 2, count)
    output = np.minimum(random.geometric(1 / random.choice([2, 10, 25]), count), longest // 2)
    predicted = output if chance(0.3) else np.clip(output + random.integers(-15, 16, count), 1, None)
    return Scenario(
        cluster,
        make_requests(
            arrival_s,
            prompt,
            output,
            predicted_tokens=predicted,
            model=random.integers(0, models, count),
            region=random.integers(0, regions, count),
            priority=random.integers(-1, 2, count) if chance(0.7) else 0,
            deadline_s=random.integers(1, 9, count) * 1.0 if chance(0.5) else np.inf,
            prefix_blocks=[[]] * count if prefix_caching else None,
        ),
        seed,
        kind,
    )
