"""Results of runs: what a row keeps of one, and the decisions that differ from those of A."""

import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Final, NamedTuple

import numpy as np

from controlplane.simulation.running import Simulated
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from scheduling.simulation.measures.columns import Counted, by_class, by_rule, columns, over_time, ttft_counts
from scheduling.simulation.measures.differences import DecisionPair, Difference, Log, around, differences
from scheduling.simulation.measures.results import runs_by_application

MOST_LOGGED: Final = 3_000_000
"""Maximum requests of a run whose decisions are stored for a comparison."""
MOST_ROWS: Final = 5_000
"""Maximum moves, and plans, in the result of a scenario."""
FAST: Final = 1
"""Of zlib's levels."""
ARRAYS: Final = ("instance", "begin_s", "judged", "met", "arrival_s", "region", "model")


def packed(ran: Simulated, counted: Mapping[str, Counted]) -> dict[str, Any]:
    """Return the values of a `FutureSeed`, with a log of its decisions."""
    result, staged = ran.result, ran.staged
    whole = counted["all"]
    series = over_time(result, whole.until_s)
    # `took_s` is no part of it: the same run gives the same row.
    about = {name: value for name, value in ran.about.items() if name not in ("scenario", "took_s")}
    kept = {
        "about": about,
        "columns": columns(result, staged.promises, staged.prices, counted),
        "classes": by_class(result, staged.names, staged.promises, whole),
        "rules": by_rule(result, staged.names, staged.promises, whole),
        "runs": runs_by_application(result, whole.from_s, whole.until_s),
        "counters": {name: int(value) for name, value in result.counters.items() if value},
    }
    curves = {
        "ttft": {name: ttft_counts(result, each) for name, each in counted.items()},
        "series": series,
        "moves": [row for row in ran.moves.rows if row[4]],
    }
    log = None
    if staged.requests.count <= MOST_LOGGED:
        log = _written(Log.of(result, staged.names.regions, staged.names.models, staged.promises, series))
    return {"result": kept, "curves": zlib.compress(json.dumps(curves).encode()), "log": log}


def simulated(ran: Simulated) -> dict[str, Any]:
    """Return the result of a scenario simulated by itself, as `manage.py simulate --json`; moves and plans are cut."""
    result = ran.as_json()
    for name in ("moves", "plans"):
        result[f"{name}_made"], result[name] = len(result[name]), result[name][:MOST_ROWS]
    return result


def curves_of(blob: bytes | memoryview | None) -> dict[str, Any]:
    """Return the curves that `packed` stored; empty without any."""
    return dict(json.loads(zlib.decompress(blob))) if blob else {}


def log_of(blob: bytes | memoryview) -> Log:
    with np.load(io.BytesIO(zlib.decompress(blob)), allow_pickle=False) as arrays:
        about = json.loads(bytes(arrays["about"]))
        columns_of = {name: arrays[name] for name in ARRAYS}
    return Log(
        instances=[tuple(each) for each in about["instances"]],
        regions=about["regions"],
        models=about["models"],
        moves=[tuple(each) for each in about["moves"]],
        swaps=[tuple(each) for each in about["swaps"]],
        series=about["series"],
        **columns_of,
    )


def _written(log: Log) -> bytes:
    about = {name: getattr(log, name) for name in ("instances", "regions", "models", "moves", "swaps", "series")}
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(file, about=text, **{name: getattr(log, name) for name in ARRAYS})
    return zlib.compress(file.getbuffer(), FAST)  # stored while the what-if runs


FIRST_SEED: Final = 1
BASELINE: Final = "A"


EFFECTS: Final = "effects"
"""Key of a run's result: the effect of its first difference from A, by kind and region."""


class Effect(NamedTuple):
    """Effect of a decision within fifteen minutes, against A: share of SLO met, and waiting requests."""

    slo_met: float
    waiting: float


class DecisionPairs(NamedTuple):
    """Decisions of A and of another future, of one kind and in one region; that at *marked* is the first that differs."""

    rows: list[DecisionPair]
    marked: int


