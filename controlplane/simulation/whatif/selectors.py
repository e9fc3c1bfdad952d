"""Reads of what-ifs: lists, progress, and the comparison of their futures."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from controlplane.fleet.attainment import Attainment, together, worst
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.changes.applying import in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.results import curves_of
from controlplane.simulation.whatif.timing import remaining_s
from scheduling.simulation.measures import results as measures
from scheduling.simulation.measures.comparison import Interval, Verdict, of_shares, over_seeds, to_decide, verdicts
from scheduling.simulation.measures.comparison import verdict as verdict_of
from scheduling.simulation.scenario.policies import SloClassOf

ALL: Final = "all"
NOT_RANKED: Final = "Not ranked"
COLUMNS: Final = (
    "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "cost_usd", "cost_usd_per_h", "instance_hours", "queue_peak", "missed",
    "judged", "requests",
)  # fmt: skip
RECENT: Final = timedelta(hours=1)
"""Of the ledger, by which round trips are known."""


def what_ifs() -> QuerySet[WhatIf]:
    """Return all what-ifs, newest first, with their numbers of futures and runs, and without their starts."""
    return (
        WhatIf.objects.select_related("requested_by")
        .defer("start")
        .annotate(
            futures_count=Count("futures", distinct=True),
            runs_count=Count("futures__runs"),
            runs_done=Count("futures__runs", filter=Q(futures__runs__state=WhatIfState.DONE)),
        )
    )


def present_scenario() -> dict[str, Any]:
    """Return the active fleet and its policies as a scenario without demand."""
    return scenario_of(inventory.read(), ledger_rows(timezone.now() - RECENT))


def progress(pk: int) -> dict[str, Any] | None:
    """Return the progress of the what-if *pk*: state, done (share), eta_s, runs, runs_done, and a row for each future.

    A future's row: letter, name, state, phase, done, seed (the running one), seeds, seeds_done, took_s, error.
    None if there is no such what-if.
    """
    row = WhatIf.objects.defer("start").filter(pk=pk).first()
    if row is None:
        return None
    runs = FutureSeed.objects.filter(future__what_if=pk).defer("result", "curves")
    of: defaultdict[int, list[FutureSeed]] = defaultdict(list)
    for run in runs:
        of[run.future_id].append(run)
    now = timezone.now()
    every = [run for own in of.values() for run in own]
    ahead = _ahead(row) if row.state == WhatIfState.QUEUED and row.submitted_at else 0
    goes_on = row.state in (WhatIfState.QUEUED, WhatIfState.RUNNING) and not ahead
    futures = [_future_progress(future, of[future.pk]) for future in row.futures.all()]
    done = sum(_share(run) for run in every) / len(every) if every else 0.0
    ended = row.ended_at or now
    return {
        "id": row.pk,
        "state": row.state,
        "done": round(done, 4),
        "eta_s": _whole_s(remaining_s(row, every) if goes_on else None),
        "elapsed_s": round((ended - row.started_at).total_seconds(), 1) if row.started_at else None,
        "runs": len(every),
        "runs_done": sum(run.state == WhatIfState.DONE for run in every),
        "ahead": ahead,
        "futures": futures,
    }


def _future_progress(future: Future, runs: Sequence[FutureSeed]) -> dict[str, Any]:
    states = [run.state for run in runs]
    order = (
        WhatIfState.RUNNING,
        WhatIfState.FAILED,
        WhatIfState.QUEUED,
        WhatIfState.CANCELLED,
    )
    state = next((each for each in order if each in states), WhatIfState.DONE if runs else WhatIfState.QUEUED)
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
        "took_s": round(
            sum((run.ended_at - run.started_at).total_seconds() for run in runs if run.ended_at and run.started_at), 1
        ),
        "error": next((f"Repetition {run.seed}: {run.error}" for run in runs if run.error), ""),
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
    return before.count()


def changes_in_words(row: WhatIf, future: Future) -> list[str]:
    """Describe the changes of *future* against now, a sentence each; for an impossible one, the problem."""
    return _in_words(row, future.changes, "changes")


def edits_in_words(row: WhatIf) -> list[str]:
    """Describe the changes that all futures of *row* share."""
    return _in_words(row, row.edits, "edits")


def _in_words(row: WhatIf, changes: list[dict[str, Any]], where: str) -> list[str]:
    if not row.start or not changes:
        return []
    try:
        return in_words(row.start["scenario"], parsed(changes, where))
    except ChangeError as error:
        return [f"Cannot be: {error}"]


def targets_of(row: WhatIf) -> dict[str, float]:
    """Return the share of requests for which each class that promises something is to keep its promise."""
    classes = row.start.get("scenario", {}).get("classes", {})
    known = {name: SloClassOf.model_validate(one) for name, one in classes.items()}
    return {
        name: one.percentile / 100
        for name, one in known.items()
        if any((one.ttft_ms, one.itl_ms, one.e2e_ms, one.deadline_s))
    }


class OfClass(NamedTuple):
    """Promises of one class kept in one future: shares by repetition, their interval with the simulator's error."""

    shares: list[float]
    interval: Interval | None
    verdict: Verdict


