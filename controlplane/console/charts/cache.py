"""Figures built once for all browsers that show the same data."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

KEPT = 64
Made = TypeVar("Made")

_built: OrderedDict[Hashable, Any] = OrderedDict()
_lock = Lock()


def once(key: Hashable, build: Callable[[], Made]) -> Made:
    """Return the result of *build*, computed once per *key* and kept while in use."""
    with _lock:
        if key in _built:
            _built.move_to_end(key)
            known: Made = _built[key]
            return known
    made = build()
    with _lock:
        _built[key] = made
        while len(_built) > KEPT:
            _built.popitem(last=False)
    return made