def compare(row: FutureSeed) -> None:
    """Store the differences that the run *row* was the last missing part of.

    Those of the first seed are stored with the decisions around them. Each seed stores its effects, since one seed does not
    distinguish an effect from chance.
    """
    runs = FutureSeed.objects.filter(
        future__what_if=row.future.what_if_id, seed=row.seed, state=WhatIfState.DONE, log__isnull=False
    ).select_related("future")
    logs = {each.future.letter: each for each in runs}
    if BASELINE not in logs or row.future.letter not in logs:
        return
    first = log_of(logs[BASELINE].log or b"")
    wanted = [row.future.letter] if row.future.letter != BASELINE else [each for each in logs if each != BASELINE]
    for letter in wanted:
        run, other = logs[letter], log_of(logs[letter].log or b"")
        try:
            made = differences(first, other)
        except ValueError:
            continue  # other demand: its decisions are about other requests
        effects = {f"{each.kind} {each.region}": [each.slo_met or 0.0, each.waiting] for each in made}
        FutureSeed.objects.filter(pk=run.pk).update(result={**run.result, EFFECTS: effects})
        if row.seed == FIRST_SEED:
            FutureSeed.objects.filter(pk=run.pk).update(pairs=_packed(first, other, made))
            Future.objects.filter(pk=run.future_id).update(decides=[_as_json(each, run.future) for each in made])


def effects_over_seeds(future: Future) -> dict[str, list[Effect]]:
    """Return effects of each first difference from A by kind and region, in every finished seed; none without it."""
    runs = future.runs.filter(state=WhatIfState.DONE).order_by("seed").values_list(f"result__{EFFECTS}", flat=True)
    known = [each for each in runs if each is not None]
    keys = {key for each in known for key in each}
    return {key: [Effect(*each.get(key, (0.0, 0.0))) for each in known] for key in keys}


def kept_of(row: WhatIf) -> set[str]:
    """Return letters of the futures whose decisions are stored with those of A."""
    kept = FutureSeed.objects.filter(future__what_if=row, seed=FIRST_SEED, pairs__isnull=False)
    return set(kept.values_list("future__letter", flat=True))


def compared(row: WhatIf, letter: str) -> dict[tuple[str, str], DecisionPairs]:
    """Return decisions of A and *letter* around each first difference, by (kind, region); empty if none is stored."""
    kept = FutureSeed.objects.filter(future__what_if=row, future__letter=letter, seed=FIRST_SEED)
    blob = kept.values_list("pairs", flat=True).first()
    if not blob:
        return {}
    known = json.loads(zlib.decompress(blob))
    return {
        (kind, region): DecisionPairs([DecisionPair(*row) for row in rows], marked)
        for kind, region, marked, rows in known
    }


def _packed(first: Log, other: Log, made: list[Difference]) -> bytes:
    kept = []
    for difference in made:
        rows, marked = around(first, other, difference)
        kept.append([difference.kind, difference.region, marked, [astuple(each) for each in rows]])
    return zlib.compress(json.dumps(kept).encode())


def _as_json(difference: Difference, future: Future) -> dict[str, Any]:
    sentence = f"{future.name} {difference.other.rstrip('.')}; as now {difference.first.rstrip('.')}."
    return {
        "at_s": round(difference.at_s, 1),
        "region": difference.region,
        "kind": difference.kind,
        "model": difference.model,
        "sentence": f"{region_title(difference.region)}, {difference.model}: {sentence}",
        "effect": _effect(difference),
        "waiting": difference.waiting,
        "slo_met": difference.slo_met,
    }


def signed(value: float, digits: int) -> str:
    """Format *value* with its sign, a true minus: "+1.2"."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def _effect(difference: Difference) -> str:
    """Describe the effect within fifteen minutes."""
    if difference.slo_met and abs(1000 * difference.slo_met) >= abs(difference.waiting):
        return f"{signed(100 * difference.slo_met, 1)} pt SLO met within 15 min, in this seed"
    return f"{signed(difference.waiting, 0)} waiting within 15 min, in this seed"