def comparison(row: WhatIf, slo_class: str = "") -> dict[str, Any]:
    """Compare the futures of *row* by their finished seeds: `futures`, a row each.

    Requests are those of *slo_class*, by default of the class that does worst against its own target as things are now;
    `all` counts every class, without a target. A future's row: letter, name, changes, seeds_done, seeds, slo_met and other
    columns as {mean, low, high, delta, delta_low, delta_high} (delta: paired with A, seed by seed), verdict on the promises
    of all classes, breaks (classes whose promise it does not surely keep), holds and promised (seeds in which every class
    kept its promise, and seeds with a promise), decides (seeds in all after which the `delta` of slo_met, and the
    `verdict`, would be sure; null: more than can be run), unranked (why it is not ranked), runs (see `_runs`). None
    where nothing is known yet.
    """
    futures, targets, results = list(row.futures.all()), targets_of(row), _results(row)
    of_class = slo_class or _worst(results, targets) or ALL
    met_error, ttft_error = (float(row.twin_error.get(name, 0.0)) for name in ("slo_met", "ttft_p95"))
    promises = {letter: _promises(list(of.values()), targets, met_error) for letter, of in results.items()}
    cost, unranked = dict[str, float](), dict[str, str]()
    for letter, of in results.items():
        cost[letter] = float(np.mean([each["columns"][ALL]["cost_usd"] for each in of.values()]))
        unranked[letter] = next((why for each in of.values() if (why := each.get("unranked"))), "")
    done = [letter for letter, of in results.items() if len(of) == row.seeds and not unranked[letter]]
    verdict = verdicts({letter: [one.verdict for one in promises[letter].values()] for letter in sorted(done)}, cost)
    scoped = {
        letter: {seed: each["columns"][of_class] for seed, each in of.items() if of_class in each["columns"]}
        for letter, of in results.items()
    }
    first = next((list(of.values()) for _, of in sorted(results.items())), [])
    requests = round(float(np.mean([each["columns"][ALL]["requests"] for each in first]))) if first else None
    rows = []
    for future in futures:
        letter, own, base = future.letter, scoped.get(future.letter, {}), scoped.get("A", {})
        kept, ended = promises.get(letter, {}), results.get(letter, {})
        said = NOT_RANKED if unranked.get(letter) else f"{len(ended)} of {row.seeds} repetitions"
        by_seed = [
            all(met) for met in zip(*(_kept(ended, name, target) for name, target in targets.items()), strict=True)
        ]
        close = [name for name, one in kept.items() if one.verdict == Verdict.CLOSE]
        needed = (to_decide(kept[name].shares, targets[name], met_error) for name in close)
        settled = [each for each in needed if each is not None]
        entry: dict[str, Any] = {
            "letter": letter,
            "name": future.name,
            "changes": changes_in_words(row, future),
            "seeds_done": len(ended),
            "seeds": row.seeds,
            "verdict": str(verdict.get(letter, said)),
            "breaks": [name for name, one in kept.items() if one.verdict in (Verdict.MISSES, Verdict.CLOSE)],
            "unranked": unranked.get(letter, ""),
            "holds": sum(by_seed),
            "promised": len(by_seed) if any(one.shares for one in kept.values()) else 0,
            "decides": {
                "delta": to_decide(_differences(own, base, "slo_met")) if letter != "A" else None,
                "verdict": max(settled, default=None) if len(settled) == len(close) else None,
            },
            "slo_met": _shown(_slo_met(list(own.values()), met_error), _differences(own, base, "slo_met")),
            "runs": _runs(list(ended.values())),
        }
        for name in COLUMNS:
            interval = over_seeds([_known(each[name]) for each in own.values()])
            if interval is not None and name.startswith("ttft"):
                interval = interval.widened(ttft_error * interval.mean, 0.0)
            entry[name] = _shown(interval, _differences(own, base, name))
        rows.append(entry)
    return {
        "slo_class": of_class,
        "targets": targets,
        "target": targets.get(of_class),
        "requests": requests,
        "twin_error": row.twin_error,
        "futures": rows,
    }


