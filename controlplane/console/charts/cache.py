"""Figures built once and kept for everybody who looks at the same thing."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from controlplane.console.charts.spec import Chart

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
