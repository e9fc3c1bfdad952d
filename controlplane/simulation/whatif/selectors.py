"""Reads of what-ifs: lists, progress, and the comparison of their futures."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import ceil, inf, isfinite
from typing import Any, Final

import numpy as np
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from controlplane.fleet.models import Deployment
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.changes.applying import applied, diff_in_words, in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.results import curves_of, effects_over_seeds, signed
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.timing import remaining_s
from scheduling.simulation.measures import results as measures
from scheduling.simulation.measures.columns import TTFT_EDGES_MS
from scheduling.simulation.measures.comparison import T_975, Interval, curve, of_shares, over_seeds, regret, verdicts

ALL: Final = "all"
HEAVY: Final = ("curves", "log", "pairs")
COLUMNS: Final = (
    "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "cost_usd", "cost_usd_per_h", "instance_hours", "queue_peak",
    "goodput_tokens_per_s", "missed", "judged", "requests",
)  # fmt: skip
SHOWN: Final = {
    "ttft_p95_ms": ("TTFT p95", "{:,.0f} ms"),
    "goodput_tokens_per_s": ("Goodput", "{:,.0f} tok/s"),
    "cost_usd_per_h": ("Cost an hour", "${:,.2f}"),
    "instance_hours": ("Instance-hours", "{:,.1f}"),
    "queue_peak": ("Queue peak", "{:,.0f}"),
}
"""Columns in the terminal: title, and form of the mean."""
RECENT: Final = timedelta(hours=1)
"""Of the ledger, by which round trips are known."""
LEAST_WAITING: Final = 0.5
LEAST_SLO: Final = 5e-4
"""Effects of a decision that are shown: requests that wait, and share of SLO met."""


def what_ifs() -> QuerySet[WhatIf]:
    """Return all what-ifs, newest first, with their numbers of futures and runs, and without their starts."""
    return (
        WhatIf.objects.select_related("requested_by", "chosen")
        .defer("start")
        .annotate(
            futures_count=Count("futures", distinct=True),
            runs_count=Count("futures__runs"),
            runs_done=Count("futures__runs", filter=Q(futures__runs__state=WhatIfState.DONE)),
        )
    )


def what_if(pk: int) -> WhatIf | None:
    """Return a what-if with its start; None if there is none."""
    return WhatIf.objects.select_related("requested_by", "chosen").filter(pk=pk).first()


def present_scenario() -> dict[str, Any]:
    """Return the active fleet and its policies as a scenario without demand."""
    fleet = inventory.read(set(Deployment.objects.filter(active=True).values_list("model__name", flat=True)))
    return scenario_of(fleet, ledger_rows(timezone.now() - RECENT))


def progress(pk: int) -> dict[str, Any] | None:
    """Return the progress of the what-if *pk*: state, done (share), eta_s, runs, runs_done, and a row for each future.

    A future's row: letter, name, state, phase, done, seed (the running one), seeds, seeds_done, eta_s, took_s, error.
    None if there is no such what-if.
    """
    row = WhatIf.objects.defer("start").filter(pk=pk).first()
    if row is None:
        return None
    runs = FutureSeed.objects.filter(future__what_if=pk).defer("result", *HEAVY)
    of: defaultdict[int, list[FutureSeed]] = defaultdict(list)
    for run in runs:
        of[run.future_id].append(run)
    now = timezone.now()
    every = [run for own in of.values() for run in own]
    ahead = _ahead(row) if row.state == WhatIfState.QUEUED else 0
    goes_on = row.state in (WhatIfState.QUEUED, WhatIfState.RUNNING) and not ahead
    ends_s = remaining_s(row, every, now) if goes_on else {}
    futures = [_future_progress(future, of[future.pk], ends_s.get(future.pk)) for future in row.futures.all()]
    done = sum(_share(run) for run in every) / len(every) if every else 0.0
    ended = row.ended_at or now
    return {
        "id": row.pk,
        "state": row.state,
        "done": round(done, 4),
        "eta_s": _whole_s(max(ends_s.values(), default=None)),
        "elapsed_s": round((ended - row.started_at).total_seconds(), 1) if row.started_at else None,
        "runs": len(every),
        "runs_done": sum(run.state == WhatIfState.DONE for run in every),
        "ahead": ahead,
        "futures": futures,
    }


def _future_progress(future: Future, runs: Sequence[FutureSeed], left_s: float | None) -> dict[str, Any]:
    states = [run.state for run in runs]
    order = (
        WhatIfState.RUNNING,
        WhatIfState.FAILED,
        WhatIfState.INTERRUPTED,
        WhatIfState.QUEUED,
        WhatIfState.CANCELLED,
    )
    state = next((each for each in order if each in states), WhatIfState.DONE if runs else WhatIfState.DRAFT)
    at_work = next((run for run in runs if run.state == WhatIfState.RUNNING), None)
    done = sum(map(_share, runs)) / len(runs) if runs else 0.0
    return {
        "letter": future.letter,
        "name": future.name,
        "state": str(state),
        "phase": str(at_work.phase) if at_work else "",
        "done": round(done, 4),
        "seed": at_work.seed if at_work else None,
        "seeds": len(runs),
        "seeds_done": sum(each == WhatIfState.DONE for each in states),
        "eta_s": _whole_s(left_s),
        "took_s": round(
            sum((run.ended_at - run.started_at).total_seconds() for run in runs if run.ended_at and run.started_at), 1
        ),
        "error": next((f"Seed {run.seed}: {run.error}" for run in runs if run.error), ""),
    }


def _share(run: FutureSeed) -> float:
    return 1.0 if run.state == WhatIfState.DONE else run.progress if run.state == WhatIfState.RUNNING else 0.0


def _whole_s(left_s: float | None) -> float | None:
    """Round up to seconds, or to five seconds above ten: estimates are no more exact."""
    if left_s is None:
        return None
    return float(ceil(left_s) if left_s < 10 else 5 * ceil(left_s / 5)) or 1.0


def _ahead(row: WhatIf) -> int:
    """Return the number of what-ifs that run before *row*."""
    before = WhatIf.objects.filter(state__in=(WhatIfState.QUEUED, WhatIfState.RUNNING))
    before = before.filter(nightly__lte=row.nightly, submitted_at__lt=row.submitted_at)
    return before.count() if row.submitted_at else 0


def changes_in_words(row: WhatIf, future: Future) -> list[str]:
    """Describe the changes of *future* against now, a sentence each; for an impossible one, the problem."""
    return _in_words(row, future.changes, "changes")


def edits_in_words(row: WhatIf) -> list[str]:
    """Describe the changes that all futures of *row* share."""
    return _in_words(row, row.edits, "edits")


def full_diff(row: WhatIf, future: Future) -> list[str]:
    """Describe every key of the scenario that *future* changes, one line each."""
    if not row.start or not future.changes:
        return []
    start = Start.model_validate(row.start)
    try:
        changed = applied(start.scenario, parsed(future.changes), asks=start.asks)
    except ChangeError as error:
        return [f"Cannot be: {error}"]
    return diff_in_words(start.scenario, changed.values)


def _in_words(row: WhatIf, changes: list[dict[str, Any]], where: str) -> list[str]:
    if not row.start or not changes:
        return []
    try:
        return in_words(row.start["scenario"], parsed(changes, where))
    except ChangeError as error:
        return [f"Cannot be: {error}"]


def comparison(row: WhatIf, scope: str = ALL, usd_per_1000_missed: float | None = None) -> dict[str, Any]:
    """Compare the futures of *row* by their finished seeds: `futures`, a row each, and `regret`.

    *scope*: all, interactive; or `all, edited`, `interactive, edited`, the time of shared edits alone. A future's row:
    letter, name, changes, seeds_done, seeds, slo_met and other columns as {mean, low, high, wide_low, wide_high, delta}
    (delta: paired with A, seed by seed), verdict, holds (seeds that met the target), at_door (see `_at_door`), runs (see
    `_runs`). None where nothing is known yet.
    """
    price = row.usd_per_1000_missed if usd_per_1000_missed is None else usd_per_1000_missed
    futures = list(row.futures.all())
    results = _results(row)
    scoped = {
        letter: {seed: result["columns"][scope] for seed, result in of.items() if scope in result["columns"]}
        for letter, of in results.items()
    }
    met_error, ttft_error = (float(row.twin_error.get(name, 0.0)) for name in ("slo_met", "ttft_p95"))
    slo = {
        letter: _slo_met(of, met_error) if of else None
        for letter, of in scoped.items()
    }  # fmt: skip
    means = {letter: float(np.mean([each["cost_usd"] for each in of.values()])) for letter, of in scoped.items() if of}
    done = {future.letter for future in futures if len(scoped.get(future.letter, {})) == row.seeds}
    said = verdicts({letter: slo[letter] for letter in sorted(done)}, means, row.slo_target)
    rows = []
    for future in futures:
        own, base = scoped.get(future.letter, {}), scoped.get("A", {})
        entry: dict[str, Any] = {
            "letter": future.letter,
            "name": future.name,
            "changes": changes_in_words(row, future),
            "seeds_done": len(own),
            "seeds": row.seeds,
            "verdict": str(said[future.letter]) if future.letter in said else f"{len(own)} of {row.seeds} seeds",
            "holds": sum(each["slo_met"] is not None and each["slo_met"] >= row.slo_target for each in own.values()),
            "slo_met": _shown(slo.get(future.letter), _delta(own, base, "slo_met")),
            "at_door": _at_door(list(results.get(future.letter, {}).values())),
            "rules": _rules(list(results.get(future.letter, {}).values())),
            "runs": _runs(list(results.get(future.letter, {}).values())),
        }
        for name in COLUMNS:
            interval = over_seeds([_known(each[name]) for each in own.values()])
            if interval is not None and name.startswith("ttft"):
                interval = interval.widened(ttft_error * interval.mean, 0.0)
            entry[name] = _shown(interval, _delta(own, base, name))
        rows.append(entry)
    return {
        "scope": scope,
        "target": row.slo_target,
        "twin_error": row.twin_error,
        "futures": rows,
        "regret": _regret(scoped, price),
    }


def _slo_met(of: dict[int, dict[str, Any]], error: float) -> Interval | None:
    judged = [each["judged"] for each in of.values()]
    interval = of_shares([each["judged"] - each["missed"] for each in of.values()], judged)
    return None if interval is None else interval.widened(error, 0.0, 1.0)


AT_DOOR: Final = ("admitted_late", "degraded", "refused_at_door")
"""What became of requests whose promise was unreachable on arrival."""


def _at_door(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return a row for each SLO class asked for: slo_class, requests and AT_DOOR as means over seeds of the whole time.

    None where no class has its promise judged at the door, or nothing is known yet. A count that an older run did not keep
    is None.
    """
    classes = [result["classes"] for result in results]
    names = {name for of in classes for name, one in of.items() if "refused_at_door" in one}
    if not names:
        return None
    return [
        {"slo_class": name}
        | {
            column: float(np.mean([of.get(name, {}).get(column, 0) for of in classes]))
            if all(column in of[name] for of in classes if name in of)
            else None
            for column in ("requests", *AT_DOOR)
        }
        for name in sorted(names)
    ]


