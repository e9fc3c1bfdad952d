"""Served models, fleets and requests of experiments as scenarios, and the days of demand that several of them share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduling.fleet.profile import Profile
from scheduling.queueing.release_rule import AT_ONCE
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import Promise
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import ProfileOf
from scheduling.simulation.staging.fleet import cluster_of
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

    def group(self, **table: Any) -> dict[str, Any]:
        """Return a table `[[fleet]]` of one such instance, with the model itself under `served`; *table* overrides."""
        return {
            "served": self, "model": self.name, "regions": [HERE], "gpu": self.gpu, "instances": 1,
            "kv_tokens": self.kv_tokens, "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.batched_tokens, self.max_num_seqs),
            "block_size_tokens": self.block_tokens, "queue": self.queue, "prefix_caching": self.prefix_caching, **table,
        }  # fmt: skip

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
        policies = {"ordering": "priority", "niw": {"by": release}} | ({"routing": "preserve"} if deep else {})
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


# SageServe, section 7.1: four models, three regions, twenty instances of each, each on a VM with eight A100-80GB. Profiles
# are the fits of the Splitwise characterisation and of the tables published with SageServe (performance-models). The
# small ones were only measured on four GPUs. KV tokens follow from the models' own shapes and 90 % of the GPU memory:
# the published simulator counts eight times as many bytes a token for Llama-2-70B.
SAGESERVE_MODELS = (
    ServedModel(
        "llama-2-70b", Profile(0.0654, 0.0412, 9.597e-5, 1.09e-8, 0.0444, 2.37e-4, 2.49e-7), 1_460_000, 64, 4096
    ),
    ServedModel("bloom-176b", Profile(0.0, 0.0526, 2.251e-4, 2.33e-8, 0.0484, 3.99e-4, 3.22e-7), 66_000, 64, 4096),
    ServedModel(
        "llama-3.1-8b", Profile(0.0303, 0.0184, 5.573e-5, 7.87e-10, 0.0069, 2.03e-4, 6.6e-9), 2_200_000, 64, 8192
    ),
    ServedModel("llama-3.2-3b", Profile(0.0274, 0.0051, 4.5e-5, 1.1e-9, 0.0054, 1.26e-4, 0.0), 2_600_000, 64, 8192),
)
USD_PER_HOUR = 98.32
"""Of an eight-GPU VM, as section 7.3.1 counts it."""
REGIONS = {"us-east": 0.0, "us-central": 1.0, "us-west": 3.0}
LATENCY_MS = {"us-east": {"us-central": 30.0, "us-west": 60.0}, "us-central": {"us-west": 35.0}}
"""One way; the same back."""
MIXED_A_DAY = {INTERACTIVE: 1_400_000, OTHER: 200_000}
"""Requests of section 4."""
SHARES = {"us-east": 0.42, "us-central": 0.25, "us-west": 0.33}


def _clients(model: str, requests_per_s: float, prompt: Lognormal, output: Lognormal) -> list[Client]:
    """Three services with interactive work, the smaller the burstier, and one with batches, which is a fifth of it all."""
    lengths = LengthsByClass(prompt, output)
    services = (
        ("assistant", 0.5, (2.0, 0.75, 14.0, 0.45)), ("search", 0.3, (3.0, 0.6, 15.5, 0.7)),
        ("coding", 0.2, (4.0, 0.9, 11.0, 0.25)),
    )  # fmt: skip
    interactive = [
        Client(tenant, model, INTERACTIVE, 0.8 * share * requests_per_s, lengths, SHARES, "gamma", *course)
        for tenant, share, course in services
    ]
    return [*interactive, Client("reports", model, OTHER, 0.2 * requests_per_s, lengths, SHARES, "gamma", 2.0)]


def sageserve(scale: float = 1.0) -> Scene:
    """Section 7.1, with demand that gives Llama-2 about the instance-hours of its figure 11."""
    scene = Scene(
        models=SAGESERVE_MODELS,
        regions=REGIONS,
        clients=[
            *_clients("llama-2-70b", 9.0, Lognormal(1300, 3200, 16, 3500), Lognormal(280, 1000, 4, 1500)),
            *_clients("bloom-176b", 5.5, Lognormal(1300, 2800, 16, 3500), Lognormal(250, 800, 4, 1500)),
            *_clients("llama-3.1-8b", 3.0, Lognormal(1500, 5000, 16, 7000), Lognormal(250, 900, 4, 1500)),
            *_clients("llama-3.2-3b", 2.0, Lognormal(1200, 4000, 16, 7000), Lognormal(200, 700, 4, 1500)),
        ],
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


def two_models(scale: float = 1.0) -> Scene:
    """Two of SageServe's models in two regions, on fleets small enough for arrivals of CV 2 to 4 to be felt."""
    scene = sageserve()
    regions = {region: REGIONS[region] for region in ("us-east", "us-west")}
    clients = [
        *_clients("llama-2-70b", 7.0, Lognormal(1100, 3400, 16, 3500), Lognormal(220, 900, 4, 1500)),
        *_clients("bloom-176b", 3.5, Lognormal(900, 2600, 16, 3500), Lognormal(200, 700, 4, 1500)),
    ]
    return replace(
        scene,
        models=SAGESERVE_MODELS[:2],
        regions=regions,
        clients=[replace(client, regions={region: SHARES[region] for region in regions}) for client in clients],
        instances=16,
        min_instances=1,
        max_instances=20,
    ).scaled(scale)


