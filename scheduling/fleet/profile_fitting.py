"""Fitting a profile to measurements, with its error on unseen settings.

The form is that of `scheduling.fleet.profile`: prefill `max(t0, a + b·p + c·p²)`, decode `a + b·batch + c·context`.
The fit minimises the mean *relative* error (steps range over three orders of magnitude, and capacity follows the
ratio) with b and c at least 0: iteratively reweighted least squares for the least absolute deviation, with a scan
over the end of the prefill floor.

Held-out errors leave out whole configurations (a fifth of them, twenty times): repeats of one configuration agree so
well that leaving out rows would only measure repeatability.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from scheduling.fleet.pooling_profile import profile_of_prefills
from scheduling.fleet.profile import Profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FLOOR_CANDIDATES = 12
REWEIGHTINGS = 10
HELD_OUT_DRAWS = 20
HELD_OUT_SHARE = 0.2


class TooFewPoints(ValueError):
    """The points do not determine the coefficients; says which and how many there are."""


@dataclass(frozen=True, slots=True)
class PrefillPoints:
    """Measured prefills: *tokens* in the step and its *seconds*; *configuration* is equal for repeats of one setting."""

    tokens: Floats
    seconds: Floats
    configuration: Ints


@dataclass(frozen=True, slots=True)
class DecodePoints:
    """Measured times between tokens, in *seconds*.

    *prefill_share* of the steps also had a prefill of *prefill_tokens* (0 if decoding was undisturbed): such a step
    takes the prefill's time plus the marginal cost of decoding.
    """

    batch: Floats
    context_tokens: Floats
    """Summed over the batch."""
    seconds: Floats
    prefill_share: Floats
    prefill_tokens: Floats
    configuration: Ints


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Key of a profile; *variant* is what else distinguishes series, such as engine and precision."""

    model: str
    gpu_type: str
    tensor_parallel: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.model} on {self.tensor_parallel} x {self.gpu_type}" + (
            f" ({self.variant})" if self.variant else ""
        )


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one setting."""

    setting: Setting
    prefill: PrefillPoints
    decode: DecodePoints | None
    """None for a model that pools, which never decodes."""


@dataclass(frozen=True, slots=True)
class Error:
    """Absolute relative errors in percent: mean over the points fitted, mean and median over held-out configurations."""

    fitted_pct: float
    held_out_pct: float | None = None
    """None: too few configurations to leave any out."""
    held_out_median_pct: float | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted profile, its points, configurations and error. Published coefficients have no points."""

    setting: Setting
    profile: Profile
    points: int = 0
    configurations: int = 0
    prefill_error: Error | None = None
    decode_error: Error | None = None
    decodes: bool = True
    """False for a model that pools: its profile's decode steps are not measured, and never run."""


def predict_prefill_s(profile: Profile, tokens: Floats) -> Floats:
    """Return the seconds of prefill steps of *tokens*."""
    curve = (
        profile.prefill_a_s + profile.prefill_b_s_per_token * tokens + profile.prefill_c_s_per_token2 * tokens * tokens
    )
    return np.maximum(profile.prefill_t0_s, curve)


def predict_decode_s(profile: Profile, points: DecodePoints) -> Floats:
    """Return the seconds between two tokens at *points*: the mean over steps with and without a prefill."""
    return (
        (1 - points.prefill_share) * profile.decode_a_s
        + points.prefill_share * predict_prefill_s(profile, points.prefill_tokens)
        + profile.decode_b_s_per_sequence * points.batch
        + profile.decode_c_s_per_token * points.context_tokens
    )


def fit(measurements: Measurements, *, seed: int = 0) -> Fit:
    """Return the profile of *measurements* with its errors; *seed* selects the held-out configurations.

    Raise TooFewPoints if fewer than two prompt lengths were measured, or no decode step of a model that decodes, and
    ValueError if the points give an impossible profile.
    """
    profile = _fit_profile(measurements)
    configurations = _configurations(measurements)
    held_prefill: list[Floats] = []
    held_decode: list[Floats] = []
    for held in _draws(configurations, seed):
        try:
            without = _fit_profile(_select(measurements, held, keep=False))
        except ValueError:
            continue  # the remaining points do not determine a profile
        only = _select(measurements, held, keep=True)
        held_prefill.append(_prefill_errors(without, only.prefill))
        if only.decode is not None:
            held_decode.append(_decode_errors(without, only.decode))
    decode = measurements.decode
    return Fit(
        measurements.setting,
        profile,
        measurements.prefill.seconds.size + (0 if decode is None else decode.seconds.size),
        configurations.size,
        _error(_prefill_errors(profile, measurements.prefill), held_prefill),
        None if decode is None else _error(_decode_errors(profile, decode), held_decode),
        decodes=decode is not None,
    )


