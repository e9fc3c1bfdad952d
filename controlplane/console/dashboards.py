"""The charts of live pages, built once for each new sample and kept for everybody who looks at the same thing."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from controlplane.console import charts, history, tiles
from controlplane.console.charts import Chart
from controlplane.console.filters import View
from controlplane.console.selectors import region_names
from controlplane.console.state import LiveState
from controlplane.fleet.models import Instance

KEPT = 64

_built: OrderedDict[Hashable, list[Chart]] = OrderedDict()
_lock = Lock()


def once(key: Hashable, build: Callable[[], list[Chart]]) -> list[Chart]:
    """What *build* makes, made once for each *key* while it is asked for."""
    with _lock:
        if key in _built:
            _built.move_to_end(key)
            return _built[key]
    made = build()
    with _lock:
        _built[key] = made
        while len(_built) > KEPT:
            _built.popitem(last=False)
    return made


def _samples(state: LiveState, view: View) -> list[history.Sample]:
    now_s = state.history[-1]["ts"] if state.history else time.time()
    return history.window(state.history, view.range_s, now_s)


def _stamp(state: LiveState) -> float:
    return state.history[-1]["ts"] if state.history else 0.0


def overview(state: LiveState, view: View) -> list[Chart]:
    def build() -> list[Chart]:
        samples = _samples(state, view)
        table = state.tables["instances"]
        pairs = zip(table["name"], table["model"], strict=True)
        names = [name for name, model in pairs if not view.model or model == view.model]
        return [
            charts.time_to_first_token(samples, view.model),
            charts.demand(samples, view.model, view.demand, dict(region_names())),
            charts.kv_heat_map(samples, names),
        ]

    return once(("overview", view.model, view.range_min, view.demand, _stamp(state)), build)


def instance(state: LiveState, view: View, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = _samples(state, view)
        return [
            charts.instance_load(samples, row.name, row.max_num_seqs),
            charts.instance_kv(samples, row.name),
        ]

    return once(("instance", row.pk, row.name, view.range_min, _stamp(state)), build)


def sparks(state: LiveState, view: View) -> list[str]:
    """The line of each tile over the range, as points of an SVG polyline."""
    samples = _samples(state, view)
    return [tiles.spark(history.tile_series(samples, tile.field, view.model)) for tile in tiles.TILES]
