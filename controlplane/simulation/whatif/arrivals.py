"""Requests after a fork: drawn at the forecast level, or recorded ones.

Drawn requests are whole runs of the recent ledger and its other requests (bootstrap), at that ledger's gaps between these in
operational time: the rate is the forecast's, the burstiness the recent one. Each seed draws one level per stream from the
forecast band, so seeds differ in volume as well as timing. Runs that began before are drawn too, as far as their calls come
later. What a fallback served counts in the forecast of that, and is drawn as a request for the model that it asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.forecasts.demand import other_classes
from controlplane.planning.forecasts.selectors import latest_forecasts, windows_of
from controlplane.planning.models import Quantity
from controlplane.simulation.selectors import as_asked, fallbacks_of_targets, ledger_rows, own_rows, workload_of
from scheduling.fleet.state import RequestState, RunningRequest
from scheduling.queueing.running import OVERRUN_SHARE
from scheduling.routing.models import ModelRule
from scheduling.simulation.workload.columns import NO_REQUESTS, Workload
from scheduling.simulation.workload.edits import merged

RECENT: Final = timedelta(hours=1)
"""Period from which lengths, tenants and gaps are drawn."""
MAX_ROWS: Final = 4_000
"""Maximum rows drawn from, newest first, of all streams together."""
MIN_GAPS: Final = 20
"""With fewer gaps, burstiness is unknown and gaps are exponential."""
HALF_BAND_80: Final = 1.2816
"""Standard deviations from the mean of a normal distribution to the end of its 80% band."""
MAX_DEVIATIONS: Final = 1.96
"""Largest deviation of a drawn level from the mean, in standard deviations: the 95% band."""
PROBES: Final = 1_000
"""Moments at which a rate is evaluated."""
FORECAST_AGE: Final = timedelta(hours=2)


def forecast_arrivals(
    at: datetime, horizon_s: float, unfinished: Sequence[RequestState] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the arrivals in the *horizon_s* after *at*, by forecasts and the recent ledger, as JSON; and remarks.

    *unfinished* is what runs and waits at *at* (`FleetState.running` and `waiting`): the ledger has only ended requests,
    which for the last minutes are the short ones. Requests older than the ledger rows read are left out.
    """
    ended = list(own_rows(ledger_rows(at - RECENT, at)).order_by("-arrived_at")[:MAX_ROWS])
    since = ended[-1][0] if len(ended) == MAX_ROWS else at - RECENT
    open_rows = [row for row in (_unfinished(each, at) for each in unfinished) if row[0] >= since]
    rows: list[tuple[Any, ...]] = sorted([*ended, *open_rows], key=lambda row: row[0])
    covered_s = max(1.0, (at - rows[0][0]).total_seconds()) if rows else 1.0
    prompts = latest_forecasts(Quantity.PROMPT, at - FORECAST_AGE)
    outputs = latest_forecasts(Quantity.OUTPUT, at - FORECAST_AGE)
    others, streams, missing, shared = set(other_classes()), [], set(), fallbacks_of_targets()
    whole = workload_of(rows, rows[0][0] if rows else at, shared)
    first, of = whole.wholes()
    keys = [(row[1], row[2], row[3] if row[3] in others else "") for row in rows]
    tokens_of = whole.prompt_tokens + whole.output_tokens
    for key in dict.fromkeys(keys[row] for row in first.tolist()):
        model, region, separate = key
        own = [row for row in range(len(rows)) if keys[row] == key]
        begins = sorted(row for row in first.tolist() if keys[row] == key)
        tokens = float(tokens_of[own].mean())
        forecast = (prompts.get((model, region)), outputs.get((model, region)))
        stream = {
            "model": model,
            "region": region,
            "rows": [_stored(rows[row], shared) for row in np.flatnonzero(np.isin(of, of[begins])).tolist()],
            "calls": len(own) / len(begins),
            "gaps": np.diff(whole.arrival_s[begins]).tolist(),
        }
        if separate or None in forecast or forecast[0] is None or forecast[1] is None:
            if not separate:
                missing.add(model)
            flat = len(own) / covered_s
            rates = {"start_s": 0.0, "window_s": horizon_s, "mean": [flat], "lower": [flat], "upper": [flat]}
        else:
            pairs = list(zip(windows_of(forecast[0]), windows_of(forecast[1]), strict=False))
            rates = {
                "start_s": (pairs[0][0].start - at).total_seconds(),
                "window_s": float(forecast[0].window_s),
                "mean": [(one.mean + two.mean) / tokens for one, two in pairs],
                "lower": [(one.lower_80 + two.lower_80) / tokens for one, two in pairs],
                "upper": [(one.upper_80 + two.upper_80) / tokens for one, two in pairs],
            }
        streams.append(stream | {"requests_per_s": rates})
    remarks = []
    if missing:
        names = ", ".join(sorted(missing))
        remarks.append(f"There is no forecast for {names}: requests come as in the last {covered_s / 60:.0f} min.")
    if not rows:
        remarks.append("The ledger of the last hour is empty: no requests come after the fork.")
    return {"kind": "forecast", "horizon_s": horizon_s, "streams": streams}, remarks


def _unfinished(one: RequestState, at: datetime) -> tuple[Any, ...]:
    """Return WORKLOAD_COLUMNS of an unfinished request: its predicted length, or somewhat more than produced so far."""
    emitted = one.output_tokens if isinstance(one, RunningRequest) else 0
    output = max(one.predicted_tokens, int((1 + OVERRUN_SHARE) * emitted))
    lengths = (one.prompt_tokens, output, one.prompt_tokens, one.predicted_tokens)
    moment = at + timedelta(seconds=one.arrival_s)
    names = one.model, one.region, one.slo_class, one.tenant
    return moment, *names, *lengths, False, one.asked_model, one.model_rule, "", "", "", None, None, "", ""