def _fit_profile(measurements: Measurements) -> Profile:
    t0, a, b, c = _fit_prefill(measurements.prefill)
    if measurements.decode is None:
        return profile_of_prefills(t0, a, b, c)
    # The decode part does not enter predict_prefill_s: any valid one will do until it is fitted.
    profile = Profile(t0, a, b, c, 1.0, 0.0, 0.0)
    decode_a, decode_b, decode_c = _fit_decode(measurements.decode, profile)
    return replace(profile, decode_a_s=decode_a, decode_b_s_per_sequence=decode_b, decode_c_s_per_token=decode_c)


def _fit_prefill(points: PrefillPoints) -> tuple[float, float, float, float]:
    """Return (t0, a, b, c). The floor holds for the shortest prompts: every possible end of it is tried."""
    lengths = np.unique(points.tokens)
    if lengths.size < 2:
        raise TooFewPoints(f"prefill was measured at {lengths.size} prompt length(s); at least 2 are needed")
    best: tuple[float, float, float, float] | None = None
    best_error = np.inf
    # At least two lengths must lie beyond the floor to determine the slope.
    ends = np.unique(np.linspace(0, lengths.size - 2, min(FLOOR_CANDIDATES, lengths.size - 1)).astype(int))
    for end in ends:
        above = points.tokens >= lengths[end]
        t0 = float(np.median(points.seconds[~above])) if end else 0.0
        columns = [np.ones(int(above.sum())), points.tokens[above], points.tokens[above] ** 2]
        # Two lengths determine a line, not a parabola.
        a, b, c = _least_relative(columns[: min(3, lengths.size - end)], points.seconds[above], free=1)
        if t0 == 0.0 and a <= 0.0:
            # Below the shortest measured prompt the curve would reach 0: it stays at that prompt's time.
            t0 = float(a + b * lengths[0] + c * lengths[0] ** 2)
        if t0 <= 0.0 and a <= 0.0:
            continue
        predicted = np.maximum(t0, a + b * points.tokens + c * points.tokens**2)
        error = float(np.mean(np.abs(predicted / points.seconds - 1)))
        if error < best_error * (1 - 1e-9):
            best, best_error = (t0, a, b, c), error
    if best is None:
        raise TooFewPoints("the prefill points do not grow with the prompt: no curve above 0 goes through them")
    return best


def _fit_decode(points: DecodePoints, profile: Profile) -> tuple[float, float, float]:
    """Return (a, b, c), all at least 0, a above 0, without the same step's prefill as *profile* predicts it."""
    if points.seconds.size == 0:
        raise TooFewPoints("no decode step was measured")
    disturbed_s = points.prefill_share * predict_prefill_s(profile, points.prefill_tokens)
    columns = [1 - points.prefill_share, points.batch, points.context_tokens]
    a, b, c = _least_relative(columns, points.seconds - disturbed_s, free=0, scale=points.seconds)
    if a <= 0.0:
        # The fixed part is lost in the noise (only large batches): keep an empty batch's step above no time.
        a = 0.01 * float(points.seconds.min())
    return a, b, c


