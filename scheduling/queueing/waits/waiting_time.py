"""The request waiting time (RWT) estimator of QLM (section 6, appendix A.1).

An endpoint or instance produces `Theta = B / (d eps)` output tokens a second (equation 15) with a batch of `B = KV
capacity / (mean prompt + mean output)` sequences (16), at most its `max_num_seqs`; *d* is the decode step of its
profile at that batch, *eps* the factor by which prefills lengthen it. A request waits until the tokens ahead of it are
produced (2); their sum is normally distributed (3, 19). Beyond the paper:

- Requests that still run at dispatch have not produced all their tokens. These, `E[O^2] / 2 E[O]` a sequence, do not
  count once so many requests wait that the batch forgets its start; in a shorter queue equation 2 holds, which is never
  too low.
- A request with fewer ahead than run waits for as many of these to end, not for all: an order statistic of their
  remaining time, if that is sooner. Equation 2 is then at least its 99th percentile.
- The mean output is estimated from m requests: its variance, `q^2 sigma^2 / m`, is added to `q sigma^2`, and exceeds it
  for q > m.
- Quantiles of parts of a queue do not add up. Means and variances do, and a quantile is taken once, of their sum.
- If memory limits the batch, each request ahead counts by the memory of its own prompt (`Lengths.weight`).
- Throughput is corrected by actual waits (`Correction`), and the remaining error is carried too.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from scheduling.compiled import compiled, uncompiled
from scheduling.fleet.profile import Profile

Z_P99: Final = 2.326
EXACT: Final = 1024
"""Most requests of a heap that are counted one by one; a longer heap is sampled evenly with as many."""
MEAN, VARIANCE, ERROR = range(3)
"""Columns of the expected output of a waiting request: mean and variance in tokens, and the standard error of the mean.
"""
EXPECTED_COLUMNS: Final = 3
FORGOTTEN_BATCHES: Final = 2.0
"""Batches after which a queue has forgotten most (1 - 1/e) of its first one; measured in the simulator."""
MOST_SHAPE: Final = 0.4
"""Upper bound on the generalised Pareto distribution's shape: outputs are bounded, whatever their variance."""


@compiled
def shape_of(squared: float) -> float:
    """Return the generalised Pareto distribution's shape for a variance of *squared* times mean²; never 0."""
    shape = min((1.0 - 1.0 / squared) / 2.0, MOST_SHAPE) if squared > 1e-3 else -500.0
    return shape if abs(shape) > 1e-12 else 1e-12