def _worst(results: Mapping[str, Mapping[int, dict[str, Any]]], targets: Mapping[str, float]) -> str:
    """Return the class that does worst against its target in the first future with a result, as Overview's tile does."""
    for _, of in sorted(results.items()):
        columns = [(name, each["columns"][name]) for each in of.values() for name in targets if name in each["columns"]]
        sums = together(
            Attainment(name, one["judged"] - one["missed"], one["judged"], targets[name]) for name, one in columns
        )
        if (one := worst(sums.values())) is not None:
            return one.slo_class
    return ""


def _promises(results: Sequence[dict[str, Any]], targets: Mapping[str, float], error: float) -> dict[str, OfClass]:
    """Return what became of the promises of each class in the *results* of one future."""
    made = {}
    for name, target in targets.items():
        own = [each["columns"][name] for each in results if name in each["columns"]]
        interval = _slo_met(own, error)
        shares = [each["slo_met"] for each in own if each["slo_met"] is not None]
        made[name] = OfClass(shares, interval, verdict_of(interval, target))
    return made


def _kept(results: Mapping[int, dict[str, Any]], name: str, target: float) -> list[bool]:
    """Return for each repetition whether the class *name* kept its promise, or was asked for nothing."""
    shares = [each["columns"].get(name, {}).get("slo_met") for each in results.values()]
    return [share is None or share >= target for share in shares]


def _slo_met(of: Sequence[dict[str, Any]], error: float) -> Interval | None:
    interval = of_shares([each["judged"] - each["missed"] for each in of], [each["judged"] for each in of])
    return None if interval is None else interval.widened(error, 0.0, 1.0)


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


def _differences(own: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], name: str) -> list[float]:
    """Return the differences from A over the seeds that both have."""
    pairs = [(own[seed][name], base[seed][name]) for seed in sorted(own.keys() & base.keys())]
    return [one - other for one, other in pairs if one is not None and other is not None]


def _shown(interval: Interval | None, differences: Sequence[float]) -> dict[str, float | None] | None:
    if interval is None:
        return None
    delta = over_seeds(differences)
    values = {name: getattr(interval, name) for name in ("mean", "low", "high")}
    for end, name in (("", "mean"), ("_low", "low"), ("_high", "high")):
        values[f"delta{end}"] = None if delta is None else getattr(delta, name)
    return {name: None if value is None else round(value, 6) for name, value in values.items()}


def curves(row: WhatIf) -> dict[str, dict[str, Any]]:
    """Return means over seeds by letter: until_s and ttft_p95_ms by SLO class; t_s, and ready by `MODEL REGION`."""
    made: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    runs = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE).order_by("seed")
    for letter, blob in runs.values_list("future__letter", "curves"):
        made[letter].append(curves_of(blob))
    return {
        letter: _latency([each["latency"] for each in own if "latency" in each]) | _ready(own)
        for letter, own in made.items()
    }


def _latency(own: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean latency over the seeds that have a value; None where none has."""
    rows = {}
    for name in sorted({name for each in own for name in each["ttft_p95_ms"]}):
        parts = zip(*(each["ttft_p95_ms"][name] for each in own if name in each["ttft_p95_ms"]), strict=True)
        known = [[value for value in part if value is not None] for part in parts]
        rows[name] = [round(float(np.mean(values)), 3) if values else None for values in known]
    return {"until_s": own[0]["until_s"] if own else [], "ttft_p95_ms": rows}


def _ready(own: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean number of ready instances, at the times of the shortest run."""
    many = [each["series"] for each in own]
    count = min(len(each["t_s"]) for each in many)
    values = np.mean([[row[:count] for row in each["ready"]] for each in many], axis=0)
    names = [f"{model} {region}" for model, region in many[0]["endpoints"]]
    ready = {name: np.round(row, 2).tolist() for name, row in zip(names, values, strict=True)}
    return {"t_s": many[0]["t_s"][:count], "ready": ready}


# Tables for files

STATISTICS: Final = ("mean", "low", "high", "delta", "delta_low", "delta_high")
NUMBERS: Final = ("slo_met", *COLUMNS)
FUTURES_HEADER: Final = (
    "future", "name", "changes", "seeds_done", "verdict", *(f"{name}_{each}" for name in NUMBERS for each in STATISTICS),
)  # fmt: skip


def futures(row: WhatIf, slo_class: str = "") -> Iterator[tuple[Any, ...]]:
    """Yield one row a future, by FUTURES_HEADER."""
    for each in comparison(row, slo_class)["futures"]:
        numbers = [(each[name] or {}).get(statistic) for name in NUMBERS for statistic in STATISTICS]
        yield each["letter"], each["name"], "; ".join(each["changes"]), each["seeds_done"], each["verdict"], *numbers