def _least_relative(
    columns: list[Floats], values: Floats, *, free: int, scale: Floats | None = None
) -> tuple[float, float, float]:
    """Return three coefficients that minimise the mean of |columns·x - values| / scale;
    0 for columns that are not given.

    Coefficients from *free* on are at least 0. There are at most three, so every choice of zeros is tried.
    """
    scale = values if scale is None else scale
    # Unit columns: tokens squared are nine orders of magnitude above the constant.
    units = [float(np.max(np.abs(column))) or 1.0 for column in columns]
    matrix = np.stack([column / unit for column, unit in zip(columns, units, strict=True)], axis=1) / scale[:, None]
    target = values / scale
    best, best_error = np.zeros(3), np.inf
    for chosen in _choices(len(columns), free):
        part = matrix[:, chosen]
        x = _least_absolute(part, target)
        if any(value < 0 for index, value in zip(chosen, x, strict=True) if index >= free):
            continue
        error = float(np.mean(np.abs(part @ x - target)))
        if error < best_error * (1 - 1e-9):
            best_error = error
            best = np.zeros(3)
            for index, value in zip(chosen, x, strict=True):
                best[index] = value / units[index]
        if len(chosen) == len(columns):
            break  # no constraint is active: no other choice can be better
    return float(best[0]), float(best[1]), float(best[2])


def _choices(columns: int, free: int) -> Iterator[list[int]]:
    """Yield the sets of columns to use: all, then all but one, and so on; free ones are always in."""
    bound = range(free, columns)
    for count in range(len(bound), -1, -1):
        for chosen in combinations(bound, count):
            if free or chosen:
                yield [*range(free), *chosen]


def _least_absolute(matrix: Floats, target: Floats) -> Floats:
    """Return x that minimises the mean of |matrix·x - target|, by iteratively reweighted least squares."""
    weights = np.ones(target.size)
    x = np.zeros(matrix.shape[1])
    for _ in range(REWEIGHTINGS):
        weighted = matrix * weights[:, None]
        x = _solve(weighted.T @ matrix, weighted.T @ target)
        # Residuals under 0.1% count alike; otherwise an exact point would bind the curve for good.
        weights = 1 / np.maximum(np.abs(matrix @ x - target), 1e-3)
    return np.asarray(x, np.float64)


def _solve(squares: Floats, products: Floats) -> Floats:
    try:
        return np.asarray(np.linalg.solve(squares, products), np.float64)
    except np.linalg.LinAlgError:  # linearly dependent columns: take the smallest solution
        return np.asarray(np.linalg.pinv(squares, hermitian=True) @ products, np.float64)


def _configurations(measurements: Measurements) -> Ints:
    of_prefill = measurements.prefill.configuration
    return (
        np.unique(of_prefill)
        if measurements.decode is None
        else np.union1d(of_prefill, measurements.decode.configuration)
    )


def _draws(configurations: Ints, seed: int) -> Iterator[Ints]:
    """Return sets of configurations to hold out; none if there are fewer than five."""
    if configurations.size < 5:
        return
    draw = np.random.default_rng(seed)
    held = max(1, round(HELD_OUT_SHARE * configurations.size))
    for _ in range(HELD_OUT_DRAWS):
        yield draw.choice(configurations, held, replace=False)


def _select(measurements: Measurements, configurations: Ints, *, keep: bool) -> Measurements:
    prefill, decode = measurements.prefill, measurements.decode
    of_prefill = np.isin(prefill.configuration, configurations) == keep
    kept = PrefillPoints(prefill.tokens[of_prefill], prefill.seconds[of_prefill], prefill.configuration[of_prefill])
    if decode is None:
        return replace(measurements, prefill=kept)
    of_decode = np.isin(decode.configuration, configurations) == keep
    return replace(
        measurements,
        prefill=kept,
        decode=DecodePoints(
            decode.batch[of_decode],
            decode.context_tokens[of_decode],
            decode.seconds[of_decode],
            decode.prefill_share[of_decode],
            decode.prefill_tokens[of_decode],
            decode.configuration[of_decode],
        ),
    )


def _prefill_errors(profile: Profile, points: PrefillPoints) -> Floats:
    return np.abs(predict_prefill_s(profile, points.tokens) / points.seconds - 1)


def _decode_errors(profile: Profile, points: DecodePoints) -> Floats:
    return np.abs(predict_decode_s(profile, points) / points.seconds - 1)


def _error(fitted: Floats, held_out: list[Floats]) -> Error:
    pooled = np.concatenate(held_out) if held_out else np.empty(0)
    fitted_pct = 100 * float(np.mean(fitted))
    if not pooled.size:
        return Error(fitted_pct)
    return Error(fitted_pct, 100 * float(np.mean(pooled)), 100 * float(np.median(pooled)))