def _stored(row: Sequence[Any], shared: Mapping[str, Mapping[str, str]]) -> list[Any]:
    """Return WORKLOAD_COLUMNS as JSON: the model is the one before fallbacks."""
    moment, served, *others = row
    model, public = as_asked(served, others[8], others[9], shared)
    return [moment.isoformat(), model, *others[:8], public, ModelRule.WEIGHTS, *others[10:]]


def drawn(arrivals: dict[str, Any], seed: int) -> Workload:
    """Return the requests that *seed* draws from *arrivals* (`forecast_arrivals`), in order of time."""
    return _together(
        [
            _stream(stream, arrivals["horizon_s"], np.random.default_rng([seed, 5, at]))
            for at, stream in enumerate(arrivals["streams"])
        ]
    )


def _rows(stream: dict[str, Any]) -> Workload:
    """Return the requests that *stream* is drawn from, the first at 0."""
    if "rows" not in stream:
        raise ValueError("These requests were stored by another version, start again from the fleet.")
    rows = [[datetime.fromisoformat(row[0]), *row[1:]] for row in stream["rows"]]
    return workload_of(rows, rows[0][0], {})


def expected_requests(arrivals: dict[str, Any], horizon_s: float) -> float:
    """Return the mean number of requests of *arrivals* (`forecast_arrivals`) before *horizon_s*."""
    at_s, count = np.linspace(0.0, horizon_s, PROBES, endpoint=False), 0.0
    for rates in (stream["requests_per_s"] for stream in arrivals["streams"]):
        window = np.clip(((at_s - rates["start_s"]) // rates["window_s"]).astype(np.int64), 0, len(rates["mean"]) - 1)
        count += float(np.array(rates["mean"], np.float64)[window].mean()) * horizon_s
    return count


def recent(arrivals: dict[str, Any]) -> Workload:
    """Return the requests that *arrivals* (`forecast_arrivals`) are drawn from, the first of each stream at 0."""
    return _together([_rows(stream) for stream in arrivals["streams"]])


def _stream(stream: dict[str, Any], horizon_s: float, random: np.random.Generator) -> Workload:
    rates, rows = stream["requests_per_s"], _rows(stream)
    first, of = rows.wholes()
    lasts_s = rows.arrival_s - rows.arrival_s[first][of]
    before_s = float(lasts_s.max())
    mean, lower, upper = (np.array(rates[name], np.float64) / stream["calls"] for name in ("mean", "lower", "upper"))
    deviations = float(np.clip(random.standard_normal(), -MAX_DEVIATIONS, MAX_DEVIATIONS)) / HALF_BAND_80
    level = np.maximum(mean + deviations * (upper - mean if deviations > 0 else mean - lower), 0.0)
    start_s, until_s = rates["start_s"] + before_s, horizon_s + before_s
    began_s = _moments(level, start_s, rates["window_s"], until_s, stream["gaps"], random) - before_s
    picked = random.integers(0, first.size, began_s.size)
    made, copy = rows.copied(picked, new=True)
    made = replace(made, arrival_s=made.arrival_s - rows.arrival_s[first][picked][copy] + began_s[copy])
    return made.select((made.arrival_s >= 0) & (made.arrival_s < horizon_s))


def _moments(
    level: NDArray[np.float64],
    start_s: float,
    window_s: float,
    horizon_s: float,
    gaps: list[float],
    random: np.random.Generator,
) -> NDArray[np.float64]:
    """Return moments from 0 to *horizon_s* at rates *level* of windows from *start_s*; the last window has no end."""
    ends_s = start_s + window_s * np.arange(1, level.size + 1)
    ends_s[-1] = max(ends_s[-1], horizon_s)
    marks = np.unique(np.clip(np.concatenate(([0.0], ends_s, [horizon_s])), 0.0, horizon_s))
    middles = (marks[1:] + marks[:-1]) / 2
    window = np.clip(((middles - start_s) // window_s).astype(np.int64), 0, level.size - 1)
    until = np.concatenate(([0.0], np.cumsum(level[window] * np.diff(marks))))
    total = float(until[-1])
    if total <= 0.0:
        return np.zeros(0)
    known = np.array(gaps, np.float64)
    known = known / known.mean() if known.size >= MIN_GAPS and known.mean() > 0 else np.zeros(0)
    # A few more than expected: the sum of many gaps is nearly normal.
    passed = random.uniform(0.0, 1.0)
    moments = [np.array([passed])]
    while passed < total:
        count = int(1.1 * (total - passed)) + 16
        drawn_gaps = random.choice(known, count) if known.size else random.exponential(size=count)
        each = passed + np.cumsum(drawn_gaps)
        moments.append(each)
        passed = float(each[-1])
    at = np.concatenate(moments)
    rising = np.concatenate(([True], np.diff(until) > 0))
    moments_s: NDArray[np.float64] = np.interp(at[at < total], until[rising], marks[rising])
    return moments_s


def _together(parts: list[Workload]) -> Workload:
    """Merge *parts* in order of time."""
    whole = reduce(merged, parts, NO_REQUESTS)
    return whole.select(np.argsort(whole.arrival_s, kind="stable"))


def recorded(arrivals: dict[str, Any], at: datetime) -> Workload:
    """Return the ledger's requests from `since` to `until` of *arrivals*, with *at* as time 0."""
    since, until = (datetime.fromisoformat(arrivals[name]) for name in ("since", "until"))
    return workload_of(own_rows(ledger_rows(since, until)).iterator(chunk_size=20_000), at)
