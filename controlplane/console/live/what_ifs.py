"""A what-if as its page follows it: the progress of each future, and its columns as seeds end."""

import re
from typing import Any, Final

from controlplane.console.live.deltas import Table, columnar
from controlplane.simulation.whatif import selectors

TOPIC: Final = re.compile(r"what-if:[0-9]{1,18}")
PROGRESS: Final = (
    "key", "name", "state", "phase", "done", "seed", "seeds", "seeds_done", "eta_s", "elapsed_s", "error",
)  # fmt: skip
"""Columns of `what-if:ID`: first a row of the whole, with an empty key, then one a future by its letter."""
RESULTS: Final = ("key", "seeds_done", "verdict", "holds", "slo_met", *selectors.COLUMNS)
"""Columns of `results:ID`, a row a future: numbers are {mean, low, high, wide_low, wide_high, delta}, or null."""


def tables_in(topic: str) -> tuple[str, ...]:
    """The tables of `what-if:ID`."""
    return topic, topic.replace("what-if", "results", 1)


def number_of(topic: str) -> int | None:
    """The what-if that *topic* is about; None if it is about something else."""
    return int(topic.partition(":")[2]) if TOPIC.fullmatch(topic) else None


def tables_of(number: int, before: dict[str, Table]) -> dict[str, Table]:
    """The tables of the what-if *number*; of *before*, those read last, its results stay while no further run is done."""
    topic = f"what-if:{number}"
    names = tables_in(topic)
    made = selectors.progress(number)
    if made is None:
        return {}
    whole = {**made, "key": "", "seeds": made["runs"], "seeds_done": made["runs_done"]}
    futures = [{**each, "key": each["letter"], "elapsed_s": each["took_s"]} for each in made["futures"]]
    progress = columnar([whole, *futures], PROGRESS)
    old = before.get(names[0])
    if old is not None and names[1] in before and old["seeds_done"] == progress["seeds_done"]:
        return {names[0]: progress, names[1]: before[names[1]]}
    return {names[0]: progress, names[1]: columnar(_results(number), RESULTS)}


def _results(number: int) -> list[dict[str, Any]]:
    row = selectors.what_if(number)
    return [] if row is None else [{**each, "key": each["letter"]} for each in selectors.comparison(row)["futures"]]
