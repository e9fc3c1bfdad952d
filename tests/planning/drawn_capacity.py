"""Drawn fleets for capacity plans, of unsaved rows: models, GPU types, regions, and an hour of requests."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from controlplane.fleet.models import GpuType, Model, SloClass, SloKind
from controlplane.planning.sizing import offers as offering
from controlplane.planning.sizing import working
from controlplane.planning.sizing.demand import REQUESTS, WARM_UP_S, Demand, OfModel
from controlplane.planning.sizing.question import Question
from controlplane.planning.sizing.simulated import SimulatedFleet
from scheduling.fleet.profile_estimate import GPUS
from scheduling.planning.sizing import Sought

AT = datetime(2026, 3, 2, 12, tzinfo=UTC)
BILLIONS = (3, 8, 14, 32, 70)
PRICES = {"a100-80gb": 1.35, "h100-80gb": 2.95, "h200-141gb": 3.5, "l40s-48gb": 1.55, "b200-180gb": 5.5}


def drawn(seed: int, survives_loss: bool = False) -> tuple[Sought, SimulatedFleet]:
    """Return the question and the simulator of a fleet of two or three models, regions and GPU types."""
    random = np.random.default_rng(seed)
    regions = [f"region-{number}" for number in range(random.integers(2, 4))]
    names = random.choice(list(PRICES), random.integers(2, 4), replace=False)
    types = {name: (GpuType(name=name, memory_bytes=GPUS[name].memory_bytes), PRICES[name]) for name in names}
    chat = SloClass(name="interactive", kind=SloKind.INTERACTIVE, ttft_target_ms=1500, itl_target_ms=120, percentile=95)
    classes, streams, models = {chat.name: chat}, [], {}
    table: dict[tuple[str, str], Any] = {}
    for number, billion in enumerate(random.choice(BILLIONS, random.integers(2, 4), replace=False)):
        row = Model(name=f"model-{number}-{billion}b", weights_bytes=int(2e9 * billion), context_tokens=8192,
                    kv_bytes_per_token=int(32_768 * billion**0.6))  # fmt: skip
        own = models[row.name] = OfModel(classes={chat.name})
        for region in regions:
            prompts = random.lognormal(6, 0.9, 400).clip(8, 4000).astype(int)
            outputs = random.lognormal(5, 0.7, 400).clip(4, 1000).astype(int)
            per_s = float(random.uniform(2, 12) * (8 / billion) ** 0.5)
            own.prompt += prompts.tolist()
            own.output += outputs.tolist()
            own.interactive += [True] * outputs.size
            own.tokens_per_s[region] = per_s * float((prompts + outputs).mean())
            rows = [
                [(AT + timedelta(seconds=at)).isoformat(), row.name, region, chat.name, "acme", int(prompt), int(output),
                 int(prompt), int(output), False, "", "", "", "", "", None, None, "done", ""]
                for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]  # fmt: skip
            stream = {"model": row.name, "region": region, "rows": rows, "calls": 1.0, "gaps": [], "per_s": per_s}
            streams.append(stream)
        for name, (gpu_type, usd) in types.items():
            options = offering.options_of(row, gpu_type, None, [])
            table[row.name, name] = offering.offer(row, gpu_type, usd, options, own, classes)
    horizon_s = WARM_UP_S + REQUESTS / sum(stream["per_s"] for stream in streams)
    for stream in streams:
        rate = [stream.pop("per_s")]
        stream["requests_per_s"] = {"start_s": 0.0, "window_s": horizon_s, "mean": rate, "lower": rate, "upper": rate}
    demand = Demand({"kind": "forecast", "horizon_s": horizon_s, "streams": streams}, models, 1.0, [])
    able = [name for name in models if any(table[name, each].tokens_per_s for each in types)]
    question = Question(survives_loss=survives_loss)
    sought = working.sought_of(question, demand, able, regions, types, table, 0.8)
    by_place = [[table[name, each] for each in types] for name in able]
    present = {
        "models": {name: {"context_tokens": 8192} for name in able},
        "regions": {name: {} for name in regions},
        "latency_ms": {one: {other: 20.0 for other in regions if other != one} for one in regions},
        "classes": {chat.name: {"ttft_ms": 1500.0, "itl_ms": 120.0}},
        "endpoints": [], "demand": {"too_long": "clip"}, "sample_s": 0.0,
    }  # fmt: skip
    return sought, SimulatedFleet(sought, by_place, demand, classes, present)
