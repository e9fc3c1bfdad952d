"""What decides between a future and A: kept with the future as soon as the first seed of both is done."""

import json
import zlib
from dataclasses import astuple
from typing import Any, Final, NamedTuple

from controlplane.simulation.whatif.changes.base import clock, region_title
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.runs import packing
from scheduling.simulation.measures.differences import Difference, Log, differences
from scheduling.simulation.measures.pairs import Pair, around

FIRST_SEED: Final = 1
BASELINE: Final = "A"


class Compared(NamedTuple):
    """Decisions of A and of another future, of one kind and in one region; that at *marked* is the first that differs."""

    rows: list[Pair]
    marked: int


def compare(row: FutureSeed) -> None:
    """Find the differences that the run *row* was the last to be waited for."""
    if row.seed != FIRST_SEED:
        return
    runs = FutureSeed.objects.filter(
        future__what_if=row.future.what_if_id, seed=FIRST_SEED, state=WhatIfState.DONE, log__isnull=False
    ).select_related("future")
    logs = {each.future.letter: each for each in runs}
    if BASELINE not in logs or row.future.letter not in logs:
        return
    first = packing.log_of(logs[BASELINE].log or b"")
    wanted = [row.future.letter] if row.future.letter != BASELINE else [each for each in logs if each != BASELINE]
    for letter in wanted:
        future, other = logs[letter].future, packing.log_of(logs[letter].log or b"")
        try:
            made = differences(first, other)
        except ValueError:
            continue  # its demand is another: its decisions are about other requests
        FutureSeed.objects.filter(pk=logs[letter].pk).update(pairs=_packed(first, other, made))
        Future.objects.filter(pk=future.pk).update(decides=[_as_json(each, future) for each in made])


def kept_of(row: WhatIf) -> set[str]:
    """Letters of the futures whose decisions are kept beside those of A."""
    kept = FutureSeed.objects.filter(future__what_if=row, seed=FIRST_SEED, pairs__isnull=False)
    return set(kept.values_list("future__letter", flat=True))


def compared(row: WhatIf, letter: str) -> dict[tuple[str, str], Compared]:
    """What A and the future *letter* decide around each first difference, by (kind, region); empty if none is kept."""
    kept = FutureSeed.objects.filter(future__what_if=row, future__letter=letter, seed=FIRST_SEED)
    blob = kept.values_list("pairs", flat=True).first()
    if not blob:
        return {}
    known = json.loads(zlib.decompress(blob))
    return {(kind, region): Compared([Pair(*row) for row in rows], marked) for kind, region, marked, rows in known}


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


def _effect(difference: Difference) -> str:
    """What came of it in the fifteen minutes after, in words."""
    if difference.slo_met and abs(1000 * difference.slo_met) >= abs(difference.waiting):
        return f"{100 * difference.slo_met:+.1f} pt SLO met by {clock(difference.at_s + 900)}"
    return f"{difference.waiting:+.0f} waiting by {clock(difference.at_s + 900)}"
