"""Results of runs: what a row keeps of one, and its first decision that differs from that of A."""

import io
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from controlplane.fleet.models.hardware import region_title
from controlplane.simulation.running import Simulated
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIfState
from scheduling.applications.standings import follows_runs
from scheduling.simulation.measures.columns import Counted, columns, latency_over_time, over_time
from scheduling.simulation.measures.differences import Log, differences
from scheduling.simulation.measures.results import runs_by_application
from scheduling.simulation.staging import Stage

MAX_LOGGED: Final = 3_000_000
"""Maximum requests of a run whose decisions are stored for a comparison."""
MAX_ROWS: Final = 5_000
"""Maximum moves, and plans, in the result of a scenario."""
FAST: Final = 1
"""Of zlib's levels."""
ARRAYS: Final = ("instance", "begin_s", "judged", "met", "in_run", "arrival_s", "region", "model")


def packed(ran: Simulated, counted: Mapping[str, Counted], seed: int) -> dict[str, Any]:
    """Return the values of a `FutureSeed`; of the first seed with a log of its decisions."""
    result, staged = ran.result, ran.staged
    whole = counted["all"]
    series = over_time(result, whole.until_s)
    # `took_s` is no part of it: the same run gives the same row.
    about = {name: value for name, value in ran.about.items() if name not in ("scenario", "took_s")}
    kept = {
        "about": about,
        "columns": columns(result, counted),
        "runs": runs_by_application(result, whole.from_s, whole.until_s),
    }
    curves = {
        "latency": latency_over_time(result, whole),
        "series": series,
    }
    log = None
    if seed == FIRST_SEED and staged.requests.count <= MAX_LOGGED:
        log = _written(Log.of(result, series))
    return {"result": kept, "curves": zlib.compress(json.dumps(curves).encode()), "log": log}


NO_RUNS: Final = "Its order goes by application runs, and no request of that time is a call of one."
NO_PREFIXES: Final = "Its router goes by prefixes, and it is not known which prompts of that time begin alike."


def unranked(staged: Stage) -> str:
    """Say why a simulation of recorded requests cannot be compared with others: these lack what its policies go by."""
    policies = [staged.cluster.policy(key) for key in staged.cluster.endpoints]
    if staged.runs is None and any(map(follows_runs, policies)):
        return NO_RUNS
    by_prefix = any(each.routing == "least_delay" for each in policies)
    return NO_PREFIXES if by_prefix and not staged.knows_prefixes else ""


def simulated(ran: Simulated) -> dict[str, Any]:
    """Return the result of a scenario simulated by itself, as `manage.py simulate --json`; moves and plans are cut."""
    result = ran.as_json()
    for name in ("moves", "plans"):
        result[f"{name}_made"], result[name] = len(result[name]), result[name][:MAX_ROWS]
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


def compare(row: FutureSeed) -> None:
    """Store the first decision of each future that differs from A's, once the first seeds of both are done."""
    runs = FutureSeed.objects.filter(
        future__what_if=row.future.what_if_id, seed=FIRST_SEED, state=WhatIfState.DONE, log__isnull=False
    )
    logs = {letter: log for letter, log in runs.values_list("future__letter", "log") if log is not None}
    if row.seed != FIRST_SEED or BASELINE not in logs:
        return
    first, letter = log_of(logs[BASELINE]), row.future.letter
    for future in row.future.what_if.futures.filter(letter__in=logs.keys() - {BASELINE}):
        if letter in (BASELINE, future.letter) and (sentence := _first_difference(first, log_of(logs[future.letter]))):
            Future.objects.filter(pk=future.pk).update(first_difference=sentence)


def _first_difference(first: Log, other: Log) -> str:
    """Describe the earliest decision in which the two differ; empty for none, or where they have other requests."""
    try:
        made = min(differences(first, other), key=lambda each: each.at_s, default=None)
    except ValueError:
        return ""
    if made is None:
        return ""
    decisions = f"it {made.other.rstrip('.')}; as now {made.first.rstrip('.')}"
    return f"First differs at {made.at_s / 60:.1f} min, {region_title(made.region)}, {made.model}: {decisions}."
