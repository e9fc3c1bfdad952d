"""Tables of a what-if for files: the futures side by side, every run, curves; and the report as one HTML file."""

from collections.abc import Iterator
from typing import Any, Final

from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState

STATISTICS: Final = ("mean", "low", "high", "wide_low", "wide_high", "delta")
NUMBERS: Final = ("slo_met", *selectors.COLUMNS)
FUTURES_HEADER: Final = (
    "future", "name", "changes", "seeds_done", "verdict", *(f"{name}_{each}" for name in NUMBERS for each in STATISTICS),
)  # fmt: skip
RUN_COLUMNS: Final = (
    "requests", "judged", "missed", "slo_met", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "cost_usd",
    "cost_usd_per_h", "instance_hours", "queue_peak", "goodput_tokens_per_s",
)  # fmt: skip
RUNS_HEADER: Final = ("future", "name", "seed", "scope", *RUN_COLUMNS)
KEYS_HEADER: Final = ("future", "name", "key", "change")


def futures(row: WhatIf, scope: str = selectors.ALL) -> Iterator[tuple[Any, ...]]:
    """One row a future, by FUTURES_HEADER."""
    for each in selectors.comparison(row, scope)["futures"]:
        numbers = [(each[name] or {}).get(statistic) for name in NUMBERS for statistic in STATISTICS]
        yield each["letter"], each["name"], "; ".join(each["changes"]), each["seeds_done"], each["verdict"], *numbers


def runs(row: WhatIf) -> Iterator[tuple[Any, ...]]:
    """One row a run that is done and scope, by RUNS_HEADER."""
    done = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE).order_by("future__letter", "seed")
    for letter, name, seed, result in done.values_list("future__letter", "future__name", "seed", "result"):
        for scope, values in result["columns"].items():
            yield letter, name, seed, scope, *(values[column] for column in RUN_COLUMNS)


def keys(row: WhatIf) -> Iterator[tuple[Any, ...]]:
    """One row a key of the scenario that a future has otherwise than now, by KEYS_HEADER."""
    for future in row.futures.all():
        for line in selectors.full_diff(row, future):
            key, _, change = line.partition(": ")
            yield future.letter, future.name, key, change