@compiled
def ahead(
    heap: NDArray[np.int32],
    size: int,
    key: NDArray[np.float64],
    sequence: NDArray[np.int64],
    expected: NDArray[np.float64],
    slot: int,
) -> tuple[float, float, float, float]:
    """Return (requests, mean, variance, error of the mean) of the output tokens ahead of *slot*, or of all that wait if
    it is -1.

    The first *size* entries of *heap* are the waiting slots; *key*, *sequence* and *expected* (slots x
    EXPECTED_COLUMNS) are by slot. Errors of means count as fully dependent, as those of one class are.
    """
    looked_at = min(size, EXACT)
    requests, mean, variance, error = 0.0, 0.0, 0.0, 0.0
    for index in range(looked_at):
        other = heap[index if size <= EXACT else index * size // looked_at]
        before = slot < 0 or key[other] < key[slot]
        if other != slot and (before or (key[other] == key[slot] and sequence[other] < sequence[slot])):
            requests += 1.0
            mean += expected[other, MEAN]
            variance += expected[other, VARIANCE]
            error += expected[other, ERROR]
    if size > EXACT:
        share = size / looked_at
        return requests * share, mean * share, variance * share, error * share
    return requests, mean, variance, error


@compiled
def waiting_time(
    requests: float,
    mean_tokens: float,
    variance_tokens: float,
    error_tokens: float,
    in_flight_tokens: float,
    sequences: float,
    output_mean: float,
    output_variance: float,
    batch: float,
    tokens_per_s: float,
    relative_variance: float,
) -> tuple[float, float]:
    """Return (mean, variance) of the seconds until a request with *requests* ahead is dispatched: (2) and (3),
    corrected.

    *in_flight_tokens* are still to be produced by the *sequences* that run; *relative_variance* is that of
    *tokens_per_s*. The correction grows to its full size with the queue, slowly enough that no request is expected to
    wait longer than one behind it.
    """
    residual = (output_mean + output_variance / output_mean) / 2.0
    forgotten = FORGOTTEN_BATCHES * batch * max(1.0, residual / output_mean)
    correction = (1.0 - math.exp(-requests / forgotten)) * max(batch - 1.0, 0.0) * residual
    tokens = max(mean_tokens + in_flight_tokens - correction, 0.0)
    mean_s = tokens / tokens_per_s
    variance_s2 = (variance_tokens + error_tokens * error_tokens) / (tokens_per_s * tokens_per_s)
    if requests + 1.0 <= sequences:
        # The generalised Pareto distribution keeps its shape with age, and the remaining time has a scale by its mean.
        shape = shape_of(output_variance / (output_mean * output_mean))
        scale_s = in_flight_tokens / tokens_per_s * (1.0 - shape)
        ended = (requests + 1.0) / (sequences + 1.0)
        first_s = scale_s * math.expm1(-shape * math.log1p(-ended)) / shape
        if first_s < mean_s:
            slope_s = scale_s * (1.0 - ended) ** (-shape - 1.0)
            # A batch that started at once ends later than one at a random point, but never later than equation 2.
            most_s = (mean_s - first_s) / Z_P99
            variance_s2 = max(slope_s * slope_s * ended * (1.0 - ended) / (sequences + 2.0), most_s * most_s)
            mean_s = first_s
    return mean_s, variance_s2 + mean_s * mean_s * relative_variance


@dataclass(frozen=True, slots=True)
class Wait:
    """A time as a normal distribution. Add consecutive times, then ask for a quantile."""

    mean_s: float = 0.0
    variance_s2: float = 0.0

    def then(self, other: "Wait") -> "Wait":
        """Return this wait followed by *other*, which is independent."""
        return Wait(self.mean_s + other.mean_s, self.variance_s2 + other.variance_s2)

    def quantile_s(self, z: float = Z_P99) -> float:
        """Return the quantile of the standard normal quantile *z*, at least 0."""
        return max(0.0, self.mean_s + z * math.sqrt(self.variance_s2))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated wait of a request, and the values for a later comparison."""

    endpoint: int
    position: int
    """In its queue, from 1."""
    wait: Wait | None = None
    """None while the pace there is unknown."""
    uncorrected_s: float | None = None
    """Mean by the profile alone, once lengths are known."""
    says_throughput: bool = False
    """The queue was long enough for its wait to show the throughput of the endpoint."""
    batch: float = 1.0
    serving: int = 0
    """Instances that served the endpoint at that time."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token lengths of the requests of a (model, SLO class), estimated from *samples* of them."""

    prompt_mean: float
    output_mean: float
    output_variance: float
    samples: float
    prompt_variance: float = 0.0

    @property
    def residual(self) -> float:
        """Return the mean output tokens left of a sequence at a random time, `E[O^2] / 2 E[O]`."""
        return (self.output_mean + self.output_variance / self.output_mean) / 2.0

    @property
    def growth(self) -> float:
        """Return the change of the mean tokens left per token produced: -1 for equal outputs, 0 for exponential ones.

        The mean residual life is taken as linear in the age, as for the generalised Pareto distribution with the same
        mean and variance.
        """
        squared = self.output_variance / self.output_mean**2
        return (squared - 1.0) / (squared + 1.0)

    @property
    def overrun(self) -> float:
        """Return the tokens of a sequence at a random time beyond `output_mean`, the mean of that distribution.

        Instances are given requests by their expected length, and hold that much more.
        """
        shape = uncompiled(shape_of)(self.output_variance / self.output_mean**2)
        power = math.exp((1.0 - shape) / shape * math.log1p(-shape))
        return self.output_mean * power / (1.0 - 2.0 * shape)

    def held(self, prompt_tokens: float) -> float:
        """Return the tokens in memory of a sequence with a prompt of *prompt_tokens*, at a random time."""
        return prompt_tokens + self.output_mean + self.overrun

    def weight(self, prompt_tokens: float) -> float:
        """Return the memory of a request with such a prompt, relative to the usual one.

        If memory limits the batch, the request displaces that many usual ones, so its tokens are multiplied by this.
        Equation 16 uses the mean of the queue, but its prompts are known.
        """
        return self.held(prompt_tokens) / self.held(self.prompt_mean)

    @property
    def error(self) -> float:
        """Return the standard error of `output_mean`, widened as Student's t at 99%: its variance is estimated."""
        widened = 1.0 + (Z_P99**2 + 1.0) / (4.0 * max(self.samples - 1.0, 1.0))
        return math.sqrt(self.output_variance / max(self.samples, 1.0)) * widened

    def in_flight(self, sequences: int, produced_tokens: int) -> float:
        """Return the tokens left of *sequences* that run and have together produced *produced_tokens*."""
        return max(0.0, sequences * self.output_mean + self.growth * produced_tokens)


UNKNOWN: Final = Lengths(256.0, 256.0, 256.0**2, 1.0)
"""Lengths before the first request has ended: as wide as an exponential distribution."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Speed of one or several instances of a model on a GPU type for requests of given lengths."""

    batch: float
    """B."""
    tokens_per_s: float
    """Theta."""
    relative_variance: float = 0.0
    """Variance of `tokens_per_s` over its square."""

    @classmethod
    def of(cls, profile: Profile, kv_capacity_tokens: int, max_num_seqs: int, lengths: Lengths) -> Self:
        """Return the throughput (equations 15 and 16) by the profile's step at batch B, sequences at random points."""
        held = lengths.held(lengths.prompt_mean)
        batch = min(float(max_num_seqs), max(1.0, kv_capacity_tokens / held)) if kv_capacity_tokens else max_num_seqs
        context = batch * (lengths.prompt_mean + lengths.residual)
        decode_s = profile.step_time_s(0, max(1, round(batch)), round(context))
        # A batch loses a share of its sequences per step, and as many prompts enter, spread over steps at random.
        prompts = batch / max(lengths.output_mean, 1.0)
        share = 1.0 - math.exp(-prompts)
        tokens = max(1, round(lengths.prompt_mean * prompts / share))
        squares = prompts / share * (lengths.prompt_variance + (1.0 + prompts) * lengths.prompt_mean**2)
        prefill_s = profile.step_time_s(tokens, 0, 0)
        prefill_s += profile.prefill_c_s_per_token2 * max(0.0, squares - tokens * tokens)
        step_s = decode_s + share * max(0.0, prefill_s - profile.decode_a_s)
        return cls(batch, batch / step_s)

    def corrected(self, factor: float, relative_variance: float) -> "Throughput":
        """Return the throughput if requests waited *factor* times as long as estimated."""
        return Throughput(self.batch, self.tokens_per_s / factor, relative_variance)

    def beside(self, other: "Throughput") -> "Throughput":
        """Return the combined throughput with *other* on one queue."""
        rate = self.tokens_per_s + other.tokens_per_s
        share = self.tokens_per_s / rate
        return Throughput(
            self.batch + other.batch,
            rate,
            share * self.relative_variance + (1.0 - share) * other.relative_variance,
        )


class Moments(Struct):
    """Exponentially weighted moments of (prompt, output, predicted output) tokens."""

    RATE: ClassVar[float] = 0.002

    weight: float = 0.0
    weight2: float = 0.0
    prompt: float = 0.0
    prompt2: float = 0.0
    output: float = 0.0
    output2: float = 0.0
    predicted: float = 0.0
    error2: float = 0.0

    def add(self, prompt: float, output: float, predicted: float) -> None:
        kept = 1.0 - self.RATE
        error = output - self.bias * predicted
        self.weight = self.weight * kept + 1.0
        self.weight2 = self.weight2 * kept * kept + 1.0
        step = 1.0 / self.weight
        self.prompt += (prompt - self.prompt) * step
        self.prompt2 += (prompt * prompt - self.prompt2) * step
        self.output += (output - self.output) * step
        self.output2 += (output * output - self.output2) * step
        self.predicted += (predicted - self.predicted) * step
        self.error2 += (error * error - self.error2) * step

    @property
    def bias(self) -> float:
        """Return the ratio of actual to predicted outputs."""
        return self.output / self.predicted if self.predicted > 0 else 1.0

    @property
    def samples(self) -> float:
        """Return the equivalent number of equally weighted requests."""
        return self.weight**2 / self.weight2 if self.weight2 else 0.0


Key = tuple[str, str]
"""Model and SLO class, "" for all."""


class History:
    """Lengths of finished requests by *key*, and the accuracy of their predictions."""

    FEW: Final = 8.0

    def __init__(self) -> None:
        self.moments: dict[Key, Moments] = {}

    def learn(self, key: Key, prompt_tokens: int, output_tokens: int, predicted_tokens: float) -> None:
        """Learn that a request of *key* had *output_tokens*, over all its sequences, with *predicted_tokens* expected."""
        moments = self.moments.get(key)
        if moments is None:
            moments = self.moments[key] = Moments()
        moments.add(prompt_tokens, output_tokens, predicted_tokens)

    def lengths(self, key: Key) -> Lengths:
        """Return the lengths of requests of *key*; with few of them, a value between those and `UNKNOWN`."""
        moments = self.moments.get(key)
        if moments is None:
            return UNKNOWN
        samples = moments.samples
        variance = max(moments.output2 - moments.output**2, 0.0)
        trust = min(1.0, samples / self.FEW)
        return Lengths(
            moments.prompt,
            max(moments.output, 1.0),
            trust * variance + (1.0 - trust) * max(moments.output, 1.0) ** 2,
            samples,
            max(moments.prompt2 - moments.prompt**2, 0.0),
        )

    def expected(self, key: Key, predicted_tokens: float) -> tuple[float, float, float]:
        """Return (mean, variance, error of the mean) of a request's output tokens, given *predicted_tokens*.

        By the mean of its class, or by the prediction corrected by the mean of earlier ones, whichever errs less.
        """
        moments = self.moments.get(key)
        if moments is None or moments.samples < self.FEW:
            return predicted_tokens, predicted_tokens**2, predicted_tokens
        lengths = self.lengths(key)
        if moments.error2 < lengths.output_variance:
            mean = moments.bias * predicted_tokens
            error = math.sqrt(moments.error2 / moments.samples) * predicted_tokens / moments.predicted
            return mean, moments.error2, error
        return lengths.output_mean, lengths.output_variance, lengths.error


def warm_up() -> None:
    """Compile or load the kernels that run live."""
    heap, numbers, integers = np.zeros(1, np.int32), np.zeros(1), np.zeros(1, np.int64)
    ahead(heap, 1, numbers, integers, np.zeros((1, EXPECTED_COLUMNS)), 0)
    waiting_time(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
