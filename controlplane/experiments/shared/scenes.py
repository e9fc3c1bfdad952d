"""Served models, fleets and requests of experiments as scenarios, and the days of demand that several of them share."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from scheduling.fleet.profile import Profile
from scheduling.queueing.promises import Promise
from scheduling.queueing.release_rule import AT_ONCE
from scheduling.simulation.cluster.description import cluster_of
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import ProfileOf
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.generator import Burst, Client, LengthsByClass, Lognormal, generate

DAY_S = 86_400.0
INTERACTIVE, OTHER = "interactive", "non-interactive"
HERE = "here"
SILO = " (non-interactive)"
"""Suffix of a model's name for the pool of its other work, where pools are separate."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one instance serves it."""

    name: str
    profile: Profile
    kv_tokens: int
    max_num_seqs: int
    context_tokens: int
    gpu: str = "vm"
    batched_tokens: int = 2048
    block_tokens: int = 16
    queue: str = "priority"
    prefix_caching: bool = False

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> "ServedModel":
        """Return the model that *table* of an experiment's file describes."""
        return cls(**{"name": name, **table, "profile": Profile(*table["profile"])})

    def group(self, **table: Any) -> dict[str, Any]:
        """Return a table `[[fleet]]` of one such instance, with the model itself under `served`; *table* overrides."""
        return {
            "served": self, "model": self.name, "regions": [HERE], "gpu": self.gpu, "instances": 1,
            "kv_tokens": self.kv_tokens, "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.batched_tokens, self.max_num_seqs),
            "block_size_tokens": self.block_tokens, "queue": self.queue, "prefix_caching": self.prefix_caching, **table,
        }  # fmt: skip

    def offload(self, memory_gb: float, link_gb_s: float, token_bytes: float) -> dict[str, Any]:
        """Return columns of its group for *memory_gb* of CPU memory behind a link; a link of 0: keep what fits the GPU."""
        if not link_gb_s:
            return {"prefix_caching": True}
        tokens, per_token_s = int(memory_gb * 1e9 / token_bytes), token_bytes / (link_gb_s * 1e9)
        return {"prefix_caching": True, "offload_tokens": tokens, "restore_s_per_token": per_token_s}

    def engine(self) -> EngineConfig:
        return cluster_of(scenario_of([self.group()])).instances[0].engine


def scenario_of(
    groups: Sequence[dict[str, Any]], *, deep: bool = False, policies: Mapping[str, Any] | None = None, **tables: Any
) -> Scenario:
    """Return a scenario with *groups*, those of `ServedModel.group`, *policies*, and further *tables*.

    As in the papers, waiting requests are not swept and are held for ever. *deep*: instances take everything at once.
    """
    profiles = {(group["model"], group["gpu"]): group["served"].profile for group in groups}
    values = {
        "sample_s": 0.0,
        "models": {group["model"]: {"context_tokens": group["served"].context_tokens} for group in groups},
        "gpus": {gpu: {} for _, gpu in profiles},
        "regions": {region: {} for group in groups for region in group["regions"]},
        "profiles": [ProfileOf.table(model, gpu, one) for (model, gpu), one in profiles.items()],
        "fleet": [
            {"takes_all": deep} | {name: value for name, value in group.items() if name != "served"} for group in groups
        ],
        "classes": {INTERACTIVE: {}},
        "policies": {"sweeps": False, "max_hold_s": 1e9, **(policies or {})},
        **tables,
    }  # fmt: skip
    return Scenario.model_validate(values)


