"""What the forecast page shows of one series, of all series, and of the backtests: built from rows, ready for a template."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from controlplane.console.charts.spec import last
from controlplane.planning import selectors as planning
from controlplane.planning.forecasts import demand, selectors
from controlplane.planning.forecasts.selectors import Accuracy, NotServedHere, Series, Window
from controlplane.planning.models import Backtest, Forecast, PlanStatus, Quantity, ScalingPlan
from controlplane.planning.titles import title_of

RANGES_H = (1, 6, 24, 72)
USUAL_RANGE_H = 6
POINTS = 600  # of a line
DEMAND_WINDOW_S = 600  # while there is no forecast to take the window from
RATES = ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
Steps = list[tuple[datetime, Counter[str]]]
"""Moments, and the ready instances by GPU type from then on."""
CAPACITY_CHANGES = {PlanStatus.ADVICE, PlanStatus.APPROVED}  # of a plan that would still change something


@dataclass(frozen=True, slots=True)
class Score:
    """How one forecaster did on one quantity of a backtest: ratios (pinball loss of the mean rate), fit in seconds."""

    forecaster: str
    title: str
    mean_ape: float | None
    max_ape: float | None
    pinball: float | None
    coverage_80: float | None
    coverage_95: float | None
    fit_s: float | None
    by_horizon: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """One series over time: what came, what was and is expected, and what the instances can do, in tokens a second.

    *starts*, *actual*, *generated*, *expected* and *capacity* have one element a window; a window that begins in the demo's
    generated past has that demand in *generated*, any other in *actual*. *planned* is the capacity from *now* on: what open
    plans would change it to, and where there is none, what there is. A single class has no capacity of its own.
    """

    starts: Sequence[datetime]
    window_s: int
    now: datetime
    actual: Series
    generated: Series
    expected: Sequence[Window | None]
    capacity: Series
    planned: float | None
    unit: str  # "prompt" or "output"
    slo_class: str = ""  # all interactive classes together

    def since_known(self) -> "Outlook":
        """Without the windows before the first of which anything is known: a young fleet's hour is not lost in a week."""
        seen = zip(self.actual, self.generated, self.expected, self.capacity, strict=True)
        first = next((at for at, known in enumerate(seen) if any(known)), 0)
        return replace(
            self,
            **{name: getattr(self, name)[first:] for name in ("starts", "actual", "generated", "expected", "capacity")},
        )

    @property
    def ahead(self) -> list[Window]:
        """The windows that are not over yet."""
        length = timedelta(seconds=self.window_s)
        return [window for window in self.expected if window is not None and window.start + length > self.now]

    @property
    def peak(self) -> Window | None:
        return max(self.ahead, key=lambda window: window.mean, default=None)

    @property
    def capacity_now(self) -> float | None:
        past = [value for start, value in zip(self.starts, self.capacity, strict=True) if start <= self.now]
        return past[-1] if past else None


@dataclass(frozen=True, slots=True)
class Asked:
    """The series that a page is about, and how far back it looks."""

    model: str  # empty: all models together
    region: str  # empty: all regions together
    quantity: str
    hours: float
    slo_class: str = ""  # all interactive classes together


@dataclass(frozen=True, slots=True)
class Seen:
    """One series with its newest forecast, and how the forecasts within the range did."""

    outlook: Outlook
    forecast: Forecast | None
    accuracy: Accuracy


