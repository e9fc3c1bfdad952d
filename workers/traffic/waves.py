"""The demo's traffic: days of a few minutes that reach one region after another, with bursts, jobs and application runs.

It is synthetic; a real load is sent with `manage.py replay`. Each (model, region, class) is a Poisson process whose rate
follows a wave; everything is drawn from one seed.
"""

import asyncio
import itertools
import logging
import math
import random
import time
import zlib
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from scheduling.applications.demand_graph import Step
from scheduling.applications.suite import MIX, SUITE
from workers.traffic.prompts import Instructions, prompt_ids

logger = logging.getLogger(__name__)

DAY_S = 480.0
NIGHT = 0.25  # of the peak rate
BURST_EVERY_S, BURST_S, BURST_FACTOR = 240.0, 20.0, 3.0
JOB_FIRST_S, JOB_EVERY_S = 40.0, 360.0
MAX_OPEN, MAX_OPEN_RUNS = 600, 40  # a hanging gateway must not pile up requests here
QUIET_S, COMPLAIN_EVERY_S = 1.0, 10.0  # after a connection failure
CONTEXT_TOKENS = 4096
LONGER_PROMPTS, LONGER_OUTPUTS = 0.6, 0.5  # exponents of the ratio of the context to it
SPREAD = 0.6  # sigma of the logarithm of lengths
RUN_EVERY_S = 40.0
DUE_S = {"small": 120.0, "medium": 600.0}
"""Deadline of a run by the size of its application; large ones would fill the demo's instances."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one SLO class: peak rate per model and region, median lengths, share that is streamed.

    Lengths are for a context of `CONTEXT_TOKENS`; a model with a longer one gets longer work. Requests without output
    are embeddings of up to *texts* texts, as long for any context.
    """

    peak_per_s: float
    prompt_tokens: int
    output_tokens: int
    streamed: float
    texts: int = 1

    @property
    def embeds(self) -> bool:
        return not self.output_tokens


KINDS = {
    "interactive": Kind(peak_per_s=0.7, prompt_tokens=500, output_tokens=120, streamed=0.6),
    "non-interactive": Kind(peak_per_s=0.6, prompt_tokens=1200, output_tokens=300, streamed=0.0),
    "opportunistic": Kind(peak_per_s=0.3, prompt_tokens=900, output_tokens=400, streamed=0.0),
}
EMBEDDINGS = {"interactive": Kind(peak_per_s=0.5, prompt_tokens=180, output_tokens=0, streamed=0.0, texts=8)}
"""Requests to models that embed."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One source of requests."""

    model: str
    region: str
    slo_class: str
    key: str
    context_tokens: int
    phase: float  # of the day, 0 to 1
    kind: Kind
    day_s: float = DAY_S
    share: float = 1.0  # of the kind's rate, sent by this tenant
    job: int = 0  # requests sent at once, every JOB_EVERY_S
    runs: bool = False  # whether runs of applications are sent too

    def rate_per_s(self, now_s: float, burst: bool) -> float:
        """Return requests a second at *now_s*, seconds since 1970: days continue across a restart."""
        light = (1 + math.sin(2 * math.pi * (now_s / self.day_s + self.phase))) / 2
        peak_per_s = self.kind.peak_per_s * self.share
        return peak_per_s * (NIGHT + (1 - NIGHT) * light) * (BURST_FACTOR if burst else 1.0)


def streams(
    endpoints: Iterable[tuple[str, str, int]],
    keys: dict[str, str],
    day_s: float = DAY_S,
    kinds: Mapping[str, Kind] = KINDS,
) -> list[Stream]:
    """Return a stream for each (model, region, context tokens) of *endpoints* and each SLO class with a key in *keys*."""
    endpoints = sorted(endpoints)
    regions = sorted({region for _, region, _ in endpoints})
    return [
        Stream(model, region, slo_class, keys[slo_class], context, regions.index(region) / len(regions), kind, day_s)
        for model, region, context in endpoints
        for slo_class, kind in kinds.items()
        if slo_class in keys
    ]


