"""Backtests: errors of each forecaster on the ledger's demand or on a trace.

An operator starts one with `manage.py backtest`; a Celery worker periodically backtests the ledger, on as many series as
its time allows, those with the most tokens first.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.forecasts.demand import ASKED
from controlplane.planning.json_values import plain
from controlplane.planning.models import Backtest, Quantity
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from forecasting.workload.series import Series

HORIZON = 6  # an hour of ten-minute windows, the planning horizon; steps 1 and 2 are shown separately
FIT_DAYS = 7.0
FIT_SHARE = 0.7  # of a series no longer than FIT_DAYS
LEAST_WINDOWS = 100
"""Minimum windows of a series in periodic backtests."""
LOOK_S = 1.0
"""Poll interval in seconds for waiting work."""
SETTLED = timedelta(minutes=3)
PERIOD = timedelta(days=1)
LIMIT_S = 120.0  # after which a periodic backtest starts no further series
"""Counted demand required before the first periodic backtest, to keep start-up light."""


@dataclass(frozen=True, slots=True)
class BacktestSource:
    """One source: its name in the stored result, and its series by name, prompt and output separately."""

    source: str
    series: Mapping[str, Mapping[str, "Series"]]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of a backtest."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """A row of `forecasting.workload.backtesting.backtest` per forecaster, with `series` and `quantity`."""
    judged: list[dict[str, Any]] = field(default_factory=list)
    """One row per series and quantity: windows fitted, judged and missing."""


def read_ledger(window_s: float, model: str = "") -> BacktestSource:
    """Read demand of every model and caller region from the ledger's minute rows.

    Raises ValueError if the ledger has no minute of *model* (empty: of any).
    """
    from forecasting.workload.series import aggregate, group_minutes

    names = ("minute", "model", "region", "prompt_tokens", "output_tokens")
    asked = MinuteRow.objects.order_by().annotate(
        own=OWN_REGION, prompt=ASKED[Quantity.PROMPT], output=ASKED[Quantity.OUTPUT]
    )
    columns = asked.values_list("minute", "model", "own", "prompt", "output")
    rows: Iterable[Mapping[str, Any]] = (dict(zip(names, values, strict=True)) for values in columns.iterator())
    source = "ledger with a generated past" if MinuteRow.objects.filter(generated=True).exists() else "ledger"
    groups = group_minutes(rows, by=("model", "region"))
    if not groups:
        raise ValueError("The ledger holds no minute yet: name a file, or come back when requests were served.")
    series = {
        " ".join(part for part in key if part): {
            quantity: aggregate(one, window_s) for quantity, one in groups[key].items()
        }
        for key in sorted(groups)
        if not model or key[0] == model
    }
    if not series:
        raise ValueError(f"The ledger holds no minute of {model}.")
    return BacktestSource(source, series)


def split(series: "Series", name: str, fit_days: float | None = None) -> tuple[int, int]:
    """Return the windows to fit on and to judge. Raises ValueError if the series is too short."""
    from forecasting.workload.series import DAY_S

    count, day = len(series), DAY_S / series.window_s
    if fit_days is None:
        fit = round(FIT_DAYS * day) if count > FIT_DAYS * day else int(FIT_SHARE * count)
    else:
        fit = round(fit_days * day)
    test = count - fit
    if fit < 1 or test < 1:
        raise ValueError(
            f"{name}: {count} windows of {series.window_s:g} s ({count / day:.2f} days) leave none to judge."
        )
    return fit, test


def judge(
    demand: BacktestSource,
    forecasters: Sequence[str],
    horizon: int,
    *,
    fit_days: float | None = None,
    report: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> Judgement:
    """Judge *forecasters* on every series of *demand*, *horizon* windows ahead.

    *report* is called with (step, windows done, all windows of the step). Raises ValueError naming the series that cannot
    be judged.
    """
    from forecasting.workload import FORECASTERS, backtest
    from forecasting.workload.series import without_partial

    made = Judgement()
    for name, pair in demand.series.items():
        for quantity in Quantity.values:
            series = without_partial(pair[quantity])
            fit, test = split(series, name, fit_days)
            of_series = {"series": name, "quantity": quantity}
            gaps = int(np.count_nonzero(~series.known[: fit + test]))
            made.judged.append({**of_series, "fit_windows": fit, "test_windows": test, "gaps": gaps})
            for forecaster in forecasters:
                step = f"{name} {quantity}: {forecaster}"
                report(step, 0, test)

                def advance(_: str, done: int, total: int, step: str = step) -> None:
                    report(step, done, total)

                try:
                    results = backtest(
                        series, {forecaster: FORECASTERS[forecaster]}, fit, horizon, test_windows=test, progress=advance
                    )
                except ValueError as error:
                    raise ValueError(f"{name} {quantity}: {error}") from error
                made.rows.extend({**row, **of_series} for row in results)
    return made


def store(source: str, window_s: int, horizon: int, rows: Sequence[Mapping[str, Any]]) -> Backtest:
    """Store the result of one backtest. Raises ValidationError."""
    row = Backtest(source=source[:160], window_s=window_s, horizon_windows=horizon, rows=plain(list(rows)))
    row.full_clean()
    row.save()
    return row


def due(now: datetime) -> bool:
    """Return whether the next periodic backtest of the ledger is due."""
    newest = Backtest.objects.filter(source__startswith="ledger").order_by("-made_at").first()
    if newest is not None:
        return bool(now - newest.made_at >= PERIOD)
    first = MinuteRow.objects.filter(generated=False).order_by("minute").values_list("minute", flat=True).first()
    return first is not None and now - first >= SETTLED


class GivesWay(Exception):
    """Other work waits for the worker."""


def backtest_ledger(
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    requested_work_waits: Callable[[], bool] = lambda: False,
) -> Backtest | None:
    """Judge every available forecaster on the ledger's largest series and store the result; no new series after
    *limit_s*.

    Ends when *requested_work_waits*, keeping the series judged so far. None without any, or if none has `LEAST_WINDOWS`.
    """
    from forecasting.workload import FORECASTERS, rests

    looked_s = time.monotonic()

    def look(*_: Any) -> None:
        nonlocal looked_s
        if time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            if requested_work_waits():
                raise GivesWay

    until_s = clock() + limit_s
    window_s = tuned().FORECAST_WINDOW_S
    try:
        demand = read_ledger(window_s)
    except ValueError:
        return None
    tokens = {
        name: sum(float(np.nansum(series.tokens_per_s)) for series in pair.values())
        for name, pair in demand.series.items()
        if all(len(series) >= LEAST_WINDOWS for series in pair.values())
    }
    rows: list[dict[str, Any]] = []
    count = 0
    for name in sorted(tokens, key=lambda name: -tokens[name]):
        if not tokens[name] or clock() >= until_s:
            break
        one = BacktestSource(demand.source, {name: demand.series[name]})
        try:
            rows += judge(one, [name for name in FORECASTERS if not rests(name)], HORIZON, report=look).rows
        except GivesWay:
            break
        except ValueError:
            continue  # no demand in the judged part
        count += 1
    if not rows:
        return None
    source = (
        demand.source if count == len(demand.series) else f"{demand.source}, {count} largest of {len(demand.series)}"
    )
    return store(source, window_s, HORIZON, rows)
