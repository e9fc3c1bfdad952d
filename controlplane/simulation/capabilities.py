"""Capability of an instance, measured once for all processes of a machine that need it at the same time.

A what-if has several futures with the same requests, and its runs start in several processes at once. A process reads the
measurements of others from files, and measures something else while another process measures one.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Final, TextIO

import numpy as np
from django.conf import settings

from controlplane.simulation.forecasts import MINUTE_S, DemandMinutes
from scheduling.compiled import ROOT, source_digest
from scheduling.planning import simulated_capability as measuring
from scheduling.planning.bursts import POISSON_CV, arrival_cv
from scheduling.planning.capacity import MEASURED, Capability
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import Stage
from scheduling.simulation.staging.fleet import gpus_as_type

logger = logging.getLogger(__name__)

FOLDER: Final = "capabilities"
"""In the state folder."""
KEPT_S: Final = 3600.0
"""Seconds until a file is deleted, since other requests have come."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All inputs of a measured capability."""

    engine: EngineConfig
    prompt_tokens: bytes
    """int32"""
    output_tokens: bytes
    promise: Promise
    percentile: float
    cv: float
    sizes: tuple[int, ...]
    most_above: float

    def made(self) -> Capability:
        """Measure it by simulation, in a tenth of a second or more."""
        prompts, outputs = (np.frombuffer(each, np.int32) for each in (self.prompt_tokens, self.output_tokens))
        return measuring.simulated_capability(
            self.engine,
            prompts,
            outputs,
            self.promise,
            percentile=self.percentile,
            cv=self.cv,
            sizes=self.sizes,
            most_above=self.most_above,
        )

    @property
    def name(self) -> str:
        """Return a digest of it and of the measuring code."""
        digest = hashlib.sha256(_code().encode())
        for tokens in (self.prompt_tokens, self.output_tokens):
            digest.update(hashlib.sha256(tokens).digest())
        rest = (self.engine, self.promise, self.percentile, self.cv, self.sizes, self.most_above)
        digest.update(repr(rest).encode())
        return digest.hexdigest()


@cache
def _code() -> str:
    return f"{np.__version__} {source_digest(Path(measuring.__file__), ROOT)}"


def capabilities(scenario: Scenario, staged: Stage) -> dict[tuple[str, str], Capability]:
    """Return capability by (model, GPUs of an instance): the scenario's, else simulated from the profile as live.

    Simulated for the lengths of the recent requests, or else the future ones, the strictest interactive promise, and the
    arrivals of the burstiest endpoint.
    """
    given = {(one.model, gpus_as_type(one.gpu, one.tensor_parallel)): one for one in scenario.capabilities}
    requests, cluster = staged.recent or staged.requests, staged.cluster
    promise, percentile = measuring.strictest(
        (one.ttft_ms, one.itl_ms, one.e2e_ms, one.percentile)
        for one in scenario.classes.values()
        if one.kind == "interactive"
    )
    minutes = int(requests.arrival_s[-1] // MINUTE_S) + 1
    shown = [at for at, one in enumerate(scenario.classes.values()) if one.kind == "interactive"]
    asked = DemandMinutes.of(cluster, requests, shown, minutes)
    endpoints = cluster.endpoints
    known: dict[tuple[str, str], Capability] = {}
    wanted: dict[tuple[str, str], Measurement] = {}
    for key, engine in cluster.engines().items():
        if (one := given.get(key)) is not None:
            prompt, output = (
                inf if limit is None else limit for limit in (one.prompt_tokens_per_s, one.output_tokens_per_s)
            )
            known[key] = Capability(prompt, output, one.total_tokens_per_s, MEASURED, note="as the scenario says")
            continue
        own = requests.model == cluster.models.index(key[0])
        if not own.any():
            continue
        cv = max(arrival_cv(asked.requests[at]) for at, (model, _) in enumerate(endpoints) if model == key[0])
        lengths = (requests.prompt_tokens[own].tobytes(), requests.output_tokens[own].tobytes())
        sizes = tuple(measuring.fleet_sizes(scenario.planner.capability_instances))
        most_above = scenario.planner.capability_most_above
        wanted[key] = Measurement(engine, *lengths, promise, percentile, max(POISSON_CV, cv), sizes, most_above)
    made = _of_process(tuple(wanted.values()))
    return known | dict(zip(wanted, made, strict=True))


@lru_cache(maxsize=8)
def _of_process(wanted: tuple[Measurement, ...]) -> list[Capability]:
    """Return the capabilities of *wanted*, in order, cached for the futures of a what-if, which have the same requests."""
    made = measured({one.name: one for one in wanted}, Path(settings.STATE_DIR) / FOLDER)
    return [made[one.name] for one in wanted]


def measured(wanted: Mapping[str, Measurement], folder: Path) -> dict[str, Capability]:
    """Return each of *wanted*, by name: read from its file in *folder*, else measured and written there.

    A measurement that another process makes is left to it, and read, or made, in the end. Without a writable folder all
    are made here.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _forget(folder)
        at_first = {name: _unless_busy(one, folder / name) for name, one in wanted.items()}
        return {name: made or _once_free(wanted[name], folder / name) for name, made in at_first.items()}
    except OSError as error:
        logger.warning("capabilities are not shared: %s", error)
        return {name: one.made() for name, one in wanted.items()}


def _unless_busy(one: Measurement, path: Path) -> Capability | None:
    """Return the capability in the file *path*, written if missing; None while another process measures it."""
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return _read(file) or _written(one.made(), file)


def _once_free(one: Measurement, path: Path) -> Capability:
    """Return the same once no other process measures it; its lock ends with it."""
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _read(file) or _written(one.made(), file)


def _read(file: TextIO) -> Capability | None:
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError):
        return Capability(**json.load(file))
    return None


def _written(made: Capability, file: TextIO) -> Capability:
    file.truncate(0)
    json.dump(asdict(made), file)
    return made


def _forget(folder: Path) -> None:
    oldest_s = time.time() - KEPT_S
    for path in folder.iterdir():
        if path.stat().st_mtime < oldest_s:
            path.unlink(missing_ok=True)