def requests_of(
    arrival_s: ArrayLike, prompt: ArrayLike, output: ArrayLike, predicted: ArrayLike | None = None, *,
    models: Sequence[str], model: ArrayLike = 0, classes: Sequence[str] = (INTERACTIVE,), slo_class: ArrayLike = 0,
    **columns: Any,
) -> Workload:  # fmt: skip
    """Return requests of one tenant in one region; *model* and *slo_class* are numbers in *models* and *classes*.

    The true outputs stand in for *predicted* where there are none. *columns* are further ones of `Workload`.
    """
    arrivals = np.asarray(arrival_s, np.float64)

    def coded(codes: ArrayLike, names: Sequence[str]) -> Coded:
        return Coded(np.array(np.broadcast_to(codes, arrivals.shape), np.int16), list(names))

    return Workload(
        arrivals,
        np.asarray(prompt, np.int32),
        np.asarray(output, np.int32),
        coded(model, models),
        coded(0, [HERE]),
        coded(slo_class, classes),
        coded(0, ["tenant"]),
        predicted_tokens=np.asarray(output if predicted is None else predicted, np.int32),
        **columns,
    )


@dataclass(frozen=True, slots=True)
class Scene:
    """A fleet and its demand."""

    models: Sequence[ServedModel]
    regions: Mapping[str, float]
    """Hours by which the daily peak is later, by region."""
    clients: Sequence[Client]
    instances: int
    """Of each model in each region, lent out or not."""
    ready: int
    """Ready at the start."""
    silo: int
    """For work that is not interactive, where pools are separate."""
    min_instances: int
    max_instances: int
    usd_per_hour: float
    promises: Mapping[str, Promise]
    delays: Mapping[str, float]
    prediction_error: float = 0.0
    scale_by: str = "pressure"
    """`EndpointPolicy.scale_by`."""

    @property
    def streams(self) -> list[tuple[str, str]]:
        """(model, region) in the order of the fleet's endpoints."""
        return [(model.name, region) for model in self.models for region in self.regions]

    def demand(self, days: float, seed: int, bursts: Sequence[Burst] = ()) -> Workload:
        """Return the requests of *days* from midnight before a Monday."""
        return generate(self.clients, days * DAY_S, shifts_h=self.regions, bursts=bursts, seed=seed)

    def scenario(self, siloed: bool = False, deep: bool = False, release: str = AT_ONCE, **tables: Any) -> Scenario:
        """Return the fleet as a scenario with *tables*; *siloed*: separate pools for work that is not interactive;
        *deep* as in `scenario_of`, with PreServe's router; *release*: rule of the queue manager for that work.
        """
        groups = []
        for model in self.models:
            pools = {model.name: (self.ready, self.instances)}
            if siloed:
                pools = {
                    model.name: (self.ready, self.instances - self.silo),
                    model.name + SILO: (self.min_instances, self.silo),
                }
            for name, (most, count) in pools.items():
                ready = min(most, count)
                groups.append(model.group(model=name, regions=list(self.regions), instances=ready, spot=count - ready))
        latency_ms = {
            name: {to: ms for to, ms in LATENCY_MS.get(name, {}).items() if to in self.regions} for name in self.regions
        }
        other = {"kind": "non_interactive", "priority": 1} | ({} if release == AT_ONCE else {"deadline_s": DAY_S})
        classes = {INTERACTIVE: {}, OTHER: other}
        policies = {
            "ordering": "priority", "niw": {"by": release}, "scale_by": self.scale_by, "share_spot": not siloed,
            **({"routing": "preserve"} if deep else {}),
        }  # fmt: skip
        return scenario_of(
            groups, deep=deep, policies=policies,
            latency_ms=latency_ms, delays=dict(self.delays), classes=classes, **tables,
        )  # fmt: skip

    def requests(self, drawn: Workload, seed: int, siloed: bool = False) -> Workload:
        """Return *drawn* with lengths within contexts and predicted outputs; *siloed* as in `scenario`."""
        context = np.array([model.context_tokens for model in self.models], np.int64)
        own = [[model.name for model in self.models].index(name) for name in drawn.model.names]
        longest = context[own][drawn.model.codes]
        output = np.minimum(drawn.output_tokens, longest // 2)
        prompt = np.minimum(drawn.prompt_tokens, longest - output)
        predicted = output
        if self.prediction_error:
            random = np.random.default_rng([seed, 7])
            spread = np.exp(self.prediction_error * random.standard_normal(len(drawn), np.float32))
            predicted = np.clip(np.rint(output * spread), 1, longest - prompt)
        model = drawn.model
        if siloed:
            other = np.array([name == OTHER for name in drawn.slo_class.names])[drawn.slo_class.codes]
            names = [*model.names, *(name + SILO for name in model.names)]
            model = Coded((model.codes + len(model.names) * other).astype(np.int16), names)
        prompt, output, predicted = (tokens.astype(np.int32) for tokens in (prompt, output, predicted))
        return replace(drawn, model=model, prompt_tokens=prompt, output_tokens=output, predicted_tokens=predicted)

    def scaled(self, scale: float) -> "Scene":
        """Return the scene with *scale* times the demand, on the same fleet."""
        clients = [replace(client, requests_per_s=client.requests_per_s * scale) for client in self.clients]
        return replace(self, clients=clients)


DATA: Final = tomllib.loads((Path(__file__).parents[1] / "data" / "scenes.toml").read_text(encoding="utf-8"))
SAGESERVE_MODELS: Final = tuple(ServedModel.read(*each) for each in DATA["sageserve"]["models"].items())
LLAMA_2_7B: Final = ServedModel.read("llama-2-7b", DATA["preserve"]["models"]["llama-2-7b"])
USD_PER_HOUR: Final = 98.32
"""Of an eight-GPU VM, as section 7.3.1 counts it."""
REGIONS: Final = {name: each["later_h"] for name, each in DATA["regions"].items()}
LATENCY_MS: Final = {name: each["latency_ms"] for name, each in DATA["regions"].items() if "latency_ms" in each}
MIXED_A_DAY: Final = {INTERACTIVE: 1_400_000, OTHER: 200_000}
"""Requests of section 4."""
SHARES: Final = {name: each["share"] for name, each in DATA["regions"].items()}


def _lengths(prompt: Sequence[Any], output: Sequence[Any]) -> LengthsByClass:
    return LengthsByClass(Lognormal(*prompt), Lognormal(*output))


def _clients(demand: Mapping[str, Mapping[str, Any]]) -> list[Client]:
    """Three services with interactive work, the smaller the burstier, and one with batches, which is a fifth of it all."""
    clients = []
    for model, table in demand.items():
        lengths, rate = _lengths(table["prompt"], table["output"]), table["requests_per_s"]
        for tenant, (share, *course) in DATA["services"].items():
            clients.append(Client(tenant, model, INTERACTIVE, 0.8 * share * rate, lengths, SHARES, "gamma", *course))
        clients.append(Client("reports", model, OTHER, 0.2 * rate, lengths, SHARES, "gamma", 2.0))
    return clients


def sageserve(scale: float = 1.0) -> Scene:
    """Section 7.1, with demand that gives Llama-2 about the instance-hours of its figure 11."""
    scene = Scene(
        models=SAGESERVE_MODELS,
        regions=REGIONS,
        clients=_clients(DATA["sageserve"]["demand"]),
        instances=20,
        ready=4,
        silo=4,
        min_instances=2,
        max_instances=26,
        usd_per_hour=USD_PER_HOUR,
        promises={INTERACTIVE: Promise(ttft_s=2.0), OTHER: Promise(deadline_s=DAY_S)},
        delays={"spot_median_s": 60.0, "spot_max_s": 300.0, "local_weights_s": 600.0, "remote_weights_s": 7200.0},
        prediction_error=0.4,
    )
    return scene.scaled(scale)


def mixed(scale: float = 1.0) -> Scene:
    """Section 4: a weekday of 1.4 million interactive and 0.2 million other requests, the latter at a stable rate."""
    scene = sageserve()
    asked = dict.fromkeys(MIXED_A_DAY, 0.0)
    for one in scene.clients:
        asked[one.slo_class] += (
            DAY_S * one.requests_per_s * (1.0 if one.slo_class == OTHER else 7 / (5 + 2 * one.weekend))
        )
    clients = [
        replace(
            one,
            requests_per_s=one.requests_per_s * MIXED_A_DAY[one.slo_class] / asked[one.slo_class],
            daily_swing=0.0 if one.slo_class == OTHER else one.daily_swing,
            weekend=1.0 if one.slo_class == OTHER else one.weekend,
        )
        for one in scene.clients
    ]
    return replace(scene, clients=clients, max_instances=scene.instances).scaled(scale)


def published(scale: float = 1.0) -> Scene:
    """The same day with the KV memory and the sequences of the published simulator, by which use is memory as in the paper;
    and with four instances a model and region, fewer than the busiest model needs, so that models take each other's.
    """
    models = [replace(model, **DATA["published"]["models"][model.name]) for model in SAGESERVE_MODELS]
    return replace(mixed(scale), models=models, instances=4, ready=2, scale_by="memory")


def two_models(scale: float = 1.0) -> Scene:
    """Two of SageServe's models in two regions, on fleets small enough for arrivals of CV 2 to 4 to be felt."""
    scene = sageserve()
    regions = {region: REGIONS[region] for region in ("us-east", "us-west")}
    clients = _clients(DATA["two-models"]["demand"])
    return replace(
        scene,
        models=SAGESERVE_MODELS[:2],
        regions=regions,
        clients=[replace(client, regions={region: SHARES[region] for region in regions}) for client in clients],
        instances=16,
        min_instances=1,
        max_instances=20,
    ).scaled(scale)


def judged(kind: str, cv: float, regions: int, scale: float = 1.0) -> Scene:
    """A day of interactive work of one *kind*, whose arrivals have *cv*, in the first of SageServe's *regions*."""
    table, names = DATA["judged"][kind], list(REGIONS)[:regions]
    model = next(each for each in SAGESERVE_MODELS if each.name == table["model"])
    shares, rate = {name: SHARES[name] for name in names}, table["requests_per_s"]
    clients = [
        Client(
            f"callers {at}",
            model.name,
            INTERACTIVE,
            share * rate,
            _lengths(prompt, output),
            shares,
            "gamma",
            cv,
            *course,
        )
        for at, (share, *course, prompt, output) in enumerate(table["callers"])
    ]
    scene = replace(
        sageserve(), models=(model,), regions={name: REGIONS[name] for name in names}, clients=clients,
        instances=16, ready=2, min_instances=1, max_instances=16,
    )  # fmt: skip
    return scene.scaled(scale)


JUDGED: dict[str, Callable[[float], Scene]] = {
    f"{kind}-cv{cv}-{regions}r": partial(judged, kind, float(cv), regions)
    for kind in DATA["judged"]
    for cv in (1, 3)
    for regions in (1, 3)
}
"""By name; each is called with the scale of its demand."""


def preserve(service: str, scale: float = 1.0) -> Scene:
    """The *service* called code-like or chat-like: one endpoint, ups and downs by day, two kinds of callers."""
    table = DATA["preserve"][service]
    lengths, rate = _lengths(table["prompt"], table["output"]), table["requests_per_s"] * scale
    clients = [
        Client(f"callers {at}", LLAMA_2_7B.name, INTERACTIVE, share * rate, lengths, {HERE: 1.0}, "gamma", *course)
        for at, (share, *course) in enumerate(table["callers"])
    ]
    return Scene(
        models=(LLAMA_2_7B,),
        regions={"here": 0.0},
        clients=clients,
        instances=8,
        ready=2,
        silo=0,
        min_instances=1,
        max_instances=8,
        usd_per_hour=0.0,
        promises={INTERACTIVE: Promise()},
        # A cold start takes "dozens of seconds".
        delays={"spot_median_s": 40.0, "spot_max_s": 60.0},
        prediction_error=0.0,
    )