class Waves:
    """Sender of every stream to *url* (ends in /v1) until cancelled, whatever happens to the gateway."""

    def __init__(self, url: str, sources: list[Stream], seed: int) -> None:
        self.url, self.sources, self.seed = url, sources, seed
        self.sent = self.done = self.runs_done = self._open = self._open_runs = 0
        self._instructions, self._ids = Instructions(seed), np.random.default_rng(seed)
        self._runs, self._begun = itertools.count(1), f"{time.time():.0f}"
        self._complained_s = -COMPLAIN_EVERY_S

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=600, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session,
            asyncio.TaskGroup() as self._group,
        ):
            for number, stream in enumerate(self.sources):
                flows = (self._flow, *(self._jobs,) * bool(stream.job), *(self._run_every,) * stream.runs)
                for flow in flows:
                    self._group.create_task(flow(stream, random.Random(f"{self.seed} {number} {flow.__name__}")))

    async def _flow(self, stream: Stream, draw: random.Random) -> None:
        """Poisson arrivals by thinning: draw at the highest possible rate, keep the share of the current rate."""
        clock = asyncio.get_running_loop().time
        highest = stream.kind.peak_per_s * stream.share * BURST_FACTOR
        burst_from_s = clock() + draw.expovariate(1 / BURST_EVERY_S)
        while True:
            await asyncio.sleep(draw.expovariate(highest))
            if clock() > burst_from_s + BURST_S:
                burst_from_s = clock() + draw.expovariate(1 / BURST_EVERY_S)
            if draw.random() * highest < stream.rate_per_s(time.time(), burst_from_s <= clock()):
                self._begin(stream, draw)

    async def _jobs(self, stream: Stream, draw: random.Random) -> None:
        await asyncio.sleep(JOB_FIRST_S + stream.phase * JOB_EVERY_S)
        while True:
            for _ in range(stream.job):
                self._begin(stream, draw)
            await asyncio.sleep(JOB_EVERY_S)

    def _begin(self, stream: Stream, draw: random.Random) -> None:
        """Send a request, unless too many are open."""
        if self._open < MAX_OPEN:
            self._open += 1
            path, body = self.call(stream, draw)
            self._group.create_task(self.post(stream, body, {}, path)).add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[bool]) -> None:
        self._open -= 1

    def call(self, stream: Stream, draw: random.Random) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request."""
        kind, most = stream.kind, stream.context_tokens
        if kind.embeds:
            lengths = [_length(draw, kind.prompt_tokens, most) for _ in range(draw.randint(1, kind.texts))]
            return "embeddings", {
                "model": stream.model,
                "input": [self._instructions.passage(each) for each in lengths],
            }
        prompt_tokens, output_tokens, most_output = requested_tokens(stream, draw)
        return "completions", {
            "stream": draw.random() < kind.streamed,
            "model": stream.model,
            "prompt": self._instructions.prompt(prompt_tokens, output_tokens, kind.streamed > 0),
            "max_tokens": most_output,
        }

    async def post(
        self, stream: Stream, body: dict[str, Any], headers: dict[str, str], path: str = "completions"
    ) -> bool:
        """Send *body* to *path* as *stream* with further *headers*; return whether it was answered."""
        own = {"Authorization": f"Bearer {stream.key}", "X-Region": stream.region, "X-SLO-Class": stream.slo_class}
        own |= {"Content-Type": "application/json", **headers}
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        self.sent += 1
        try:
            async with self._session.post(f"{self.url}/{path}", data=data, headers=own) as response:
                await response.read()
            if response.status in {401, 403}:
                self._complain(f"the gateway refuses demo traffic with {response.status}")
            self.done += response.status == 200
            return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._complain(f"the gateway does not answer ({type(error).__name__}); demo traffic keeps trying")
            await asyncio.sleep(QUIET_S)
            return False

    def _complain(self, text: str) -> None:
        """Log *text*, but not for every request."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("%s", text)

    async def _run_every(self, stream: Stream, draw: random.Random) -> None:
        """Send runs of applications, the first after half a gap."""
        await asyncio.sleep(RUN_EVERY_S / 2)
        while True:
            if self._open_runs < MAX_OPEN_RUNS:
                self._group.create_task(self._run(stream, draw))
            await asyncio.sleep(draw.expovariate(1 / RUN_EVERY_S))

    async def _run(self, stream: Stream, draw: random.Random) -> None:
        """Send one run of the suite: steps follow one another, what is no LLM call is slept and reported as a unit."""
        size = draw.choices(list(DUE_S), [MIX["small"], MIX["medium"]])[0]
        name = draw.choice([name for name, each in SUITE.items() if each.size == size])
        record = SUITE[name].run(np.random.default_rng(draw.getrandbits(63)))
        run = f"{name}-{self._begun}-{next(self._runs)}"
        marks = {"X-Application": name, "X-Run": run, "X-Run-Deadline": f"{DUE_S[size]:g}"}
        units, children = SUITE[name].backends(stream.model), record.children()

        def report(what: str, **values: Any) -> Coroutine[Any, Any, bool]:
            return self.post(stream, {"application": name, **values}, {}, f"runs/{run}/{what}")

        async def follow(at: int) -> bool:
            step = record.steps[at]
            backend = units[step.unit]
            if backend.kind == "llm":
                calls = (self._call(stream, step, marks) for _ in range(step.parallelism))
                if not all(await asyncio.gather(*calls)):
                    return False
            else:
                each = {"unit": step.unit, "kind": backend.kind, "backend": backend.name}
                for state, wait_s in (("running", step.duration_s), ("done", 0.0)):
                    for number in range(step.parallelism):
                        await report("units", **each, id=f"{at}-{number}", state=state)
                    await asyncio.sleep(wait_s)
            return all(await asyncio.gather(*map(follow, children[at])))

        self._open_runs += 1
        try:
            done = all(await asyncio.gather(*(follow(at) for at, step in enumerate(record.steps) if step.parent < 0)))
            await report("close", outcome="done" if done else "failed")
            self.runs_done += done
        finally:
            self._open_runs -= 1

    def _call(self, stream: Stream, step: Step, marks: dict[str, str]) -> Coroutine[Any, Any, bool]:
        """Send one call; those of a unit share their first tokens, as with a system prompt."""
        output_tokens = min(max(1, round(step.output_tokens)), stream.context_tokens // 3)
        prompt_tokens = min(max(1, round(step.input_tokens)), stream.context_tokens - output_tokens)
        ids = prompt_ids(self._ids, prompt_tokens, (zlib.crc32(f"{marks['X-Application']} {step.unit}".encode()),))
        body = {"model": stream.model, "prompt": ids, "max_tokens": output_tokens, "ignore_eos": True}
        return self.post(stream, body, {**marks, "X-Unit": step.unit})


def requested_tokens(stream: Stream, draw: random.Random) -> tuple[int, int, int]:
    """Return prompt tokens, requested output tokens and the output limit of one request of *stream*."""
    context, kind = stream.context_tokens, stream.kind
    longer = max(1.0, context / CONTEXT_TOKENS)
    output_tokens = _length(draw, kind.output_tokens * longer**LONGER_OUTPUTS, context // 3)
    prompt_tokens = _length(draw, kind.prompt_tokens * longer**LONGER_PROMPTS, context - output_tokens)
    return prompt_tokens, output_tokens, max(output_tokens, min(context // 3, context - prompt_tokens))


def _length(draw: random.Random, median: float, most: int) -> int:
    return min(max(1, round(draw.lognormvariate(math.log(median), SPREAD))), most)
