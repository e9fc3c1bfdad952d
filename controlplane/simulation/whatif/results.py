"""Results of runs: what a row keeps of one."""

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from controlplane.simulation.running import Simulated
from scheduling.applications.standings import follows_runs
from scheduling.simulation.measures.columns import Counted, columns, latency_over_time, over_time
from scheduling.simulation.measures.results import runs_by_application
from scheduling.simulation.staging import Stage


def packed(ran: Simulated, counted: Mapping[str, Counted]) -> dict[str, Any]:
    """Return the values of a `FutureSeed`."""
    result, whole = ran.result, counted["all"]
    # `took_s` is no part of it: the same run gives the same row.
    about = {name: value for name, value in ran.about.items() if name not in ("scenario", "took_s")}
    kept = {
        "about": about,
        "columns": columns(result, counted),
        "runs": runs_by_application(result, whole.from_s, whole.until_s),
    }
    curves = {"latency": latency_over_time(result, whole), "series": over_time(result, whole.until_s)}
    return {"result": kept, "curves": zlib.compress(json.dumps(curves).encode())}


NO_RUNS: Final = "Its order goes by application runs, and no request of that time is a call of one."
NO_PREFIXES: Final = "Its router goes by prefixes, and it is not known which prompts of that time begin alike."


def unranked(staged: Stage) -> str:
    """Say why a simulation of recorded requests cannot be compared with others: these lack what its policies go by."""
    policies = [staged.cluster.policy(key) for key in staged.cluster.endpoints]
    if staged.runs is None and any(map(follows_runs, policies)):
        return NO_RUNS
    by_prefix = any(each.routing == "least_delay" for each in policies)
    return NO_PREFIXES if by_prefix and not staged.knows_prefixes else ""


def curves_of(blob: bytes | memoryview | None) -> dict[str, Any]:
    """Return the curves that `packed` stored; empty without any."""
    return dict(json.loads(zlib.decompress(blob))) if blob else {}
