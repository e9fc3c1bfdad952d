"""A knob of an endpoint's policy is named where it is declared and where it acts; every other form is derived."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scheduling.policy import GROUP_ORDERS, KNOBS, MEASURED, ORDERS, ROUTERS, SETTINGS
from scheduling.queueing import groups, ordering
from scheduling.routing import requests_ahead, routers

ROOT = Path(__file__).parents[1]
PRODUCT = ("controlplane", "scheduling", "forecasting", "workers", "templates", "static")
MOST_FILES = 3
ORDINARY_WORDS = {"routing", "ordering"}
ALLOWED = {
    "dispatch_round_trip_ms": 5,  # the comparison and a fork put in what was measured; donated instances have it too
    "eviction_limit": 5,  # the live and the simulated scheduler act on it, bundles and an experiment set it
    "follow_kv_events": 5,  # servers are started with it, the simulator decides by it and sizes a table, an experiment
    "group_order": 4,  # live queue, simulator, and the ranks of a fork
    "group_batches": 5,  # live queue, first and later sizes in the simulator, and an experiment
    "ordering_stretch": 8,  # queue and runs, live and simulated, a fork's queue, and two experiments
    "queue_bound": 5,  # endpoints that are gone take none, System compares with what waits, an experiment varies it
    "region_threshold": 8,  # routing, moving and falling back, live and simulated, of donated instances too; bundles set it
    "requests_ahead_limit": 6,  # live, at the start of a simulation, when an instance changes its model or is donated
    "room_margin": 4,  # live, at the start of a simulation, and when an instance changes its model
    "swap_by_queue": 6,  # live and simulated swapping; two files name the function that does it
}
"""Knobs on which more files act, with the reason."""


@cache
def words_of() -> dict[Path, frozenset[str]]:
    """The words of every source."""
    paths = (path for package in PRODUCT for path in (ROOT / package).rglob("*"))
    return {
        path: frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        for path in paths
        if path.suffix in (".py", ".html", ".js") and "migrations" not in path.parts
    }


def named_in(*words: str) -> Iterator[Path]:
    return (path for path, its in words_of().items() if not its.isdisjoint(words))


@pytest.mark.parametrize("name", sorted(KNOBS.keys() - ORDINARY_WORDS))
def test_a_knob_is_named_in_few_files(name):
    setting = KNOBS[name].knob.setting
    files = sorted(str(path.relative_to(ROOT)) for path in named_in(name, *filter(None, [setting])))
    assert len(files) <= ALLOWED.get(name, MOST_FILES), files


def test_arrays_hold_the_codes_of_the_kernels():
    assert list(ROUTERS) == sorted(routers.POLICY_CODES, key=lambda name: routers.POLICY_CODES[name])
    assert list(ORDERS) == sorted(ordering.ORDERINGS, key=lambda name: ordering.ORDERINGS[name])
    assert list(GROUP_ORDERS) == sorted(groups.GROUP_ORDERS, key=lambda name: groups.GROUP_ORDERS[name])
    assert requests_ahead.MEASURED == MEASURED


def test_a_value_out_of_range_is_refused_by_name():
    for name, declared in (*KNOBS.items(), *SETTINGS.items()):
        wrong = [declared.knob.ge - 1] if declared.knob.ge is not None else []
        wrong += [declared.knob.gt] if declared.knob.gt is not None else []
        wrong += [declared.knob.le + 1] if declared.knob.le is not None else []
        wrong += [float("nan")] if declared.type is float else []
        wrong += ["no such name"] if declared.knob.choices else []
        assert all(declared.problem(value) for value in wrong), name
        assert not declared.problem(declared.default), name