def see(asked: Asked, now: datetime) -> Seen:
    forecasts = _forecasts(asked, now)
    newest = forecasts[0] if forecasts else None
    window_s = newest.window_s if newest else DEMAND_WINDOW_S
    since = now - timedelta(hours=asked.hours)
    tracks = [selectors.track(row, since) for row in forecasts if row.window_s == window_s]
    expected = tracks[0] if len(tracks) == 1 else _summed(tracks)
    until = expected[-1].start + timedelta(seconds=window_s) if expected else now
    starts = selectors.grid(since, max(until, now), window_s)
    past = selectors.generated_past(now)
    actual, generated = _split(_until_now(starts, window_s, now, asked), starts, past)
    by_start = {window.start: window for window in expected}
    # Counting began within the minute that follows a generated past: what was counted of it judges nothing.
    judged_from = past.until + timedelta(seconds=demand.MINUTE_S) if past else since
    counted = {start: value for start, value in zip(starts, actual, strict=True) if start >= judged_from}
    judged = selectors.accuracy(expected, counted)
    whole = not asked.slo_class  # instances serve all classes: no class has a capacity of its own
    able = _by_model(asked, planning.capabilities(asked.quantity, now)) if whole else {}
    stride = -(-len(starts) // POINTS)
    shown = slice((len(starts) - 1) % stride, None, stride)
    ready = {model: planning.ready_over_time(model, asked.region, starts[0]) for model in able} if starts else {}
    capacity = _capacity(starts[shown], window_s, now, able, ready, past)
    outlook = Outlook(
        starts=starts[shown],
        window_s=window_s,
        now=now,
        actual=actual[shown],
        generated=generated[shown],
        expected=[by_start.get(start) for start in starts[shown]],
        capacity=capacity,
        planned=_planned(asked, able, ready, now) if last(capacity) is not None else None,
        unit=asked.quantity,
        slo_class=asked.slo_class,
    )
    return Seen(outlook, newest, judged)


def _forecasts(asked: Asked, now: datetime) -> list[Forecast]:
    """The newest forecast of the series, or of each endpoint where several are asked for together."""
    if asked.model and asked.region:
        newest = selectors.latest_forecast(asked.model, asked.region, asked.quantity, asked.slo_class)
        return [newest] if newest else []
    everywhere = selectors.latest_forecasts(asked.quantity, now - timedelta(days=1))
    served = set(demand.endpoints())
    return [row for key, row in sorted(everywhere.items()) if key in served and asked.model in ("", key[0])]


def _summed(tracks: Sequence[Sequence[Window]]) -> list[Window]:
    """The windows that every one of *tracks* has, with sums. Ends of bands are summed too: as if all regions erred alike,
    which is the widest that the band of the sum can be.
    """
    by_start: dict[datetime, list[Window]] = defaultdict(list)
    for track in tracks:
        for window in track:
            by_start[window.start].append(window)
    return [
        Window(start, *(sum(getattr(window, name) for window in windows) for name in RATES))
        for start, windows in sorted(by_start.items())
        if len(windows) == len(tracks)
    ]


def _until_now(starts: Sequence[datetime], window_s: int, now: datetime, asked: Asked) -> Series:
    """Demand of the windows that are over; None for the others, whose requests are still being counted."""
    end = demand.last_complete(now, window_s)
    over = [start for start in starts if start < end]
    known = selectors.demand(asked.model, asked.region, asked.quantity, over, window_s, asked.slo_class)
    return known + [None] * (len(starts) - len(over))


def _split(known: Series, starts: Sequence[datetime], past: selectors.GeneratedPast | None) -> tuple[Series, Series]:
    """What was counted, and what was generated."""
    made_up = [past is not None and start < past.until for start in starts]
    actual = [None if made else value for value, made in zip(known, made_up, strict=True)]
    generated = [value if made else None for value, made in zip(known, made_up, strict=True)]
    return actual, generated


def _capacity(
    starts: Sequence[datetime],
    window_s: int,
    now: datetime,
    able: dict[str, dict[str, float]],
    ready: dict[str, Steps],
    past: selectors.GeneratedPast | None,
) -> Series:
    """What the instances that were ready could do, at the begin of each window up to *now*; none did in a made-up past."""
    if not able or not starts:
        return [None] * len(starts)
    moments = {model: [at for at, _ in steps] for model, steps in ready.items()}
    values: Series = []
    for start in starts:
        if start > now or (past is not None and start < past.until):
            values.append(None)
            continue
        # The window that runs now has what there is now.
        at = now if start + timedelta(seconds=window_s) > now else start
        places = {model: max(0, bisect_right(moments[model], at) - 1) for model in able}
        values.append(sum(_able(ready[model][place][1], able[model]) for model, place in places.items()))
    return values


def _by_model(asked: Asked, capabilities: dict[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """By model and GPU type, of the models that are asked for."""
    models = {name for name, _ in capabilities if asked.model in ("", name)}
    return {name: _of_model(name, capabilities) for name in sorted(models)}


def _of_model(model: str, capabilities: dict[tuple[str, str], float]) -> dict[str, float]:
    """By GPU type."""
    return {gpu_type: value for (name, gpu_type), value in capabilities.items() if name == model}


def _able(instances: Mapping[str, int], capability: dict[str, float]) -> float:
    return sum(number * capability.get(gpu_type, 0.0) for gpu_type, number in instances.items())


def _planned(asked: Asked, able: dict[str, dict[str, float]], ready: dict[str, Steps], now: datetime) -> float:
    """Capacity once every plan that is neither carried out nor out of date is."""
    plans = planning.current_plans()
    total = 0.0
    for model, capability in able.items():
        targets = _targets(plans.get(model), asked.region, now)
        total += _able(targets or ready[model][-1][1], capability)
    return total


def _targets(plan: ScalingPlan | None, region: str, now: datetime) -> dict[str, int]:
    """Instances by GPU type that a plan would give the region, or all of them; empty where it changes nothing any more."""
    targets: dict[str, int] = defaultdict(int)
    if plan is not None and plan.status in CAPACITY_CHANGES and plan.valid_until > now:
        for target in plan.targets:
            if region in ("", target["region"]):
                targets[target["gpu_type"]] += target["target"]
    return targets


# All series


def class_row(asked: Asked, seen: Seen, now: datetime) -> dict[str, Any]:
    """Demand now and what is expected of the class that *asked* names, as in a row of `series_rows`."""
    of_class = selectors.demand_now(asked.quantity, now, asked.slo_class)
    demand_now = None if of_class is None else of_class.get((asked.model, asked.region), 0.0)
    return {"demand": demand_now, **_expected(seen.forecast, now)}


def series_rows(quantity: str, regions: dict[str, str], now: datetime) -> list[dict[str, Any]]:
    """One row a series of the interactive classes: demand now, what is expected, and how much of the capacity that takes."""
    now_by_series = selectors.demand_now(quantity, now)
    not_here = selectors.not_served_here(quantity, now)
    forecasts = selectors.latest_forecasts(quantity, now - timedelta(days=1))
    places = planning.instances_by_place()
    capabilities = planning.capabilities(quantity, now)
    rows = []
    for model, region in sorted({*demand.endpoints(), *forecasts}):
        ready = {
            gpu_type: states["ready"]
            for (name, place, gpu_type), states in places.items()
            if (name, place) == (model, region)
        }
        capacity = _able(ready, _of_model(model, capabilities)) or None
        row = forecasts.get((model, region))
        expected = _expected(row, now)
        peak = expected["peak"]
        rows.append(
            {
                "model": model,
                "region": region,
                "region_title": regions.get(region, region),
                "ready": sum(ready.values()),
                "demand": None if now_by_series is None else now_by_series.get((model, region), 0.0),
                **asdict(not_here.get((model, region), NotServedHere())),
                **expected,
                "capacity": capacity,
                "use": peak / capacity if peak is not None and capacity else None,
                "forecaster": title_of(row.forecaster) if row else "",
                "made_at": row.made_at if row else None,
                "note": row.note if row else "",
            }
        )
    return rows


def _expected(forecast: Forecast | None, now: datetime) -> dict[str, Any]:
    """The next window, and the highest of those to come with its begin; None without any."""
    ahead = _ahead(forecast, now) if forecast else []
    peak = max(ahead, key=lambda window: window.mean, default=None)
    return {
        "next": ahead[0].mean if ahead else None,
        "peak": peak.mean if peak else None,
        "peak_at": peak.start if peak else None,
    }


def _ahead(forecast: Forecast, now: datetime) -> list[Window]:
    length = timedelta(seconds=forecast.window_s)
    return [window for window in selectors.windows_of(forecast) if window.start + length > now]


# Backtests


def scores(backtest: Backtest, quantity: str, series: str = "") -> list[Score]:
    """How each forecaster did on *quantity*, best mean APE first; over all series, their means (and the worst APE)."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in backtest.rows:
        if row.get("quantity") == quantity and (not series or row.get("series") == series):
            groups[row["forecaster"]].append(row)
    board = [
        Score(
            forecaster=name,
            title=title_of(name),
            mean_ape=_mean(rows, "mean_ape"),
            max_ape=max((row["max_ape"] for row in rows if row.get("max_ape") is not None), default=None),
            pinball=_mean(rows, "pinball"),
            coverage_80=_mean(rows, "coverage_80"),
            coverage_95=_mean(rows, "coverage_95"),
            fit_s=_mean(rows, "fit_s"),
            by_horizon=_by_horizon(rows),
        )
        for name, rows in groups.items()
    ]
    return sorted(board, key=lambda score: (score.mean_ape is None, score.mean_ape or 0.0, score.forecaster))


def _mean(rows: Sequence[dict[str, Any]], field: str) -> float | None:
    known = [row[field] for row in rows if row.get(field) is not None]
    return sum(known) / len(known) if known else None


def _by_horizon(rows: Sequence[dict[str, Any]]) -> tuple[float | None, ...]:
    """The mean over series at each step ahead that some of them have."""
    lists = [row.get("mean_ape_by_horizon") or [] for row in rows]
    longest = max(map(len, lists), default=0)
    steps = []
    for at in range(longest):
        known = [values[at] for values in lists if len(values) > at and values[at] is not None]
        steps.append(sum(known) / len(known) if known else None)
    return tuple(steps)


def series_of(backtest: Backtest) -> list[str]:
    return sorted({row["series"] for row in backtest.rows if row.get("series")})


def leader_board(backtest: Backtest, series: str = "") -> list[dict[str, Any]]:
    """One row a forecaster with its scores on prompt and on output tokens, best mean APE over both first.

    `scores` holds a dict for each quantity, with `best` where no other forecaster has a lower mean APE, or None.
    """
    by_quantity = [scores(backtest, quantity, series) for quantity in Quantity.values]
    titles = {score.forecaster: score.title for board in by_quantity for score in board}
    rows = []
    for name, title in titles.items():
        pair = [_with_best(board, name) for board in by_quantity]
        known = [score["mean_ape"] for score in pair if score and score["mean_ape"] is not None]
        fits = [score["fit_s"] for score in pair if score and score["fit_s"] is not None]
        rows.append(
            {
                "forecaster": name,
                "title": title,
                "scores": pair,
                "mean_ape": sum(known) / len(known) if known else None,
                "fit_s": sum(fits) / len(fits) if fits else None,
                "fit_ms": 1_000 * sum(fits) / len(fits) if fits else None,
            }
        )
    rows.sort(key=lambda row: (row["mean_ape"] is None, row["mean_ape"] or 0.0, row["forecaster"]))
    return rows


def _with_best(board: list[Score], name: str) -> dict[str, Any] | None:
    score = next((score for score in board if score.forecaster == name), None)
    if score is None:
        return None
    return {**asdict(score), "best": score.mean_ape is not None and score.mean_ape == board[0].mean_ape}