def _rules(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return a row for each name asked for, model that served and rule: requests, judged and missed, means over seeds of the
    whole time.

    None where every request is served by the model that it names.
    """
    columns = ("requests", "judged", "missed")
    sums: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * len(columns))
    for result in results:
        for one in result.get("rules", ()):
            own = sums[one["asked_model"], one["model"], one["rule"]]
            own[:] = [total + one[column] / len(results) for total, column in zip(own, columns, strict=True)]
    names = ("asked_model", "model", "rule")
    return [dict(zip((*names, *columns), (*key, *sums[key]), strict=True)) for key in sorted(sums)] or None


def _runs(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return a row for all application runs and for each application: `measures.RUN_COLUMNS`, means over seeds of the
    whole time.

    None without any; a mean without values is None.
    """
    kept = [result["runs"] for result in results if result.get("runs")]
    # PostgreSQL does not keep the order of an object's fields.
    names = sorted({name for of in kept for name in of}, key=lambda name: (name != "all", name))
    rows = []
    for name in names:
        own = [of[name] for of in kept if name in of]
        values = {
            column: [one[column] for one in own if one[column] is not None] for column in measures.RUN_COLUMNS[1:]
        }
        rows.append({"application": name} | {each: float(np.mean(of)) if of else None for each, of in values.items()})
    return rows or None


def _results(row: WhatIf) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the result of each finished run, by letter and seed."""
    results: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    runs = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE)
    for letter, seed, result in runs.order_by("seed").values_list("future__letter", "seed", "result"):
        results[letter][seed] = result
    return results


def _known(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _delta(own: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], name: str) -> float | None:
    """Return the mean difference from A over the seeds that both have."""
    pairs = [(own[seed][name], base[seed][name]) for seed in own.keys() & base.keys()]
    known = [one - other for one, other in pairs if one is not None and other is not None]
    return float(np.mean(known)) if known else None


def _shown(interval: Interval | None, delta: float | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    names = ("mean", "low", "high", "wide_low", "wide_high")
    return {name: round(getattr(interval, name), 6) for name in names} | {
        "delta": None if delta is None else round(delta, 6)
    }


def _regret(scoped: dict[str, dict[int, dict[str, Any]]], usd_per_1000: float) -> dict[str, Any] | None:
    """Return the regret table over the seeds that all futures with any have; None without two futures."""
    known = {letter: of for letter, of in scoped.items() if of}
    seeds = sorted(set.intersection(*(set(of) for of in known.values()))) if known else []
    if len(known) < 2 or not seeds:
        return None
    cost, missed = (
        {letter: [of[seed][name] for seed in seeds] for letter, of in known.items()} for name in ("cost_usd", "missed")
    )
    made = regret(cost, missed, usd_per_1000 / 1000)
    return {
        "usd_per_1000_missed": usd_per_1000,
        "seeds": seeds,
        "rows": [
            {
                "letter": letter,
                "usd": [round(float(value), 4) for value in usd],
                "mean": round(float(usd.mean()), 4),
                "worst": round(float(usd.max()), 4),
            }
            for letter, usd in zip(made.names, made.usd, strict=True)
        ],
        "best": made.best,
        "best_in": made.best_in,
        "holds_above": round(1000 * made.holds_above, 4),
        "holds_below": round(1000 * made.holds_below, 4) if isfinite(made.holds_below) else None,
        "below": made.below,
        "above": made.above,
        "sentence": _regret_words(
            made.best, made.best_in, len(seeds), made.holds_above, made.holds_below, made.below, made.above
        ),
    }


def _regret_words(best: str, count: int, seeds: int, low: float, high: float, below: str, above: str) -> str:
    words = f"{best} is best in {count} of {seeds} seed{'s' * (seeds > 1)}."
    if low == 0 and high == inf:
        return f"{words} It is the best at any price of a miss."
    parts = []
    if low > 0:
        parts.append(f"below ${1000 * low:,.2f} per 1,000, {below} is cheaper")
    if high < inf:
        parts.append(f"above ${1000 * high:,.2f} per 1,000, {above} is cheaper")
    return f"{words} It stays the best but for the price of a miss: {'; '.join(parts)}."


def curves(row: WhatIf, scope: str = ALL) -> dict[str, dict[str, Any]]:
    """Return curves by letter: `ttft`, (ms, share of requests) of all seeds together, and `series` over time, means of
    the seeds.

    A series: t_s, and by `MODEL REGION` ready and waiting; a region's are the sum of its models'.
    """
    counts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    runs = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE).order_by("seed")
    for letter, blob in runs.values_list("future__letter", "curves"):
        counts[letter].append(curves_of(blob))
    return {letter: {"ttft": _ttft(own, scope), "series": _series(own)} for letter, own in counts.items()}


def _ttft(own: list[dict[str, Any]], scope: str) -> list[tuple[float, float]]:
    known = [each["ttft"][scope] for each in own if scope in each["ttft"]]
    if not known:
        return []
    total = np.sum([each["counts"] for each in known], axis=0)
    return curve(TTFT_EDGES_MS, total, sum(each["requests"] for each in known))


def _series(own: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over seeds, at the times of the shortest run."""
    many = [each["series"] for each in own]
    count = min(len(each["t_s"]) for each in many)
    endpoints = [tuple(each) for each in many[0]["endpoints"]]

    def mean(name: str) -> dict[str, list[float]]:
        values = np.mean([[row[:count] for row in each[name]] for each in many], axis=0)
        return {
            f"{model} {region}": np.round(row, 2).tolist()
            for (model, region), row in zip(endpoints, values, strict=True)
        }

    return {"t_s": many[0]["t_s"][:count], "ready": mean("ready"), "waiting": mean("waiting")}


def decides(row: WhatIf, limit: int = 20) -> list[dict[str, Any]]:
    """Return the first decisions that differ from those of A and whose effect over all seeds is beyond chance, the
    largest first.

    *slo_met* and *waiting* are means over *seeds*. Effects that round to nothing are left out.
    """
    rows = []
    for future in row.futures.all():
        over_seeds = effects_over_seeds(future)
        for each in future.decides:
            effects = over_seeds.get(f"{each['kind']} {each['region']}", [])
            met, waiting = (_beyond_chance([one[at] for one in effects]) for at in (0, 1))
            if met and abs(met[0]) >= LEAST_SLO:
                effect = f"{signed(100 * met[0], 1)} \u00b1{100 * met[1]:.1f} pt SLO met"
            elif waiting and abs(waiting[0]) >= LEAST_WAITING:
                effect = f"{signed(waiting[0], 1)} \u00b1{waiting[1]:.1f} waiting"
            else:
                continue
            rows.append(
                {
                    "letter": future.letter,
                    **each,
                    "effect": f"{effect} within 15 min, over {len(effects)} seeds",
                    "slo_met": met[0] if met else 0.0,
                    "waiting": waiting[0] if waiting else 0.0,
                    "seeds": len(effects),
                }
            )
    rows.sort(key=lambda each: -(abs(each["waiting"]) + 1000 * abs(each["slo_met"])))
    return rows[:limit]


def _beyond_chance(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean of *values* and half of its 95% interval; None if that contains 0, or there is only one value."""
    if len(values) < 2:
        return None
    mean = float(np.mean(values))
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return (mean, half) if abs(mean) > half else None


# Tables for files

STATISTICS: Final = ("mean", "low", "high", "wide_low", "wide_high", "delta")
NUMBERS: Final = ("slo_met", *COLUMNS)
FUTURES_HEADER: Final = (
    "future", "name", "changes", "seeds_done", "verdict", *(f"{name}_{each}" for name in NUMBERS for each in STATISTICS),
)  # fmt: skip
RUN_COLUMNS: Final = (
    "requests", "judged", "missed", "slo_met", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "cost_usd",
    "cost_usd_per_h", "instance_hours", "queue_peak", "goodput_tokens_per_s",
)  # fmt: skip
RUNS_HEADER: Final = ("future", "name", "seed", "scope", *RUN_COLUMNS)
KEYS_HEADER: Final = ("future", "name", "key", "change")


def futures(row: WhatIf, scope: str = ALL) -> Iterator[tuple[Any, ...]]:
    """Yield one row a future, by FUTURES_HEADER."""
    for each in comparison(row, scope)["futures"]:
        numbers = [(each[name] or {}).get(statistic) for name in NUMBERS for statistic in STATISTICS]
        yield each["letter"], each["name"], "; ".join(each["changes"]), each["seeds_done"], each["verdict"], *numbers


def runs(row: WhatIf) -> Iterator[tuple[Any, ...]]:
    """Yield one row a finished run and scope, by RUNS_HEADER."""
    done = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE).order_by("future__letter", "seed")
    for letter, name, seed, result in done.values_list("future__letter", "future__name", "seed", "result"):
        for scope, values in result["columns"].items():
            yield letter, name, seed, scope, *(values[column] for column in RUN_COLUMNS)


def keys(row: WhatIf) -> Iterator[tuple[Any, ...]]:
    """Yield one row for each scenario key that a future changes, by KEYS_HEADER."""
    for future in row.futures.all():
        for line in full_diff(row, future):
            key, _, change = line.partition(": ")
            yield future.letter, future.name, key, change
