"""Cost of a predicted length: the service alone on one core, at rest and at 200 requests a second, and in the
gateway.

Random prompts, median 64 tokens and up to a thousand, new to the cache unless noted, so that each reaches the trees;
`p50_ms` and `p99_ms` are of the whole service (text, cache, trees, calibration), one request after another. At 200 a
second arrivals are Poisson, and a request's time counts from its arrival. With --encoders the papers' length models are
measured instead (`_encoders`), on the public data in --data, and with --unseen the error for tenants that nothing was
learned of (`_unseen_tenants`). In the gateway, the service on (cache off) alternates
with off in one run.
"""

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

from forecasting.lengths.encoder import torch_threads
from tests.bench import _unseen_tenants
from tests.bench._encoders import KINDS, measured
from tests.bench._load import drive
from tests.bench.gateway import CHUNKS, KEY, free_port, process, seed, uvicorn

WORDS = (
    *("write", "explain", "list", "the", "a", "of", "to", "and", "for", "with", "short", "long", "detailed", "story"),
    *(
        "poem",
        "python",
        "function",
        "code",
        "table",
        "history",
        "summary",
        "translate",
        "sentence",
        "paragraph",
        "words",
    ),
    *("about", "lighthouse", "recipe", "email", "neighbour", "question", "answer", "compare", "difference", "between"),
    *(
        "steps",
        "plan",
        "budget",
        "travel",
        "garden",
        "weather",
        "music",
        "physics",
        "market",
        "team",
        "why",
        "how",
        "what",
    ),
)
RATE_PER_S = 200.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=4000, help="predicted one after another")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of 200 requests a second, and of each gateway's load"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the gateway with the service on and off, in turn")
    parser.add_argument("--encoders", action="store_true", help="measure length models on an encoder, and nothing else")
    parser.add_argument("--layers", type=int, default=0, help="of the encoders, from the first, beside all of them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="on an encoder, separated by commas")
    parser.add_argument("--unseen", action="store_true", help="measure errors for unseen tenants, and nothing else")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of public data sets, for these two")
    parser.add_argument("--alone", action="store_true", help="leave the gateway out")


def percentiles(times_ms: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(times_ms, [50, 99])
    return float(p50), float(p99)


def prompts(dice: random.Random) -> Iterator[str]:
    """Yield random prompts forever, all distinct: median 64 tokens, up to a thousand."""
    while True:
        count = int(min(800, 50 * dice.lognormvariate(0, 0.9)) + 5)
        yield f"{dice.getrandbits(40)} " + " ".join(dice.choices(WORDS, k=count))


def call_of(text: str) -> Any:
    import orjson

    from controlplane.gateway.admission.validation import Call, Kind

    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return Call.read(orjson.dumps(body), Kind.CHAT, max_depth=32)


async def alone(requests: int, seconds: float) -> dict[str, Any]:
    """Measure the service alone, on all cores of the process."""
    from controlplane.gateway.admission.validation import with_prompt
    from controlplane.gateway.process import COLLECT_AFTER
    from controlplane.lengths.length_service import LengthService
    from controlplane.lengths.models import BUNDLED
    from controlplane.lengths.services import Assigned
    from forecasting.lengths import LengthPrior, LengthQuery

    service = LengthService(LengthPrior())
    await service.answering.run(Assigned(BUNDLED, None))
    dice = random.Random(1)
    drawn = prompts(dice)
    calls = [call_of(next(drawn)) for _ in range(requests)]
    by_source: dict[str, list[float]] = {}

    async def predict(call: Any) -> float:
        began = time.perf_counter()
        query = LengthQuery("", call.prompt_characters // 4, "m", "t", "interactive")
        prediction = await service.predict(query, partial(with_prompt, call), call.prompt_characters)
        took_ms = (time.perf_counter() - began) * 1000
        by_source.setdefault(prediction.source, []).append(took_ms)
        service.learn(prediction, 1, dice.randint(1, 1000))
        return took_ms

    gc.collect()  # as the gateway does when it starts
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    for call in calls[:50]:
        await predict(call)
    by_source.clear()
    p50_ms, p99_ms = percentiles([await predict(call) for call in calls[50:]])
    for call in calls[-requests // 4 :]:
        await predict(call)  # seen before
    source = {name: len(times) for name, times in by_source.items()}
    split = {
        name: dict(zip(("p50_ms", "p99_ms"), percentiles(times), strict=True)) for name, times in by_source.items()
    }

    arrivals = np.cumsum(np.random.default_rng(2).exponential(1 / RATE_PER_S, int(seconds * RATE_PER_S)))
    calls = [call_of(next(drawn)) for _ in arrivals]
    waited_ms: list[float] = []

    async def arrive(call: Any, at_s: float) -> None:
        await predict(call)
        waited_ms.append((time.perf_counter() - at_s) * 1000)

    began, cpu_s = time.perf_counter(), time.process_time()
    running = []
    for call, at_s in zip(calls, arrivals.tolist(), strict=True):
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))  # up to a millisecond late, which is included
        running.append(asyncio.create_task(arrive(call, began + at_s)))
    await asyncio.gather(*running)
    at_rate = percentiles(waited_ms)
    (model,) = service.snapshot()["models"]
    result = {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "p50_ms_at_200rps": at_rate[0],
        "p99_ms_at_200rps": at_rate[1],
        "share_of_core_at_200rps": (time.process_time() - cpu_s) / (time.perf_counter() - began),
        "answered_by": source,
        "by_source": split,
        "late": service.late,
        "apart": model["own_process"],
    }
    await service.answering.stop()
    return result


async def in_subprocess(requests: int) -> dict[str, float]:
    """Measure the trees in a separate process."""
    from forecasting.lengths import LengthQuery
    from forecasting.lengths.predictor import SubprocessPredictor

    predictor = SubprocessPredictor()
    predictor.start()
    await asyncio.wait_for(predictor.up.wait(), 120)
    drawn, times_ms = prompts(random.Random(3)), []
    for _ in range(requests):
        text = next(drawn)
        began = time.perf_counter()
        await predictor.ask(LengthQuery(text, len(text) // 4, "m", "t"), 1.0)
        times_ms.append((time.perf_counter() - began) * 1000)
    await predictor.stop()
    return dict(zip(("p50_ms", "p99_ms"), percentiles(times_ms), strict=True))


def in_gateway(rounds: int, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of a whole request through the gateway, with the service on and off."""
    runs: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        ports = {name: free_port() for name in ("backend", "gateway")}
        environment = {
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PYTHONWARNINGS": "ignore",
            "PILOTHOUSE_LENGTH_CACHE_ENTRIES": "0",
        }
        backend = [sys.executable, "-m", "tests.bench._backend", str(ports["backend"]), str(CHUNKS)]
        with process(backend, ports["backend"], environment):
            seed(environment, {"m-0": f"http://127.0.0.1:{ports['backend']}"})
            for _ in range(rounds):
                for name, value in (("off", "0"), ("on", "1")):
                    server = uvicorn("controlplane.asgi:application", ports["gateway"])
                    with process(server, ports["gateway"], environment | {"PILOTHOUSE_LENGTHS": value}, wait_s=120.0):
                        time.sleep(1.5)  # the gateway reads its first heartbeat
                        uvloop.run(drive(ports["gateway"], KEY, connections=8, seconds=0.5))
                        load = drive(ports["gateway"], KEY, connections=1, seconds=seconds, most=3000)
                        runs[name].append(uvloop.run(load))
    medians = {
        name: SimpleNamespace(
            p50=statistics.median(one["p50_ms"] for one in of), p99=statistics.median(one["p99_ms"] for one in of)
        )
        for name, of in runs.items()
    }
    return {
        "gateway_p50_ms_on": medians["on"].p50,
        "gateway_p50_ms_off": medians["off"].p50,
        "gateway_p50_rise_ms": medians["on"].p50 - medians["off"].p50,
        "gateway_p99_rise_ms": medians["on"].p99 - medians["off"].p99,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.unseen:
        return _unseen_tenants.measured(options.data)
    if options.encoders:
        with torch_threads(1):
            return measured(options.data, options.layers, options.kinds.split(","))
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
        os.environ["PILOTHOUSE_SECRET_KEY"] = "bench"
        os.environ["PILOTHOUSE_STATE_DIR"] = folder
        import django

        django.setup()
        os.sched_setaffinity(0, {max(before)})
        try:
            result = uvloop.run(alone(options.requests, options.seconds))
            result["trees_apart"] = uvloop.run(in_subprocess(options.requests // 8))
        finally:
            os.sched_setaffinity(0, before)
        del os.environ["PILOTHOUSE_STATE_DIR"]
    if not options.alone:
        result |= in_gateway(options.rounds, min(options.seconds, 5.0))
    return result
