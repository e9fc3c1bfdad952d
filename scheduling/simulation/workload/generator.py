"""Synthetic demand: weeks of requests from clients whose rate has a daily and a weekly course, bursts and jitter.

A client's arrivals are a renewal process in *operational time* (in which one request is due each second) with Gamma or
Weibull gaps of a given coefficient of variation, carried to the clock by the inverse of the cumulated rate: the rate is
followed exactly and the burstiness is the same at any rate. That real clients are described by a rate and such a CV is
ServeGen's finding (2025); the times-eight bursts are SageServe's (section 7.3.4).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from scheduling.simulation.workload.columns import Coded, Codes, Floats, Ints, Workload

DAY_S, WEEK_S = 86_400.0, 604_800.0
RATE_STEP_S = 60.0
"""The rate is taken as constant over this step."""
Z95 = 1.6448536269514722  # the normal distribution's 95th percentile


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens by *median* and 95th percentile, rounded and held within *minimum* and *maximum*."""

    median: float
    p95: float
    minimum: int = 1
    maximum: int = 32_768

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.p95:
            raise ValueError(f"median must be above 0 and not above p95, not {self.median} and {self.p95}")
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum must be at least 1 and not above maximum, not {self.minimum} and {self.maximum}")

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        sigma = math.log(self.p95 / self.median) / Z95
        # Single precision: lengths are rounded to whole tokens, and this is half of the generator's time.
        lengths = random.standard_normal(count, np.float32)
        lengths *= sigma
        np.exp(lengths, out=lengths)
        lengths *= self.median
        return np.clip(np.rint(lengths, out=lengths), self.minimum, self.maximum).astype(np.int32)


