"""Application runs in the demo's traffic: runs of the workload suite, marked by headers. What is no LLM call is slept, and
reported as a unit; a run that ends is closed."""

import asyncio
import itertools
import random
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson

from controlplane.gateway.replay.prompts import Prompts
from controlplane.gateway.replay.waves import Stream
from scheduling.applications.demand_graph import Step
from scheduling.applications.suite import MIX, SUITE

DUE_S = {"small": 120.0, "medium": 600.0}
"""Deadline of a run by the size of its application. Large ones are left out: a demo's instances would serve little else."""
LEAST_CONTEXT_TOKENS = 4096
MOST_OPEN_RUNS = 40
"""A gateway that hangs must not pile up runs here."""


@dataclass(frozen=True, slots=True)
class RunStream:
    """Runs sent to the endpoint of *stream*, the first after half a gap, Poisson with a mean gap of *every_s*."""

    stream: Stream
    every_s: float


def run_streams(sources: Sequence[Stream], every_s: float) -> list[RunStream]:
    """Return a stream of runs for each region of *sources*, to the first interactive one with room for the suite."""
    chosen: dict[str, Stream] = {}
    for stream in sources:
        fits = stream.context_tokens >= LEAST_CONTEXT_TOKENS and not stream.kind.embeds
        if stream.slo_class == "interactive" and fits:
            chosen.setdefault(stream.region, stream)
    return [RunStream(stream, every_s) for stream in chosen.values()]


class Post(Protocol):
    """Sends a body to a path with headers; returns whether it was answered."""

    def __call__(
        self,
        session: aiohttp.ClientSession,
        stream: Stream,
        data: bytes,
        headers: Mapping[str, str],
        path: str = "completions",
    ) -> Awaitable[bool]: ...


class RunSender:
    """Sender of runs, whose calls *post* sends."""

    def __init__(self, post: Post, seed: int) -> None:
        self.begun = self.ended = self._open = 0
        self._post, self._prompts = post, Prompts(seed)
        self._prefix, self._numbers = f"{time.time():.0f}", itertools.count(1)

    async def run(self, session: aiohttp.ClientSession, runs: RunStream, draw: random.Random) -> None:
        """Send runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            await asyncio.sleep(runs.every_s / 2)
            while True:
                if self._open < MOST_OPEN_RUNS:
                    group.create_task(self._one(session, runs.stream, draw))
                await asyncio.sleep(draw.expovariate(1 / runs.every_s))

    async def _one(self, session: aiohttp.ClientSession, stream: Stream, draw: random.Random) -> None:
        """Send one run: a step begins once the one before it has ended; a call that fails ends the run."""
        size = draw.choices(list(DUE_S), [MIX["small"], MIX["medium"]])[0]
        name = draw.choice([name for name, each in SUITE.items() if each.size == size])
        record = SUITE[name].run(np.random.default_rng(draw.getrandbits(63)))
        marks = {
            "X-Application": name,
            "X-Run": f"{name}-{self._prefix}-{next(self._numbers)}",
            "X-Run-Deadline": f"{DUE_S[size]:g}",
        }
        units, children = SUITE[name].backends(stream.model), record.children()
        self.begun += 1
        self._open += 1

        async def follow(at: int) -> bool:
            step = record.steps[at]
            backend = units[step.unit]
            if backend.kind == "llm":
                calls = (self._call(session, stream, step, marks) for _ in range(step.parallelism))
                if not all(await asyncio.gather(*calls)):
                    return False
            else:
                each = {"unit": step.unit, "kind": backend.kind, "backend": backend.name}
                executions = [each | {"id": f"{at}-{number}"} for number in range(step.parallelism)]
                for state, wait_s in (("running", step.duration_s), ("done", 0.0)):
                    for one in executions:
                        await self._report(session, stream, marks, "units", one | {"state": state})
                    await asyncio.sleep(wait_s)
            return all(await asyncio.gather(*map(follow, children[at])))

        first = [at for at, step in enumerate(record.steps) if step.parent < 0]
        try:
            done = all(await asyncio.gather(*map(follow, first)))
            await self._report(session, stream, marks, "close", {"outcome": "done" if done else "failed"})
            self.ended += done
        finally:
            self._open -= 1

    def _report(
        self, session: aiohttp.ClientSession, stream: Stream, marks: dict[str, str], what: str, said: dict[str, Any]
    ) -> Awaitable[bool]:
        """Say of a run what its tenant would."""
        body = orjson.dumps({"application": marks["X-Application"], **said})
        return self._post(session, stream, body, {}, f"runs/{marks['X-Run']}/{what}")

    def _call(
        self, session: aiohttp.ClientSession, stream: Stream, step: Step, marks: dict[str, str]
    ) -> Awaitable[bool]:
        """Send one call; those of a unit share their first tokens, as with a system prompt."""
        most = stream.context_tokens
        output_tokens = min(max(1, round(step.output_tokens)), most // 3)
        prompt_tokens = min(max(1, round(step.input_tokens)), most - output_tokens)
        system_prompt = zlib.crc32(f"{marks['X-Application']} {step.unit}".encode())
        ids = self._prompts.ids(prompt_tokens, (system_prompt,))
        data = b'{"model":%b,"prompt":[%b],"max_tokens":%d,"ignore_eos":true}' % (
            orjson.dumps(stream.model),
            ids,
            output_tokens,
        )
        return self._post(session, stream, data, {**marks, "X-Unit": step.unit})