# Days of one model on which strategies are judged. Lengths: medians and 95th percentiles of the Azure LLM inference traces
# of 2023, and of six of the busiest clients of ServeGen's m-large, whose shares are theirs.
AZURE = {
    "conversation": LengthsByClass(Lognormal(1020, 4083, 16, 3500), Lognormal(129, 451, 4, 1500)),
    "code": LengthsByClass(Lognormal(1469, 7303, 16, 3500), Lognormal(13, 90, 2, 500)),
}
SERVEGEN = (
    (0.44, LengthsByClass(Lognormal(834, 990), Lognormal(412, 500)), 0.2, 15.0),
    (0.17, LengthsByClass(Lognormal(627, 811), Lognormal(3, 8)), 0.8, 19.0),
    (0.15, LengthsByClass(Lognormal(580, 837), Lognormal(39, 90)), 0.2, 11.0),
    (0.12, LengthsByClass(Lognormal(63, 75), Lognormal(12, 44)), 0.2, 16.0),
    (0.06, LengthsByClass(Lognormal(2400, 2415), Lognormal(107, 138)), 0.6, 14.0),
    (0.06, LengthsByClass(Lognormal(980, 1004), Lognormal(60, 167)), 0.8, 20.0),
)
"""Share, lengths, swing by day and hour of the peak."""
JUDGED_MODEL = {"conversation": SAGESERVE_MODELS[0], "code": SAGESERVE_MODELS[1], "servegen": SAGESERVE_MODELS[0]}
JUDGED_RATES = {"conversation": 7.0, "code": 4.0, "servegen": 9.0}
"""Requests a second on average, with which peaks fill some six instances."""


def judged(kind: str, cv: float, regions: int, scale: float = 1.0) -> Scene:
    """A day of interactive work of one *kind*, whose arrivals have *cv*, in the first of SageServe's *regions*."""
    model, names = JUDGED_MODEL[kind], list(REGIONS)[:regions]
    course = ((0.5, 0.75, 14.0), (0.3, 0.6, 15.5), (0.2, 0.9, 11.0))
    parts = SERVEGEN if kind == "servegen" else [(share, AZURE[kind], swing, peak_h) for share, swing, peak_h in course]
    clients = [
        Client(
            f"callers {at}", model.name, INTERACTIVE, share * JUDGED_RATES[kind], lengths,
            {name: SHARES[name] for name in names}, "gamma", cv, swing, peak_h,
        )
        for at, (share, lengths, swing, peak_h) in enumerate(parts)
    ]  # fmt: skip
    scene = replace(
        sageserve(), models=(model,), regions={name: REGIONS[name] for name in names}, clients=clients,
        instances=16, ready=2, min_instances=1, max_instances=16,
    )  # fmt: skip
    return scene.scaled(scale)


JUDGED: dict[str, Callable[[float], Scene]] = {
    f"{kind}-cv{cv}-{regions}r": partial(judged, kind, float(cv), regions)
    for kind in JUDGED_RATES
    for cv in (1, 3)
    for regions in (1, 3)
}
"""By name; each is called with the scale of its demand."""


# PreServe, section 5.3: up to eight instances of Llama-2-7B, each on an A40. No published profile of this pair was at hand:
# prefill and the fixed part of a decode step are Vidur's matrix products (26.3 ms, 0.12 ms a token), and a step reads the
# keys and values of all tokens, 512 KiB each, at the 696 GB/s of the card. KV tokens: 90 % of the memory less the weights.
LLAMA_2_7B = ServedModel("llama-2-7b", Profile(0.0263, 0.0, 1.2e-4, 0.0, 0.0263, 1.2e-4, 7.5e-7), 43_000, 256, 4096)
PRESERVE_LENGTHS = {
    # As in the Azure traces: code has long prompts and short answers, chat the other way round.
    "code-like": LengthsByClass(Lognormal(1500, 3600, 16, 3600), Lognormal(20, 110, 2, 480)),
    "chat-like": LengthsByClass(Lognormal(700, 2600, 16, 3200), Lognormal(150, 480, 2, 800)),
}
PRESERVE_RATES = {"code-like": 9.0, "chat-like": 6.5}
"""Requests a second on average, with which the peaks fill about seven instances."""


def preserve(service: str, scale: float = 1.0) -> Scene:
    """The *service* called code-like or chat-like: one endpoint, ups and downs by day, three kinds of callers."""
    lengths, rate = PRESERVE_LENGTHS[service], PRESERVE_RATES[service] * scale
    course = ((0.7, 1.5, 0.8, 14.0), (0.3, 3.0, 0.5, 11.0))
    if service == "chat-like":
        course = ((0.7, 1.5, 0.6, 15.0), (0.3, 2.5, 0.4, 20.0))
    clients = [
        Client(
            f"callers {at}",
            LLAMA_2_7B.name,
            INTERACTIVE,
            share * rate,
            lengths,
            {HERE: 1.0},
            "gamma",
            cv,
            swing,
            peak_h,
        )
        for at, (share, cv, swing, peak_h) in enumerate(course)
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