@dataclass(frozen=True, slots=True)
class LengthsByClass:
    """Prompt and output lengths drawn independently."""

    prompt: Lognormal
    output: Lognormal

    def draw(self, random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        return self.prompt.draw(random, count), self.output.draw(random, count)


@dataclass(frozen=True, slots=True, eq=False)
class EmpiricalLengths:
    """Pairs of prompt and output lengths drawn from a trace, so that they stay correlated."""

    prompt_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        if self.prompt_tokens.size == 0 or self.prompt_tokens.size != self.output_tokens.size:
            raise ValueError("empirical lengths need as many prompts as outputs, and at least one")

    def draw(self, random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        chosen = random.integers(0, self.prompt_tokens.size, count)
        return self.prompt_tokens[chosen].astype(np.int32), self.output_tokens[chosen].astype(np.int32)


@dataclass(frozen=True, slots=True)
class Burst:
    """The rate of *models* (empty: all) is multiplied by *factor* for *duration_s* from *start_s*."""

    start_s: float
    duration_s: float
    factor: float = 8.0
    models: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.start_s < 0 or self.duration_s <= 0 or self.factor < 0:
            raise ValueError("a burst starts at 0 or later, lasts longer than 0 and has a factor of at least 0")


@dataclass(frozen=True, slots=True)
class Client:
    """One tenant's stream of requests for a model, from one or several regions."""

    tenant: str
    model: str
    slo_class: str
    requests_per_s: float
    """Mean over a week without bursts, all regions together."""
    lengths: LengthsByClass | EmpiricalLengths
    regions: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    """Share of each region; they are scaled to a sum of 1."""
    gaps: Literal["gamma", "weibull"] = "gamma"
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1 is a Poisson process, more is burstier."""
    daily_swing: float = 0.0
    """0 is flat; at 1 the rate falls to 0 opposite the peak."""
    peak_h: float = 14.0
    """Hour of the day of the peak, before the region's shift."""
    weekend: float = 1.0
    """Rate on days 6 and 7 of the week, times that of the others."""

    def __post_init__(self) -> None:
        if not self.requests_per_s > 0 or not math.isfinite(self.requests_per_s):
            raise ValueError(f"requests_per_s must be above 0, not {self.requests_per_s}")
        if not 0 < self.cv <= 20:
            raise ValueError(f"cv must be above 0 and at most 20, not {self.cv}")
        if not 0 <= self.daily_swing <= 1:
            raise ValueError(f"daily_swing must be from 0 to 1, not {self.daily_swing}")
        if self.weekend < 0:
            raise ValueError(f"weekend must be at least 0, not {self.weekend}")
        if not self.regions or min(self.regions.values()) < 0 or sum(self.regions.values()) <= 0:
            raise ValueError("regions must hold shares of at least 0 and one above 0")

    def rates(self, starts_s: Floats, shift_h: float) -> Floats:
        """Return requests per second at *starts_s* (seconds after Monday 0:00), the peak *shift_h* later."""
        angle = 2 * math.pi * (starts_s / DAY_S - (self.peak_h + shift_h) / 24)
        weekend = (starts_s % WEEK_S) >= 5 * DAY_S
        course = (1 + self.daily_swing * np.cos(angle)) * np.where(weekend, self.weekend, 1.0)
        return self.requests_per_s * course / ((5 + 2 * self.weekend) / 7)


def generate(
    clients: Sequence[Client],
    duration_s: float,
    *,
    shifts_h: Mapping[str, float] | None = None,
    bursts: Sequence[Burst] = (),
    seed: int = 0,
) -> Workload:
    """Return the requests of *clients* over *duration_s*, in order of arrival; *shifts_h* moves a region's daily peak
    later.

    The same arguments give the same requests; each client and region has a separate stream of random numbers, so adding
    a client leaves the others' requests unchanged. Raises ValueError without clients, or for a duration of 0.
    """
    if not clients:
        raise ValueError("there are no clients to generate requests for")
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s must be a finite number above 0, not {duration_s}")
    models = list(dict.fromkeys(client.model for client in clients))
    regions = list(dict.fromkeys(region for client in clients for region in client.regions))
    classes = list(dict.fromkeys(client.slo_class for client in clients))
    tenants = list(dict.fromkeys(client.tenant for client in clients))
    streams = [(client, region) for client in clients for region in client.regions]
    random = [np.random.default_rng([seed, 0, *key.encode()]) for key in _keys(streams)]
    arrivals = [
        _arrivals(client, region, duration_s, (shifts_h or {}).get(region, 0.0), bursts, source)
        for (client, region), source in zip(streams, random, strict=True)
    ]
    counts = np.array([times.size for times in arrivals])
    arrival_s = np.concatenate(arrivals)
    arrivals.clear()
    # Ties keep the order of the streams. Sorting positions in 32 bits halves the memory in addition to the arrays.
    order = np.argsort(arrival_s, kind="stable").astype(np.int32)
    arrival_s = arrival_s[order]
    prompts, outputs = np.empty(arrival_s.size, np.int32), np.empty(arrival_s.size, np.int32)
    starts = np.concatenate(([0], np.cumsum(counts)))
    for number, (client, _) in enumerate(streams):
        part = slice(starts[number], starts[number + 1])
        prompts[part], outputs[part] = client.lengths.draw(random[number], int(counts[number]))
    prompts, outputs = prompts[order], outputs[order]
    stream = np.repeat(np.arange(len(streams), dtype=np.int32), counts)[order]
    del order

    def column(names: list[str], of: Sequence[str], dtype: type[np.int16] | type[np.int32]) -> Coded:
        codes = np.array([names.index(name) for name in of], dtype)
        return Coded(cast(Codes, codes[stream]), names)

    return Workload(
        arrival_s,
        prompts,
        outputs,
        column(models, [client.model for client, _ in streams], np.int16),
        column(regions, [region for _, region in streams], np.int16),
        column(classes, [client.slo_class for client, _ in streams], np.int16),
        column(tenants, [client.tenant for client, _ in streams], np.int32),
    )


def _keys(streams: Sequence[tuple[Client, str]]) -> list[str]:
    """Return a name for each stream that stays the same when others are added; equal streams are numbered."""
    seen: dict[str, int] = {}
    keys = []
    for client, region in streams:
        key = f"{client.tenant}\0{client.model}\0{client.slo_class}\0{region}"
        seen[key] = seen.get(key, 0) + 1
        keys.append(f"{key}\0{seen[key]}")
    return keys


def _arrivals(
    client: Client,
    region: str,
    duration_s: float,
    shift_h: float,
    bursts: Sequence[Burst],
    random: np.random.Generator,
) -> Floats:
    """Return arrival times of one client in one region, in order."""
    edges = np.append(np.arange(0.0, duration_s, RATE_STEP_S), duration_s)
    # A burst starts and ends when it says, not at the next step.
    ends = [moment for burst in bursts for moment in (burst.start_s, burst.start_s + burst.duration_s)]
    edges = np.union1d(edges, [moment for moment in ends if moment < duration_s])
    starts = edges[:-1]
    share = client.regions[region] / sum(client.regions.values())
    rates = share * client.rates(starts + np.diff(edges) / 2, shift_h)
    for burst in bursts:
        if not burst.models or client.model in burst.models:
            rates[(starts >= burst.start_s) & (starts < burst.start_s + burst.duration_s)] *= burst.factor
    due = np.concatenate(([0.0], np.cumsum(rates * np.diff(edges))))
    moments: Floats = np.interp(_operational_times(client, float(due[-1]), random), due, edges)
    return moments


def _operational_times(client: Client, requests: float, random: np.random.Generator) -> Floats:
    """Return times of a renewal process with mean gap 1 and the client's CV, from 0 to *requests*."""
    # The first gap is cut at a random place: the process has been running before the simulation starts.
    moments: Floats
    parts: list[Floats] = []
    reached = -float(_gaps(client, 1, random)[0] * random.random())
    while reached < requests:
        missing = requests - reached
        gaps = _gaps(client, int(missing + 4 * client.cv * math.sqrt(missing)) + 16, random)
        moments = np.cumsum(gaps, out=gaps)
        moments += reached
        reached = float(moments[-1])
        parts.append(moments)
    moments = parts[0] if len(parts) == 1 else np.concatenate(parts)
    first, end = np.searchsorted(moments, [0.0, requests])
    return moments[first:end]


def _gaps(client: Client, count: int, random: np.random.Generator) -> Floats:
    gaps: Floats
    if client.gaps == "weibull":
        shape = weibull_shape(client.cv)
        gaps = random.weibull(shape, count)
        gaps /= math.gamma(1 + 1 / shape)
        return gaps
    if client.cv == 1.0:
        return random.standard_exponential(count)
    shape = client.cv**-2
    gaps = random.standard_gamma(shape, count)
    gaps /= shape
    return gaps


def weibull_shape(cv: float) -> float:
    """Return the shape of a Weibull distribution whose coefficient of variation is *cv*, by bisection."""
    low, high = 0.05, 100.0
    for _ in range(80):
        shape = math.sqrt(low * high)
        # CV falls as the shape grows; log-gamma, because gamma overflows for small shapes.
        squared = math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape))
        low, high = (shape, high) if squared > cv * cv else (low, shape)
    return math.sqrt(low * high)


def random_bursts(
    duration_s: float,
    count: int,
    length_s: float,
    *,
    factor: float = 8.0,
    models: frozenset[str] = frozenset(),
    seed: int,
) -> list[Burst]:
    """Return *count* bursts at random times of the first *duration_s* (SageServe 7.3.4: two, eight times the load)."""
    random = np.random.default_rng([seed, 1])
    latest_s = max(0.0, duration_s - length_s)
    starts: npt.NDArray[np.float64] = np.sort(random.uniform(0.0, latest_s, count))
    return [Burst(float(start), length_s, factor, models) for start in starts]
