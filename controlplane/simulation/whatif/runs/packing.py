"""What a run keeps: columns and curves as JSON, and of the first seed who served each request; and reading them again."""

import io
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from controlplane.simulation.running import Simulated
from scheduling.simulation.measures.columns import Counted, by_class, columns, over_time, ttft_counts
from scheduling.simulation.measures.differences import Log

MOST_LOGGED: Final = 3_000_000
"""Requests of a run whose decisions are kept for a comparison."""
MOST_ROWS: Final = 5_000
"""Moves, and plans, that the result of a scenario keeps."""
FAST: Final = 1
"""Of zlib's levels."""
ARRAYS: Final = ("instance", "begin_s", "judged", "met", "arrival_s", "region", "model")


def packed(ran: Simulated, counted: Mapping[str, Counted]) -> dict[str, Any]:
    """Values of a `FutureSeed`, with a log of its decisions."""
    result, staged = ran.result, ran.staged
    whole = counted["all"]
    series = over_time(result, whole.until_s)
    # `took_s` is no part of it: the same run gives the same row.
    about = {name: value for name, value in ran.about.items() if name not in ("scenario", "took_s")}
    kept = {
        "about": about,
        "columns": columns(result, staged.promises, staged.prices, counted),
        "classes": by_class(result, staged.names, staged.promises, whole),
        "counters": {name: int(value) for name, value in result.counters.items() if value},
    }
    curves = {
        "ttft": {name: ttft_counts(result, each) for name, each in counted.items()},
        "series": series,
        "moves": [row for row in ran.tables()["moves"].rows if row[4]],
    }
    log = None
    if staged.requests.count <= MOST_LOGGED:
        log = _written(Log.of(result, staged.names.regions, staged.names.models, staged.promises, ran.made, series))
    return {"result": kept, "curves": zlib.compress(json.dumps(curves).encode()), "log": log}


def simulated(ran: Simulated) -> dict[str, Any]:
    """The result of a scenario simulated by itself, as `manage.py simulate --json`; moves and plans are cut."""
    result = ran.as_json()
    for name in ("moves", "plans"):
        result[f"{name}_made"], result[name] = len(result[name]), result[name][:MOST_ROWS]
    return result


def curves_of(blob: bytes | memoryview | None) -> dict[str, Any]:
    """What `packed` kept as curves; empty for none."""
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
    return zlib.compress(file.getbuffer(), FAST)  # it is kept for as long as the what-if runs
