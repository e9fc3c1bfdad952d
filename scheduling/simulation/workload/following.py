"""Concatenation of the requests of a simulation."""

import numpy as np

from scheduling.simulation.workload.requests import Requests


def follow(first: Requests, later: Requests) -> Requests:
    """Return *first* followed by *later*, which all came after them."""
    columns = {
        name: np.concatenate([getattr(first, name), getattr(later, name)])
        for name in Requests._fields
        if not name.startswith("prefix")
    }
    prefixes = first.prefix_first.size > 0 or later.prefix_first.size > 0
    starts = np.zeros(0, np.int64)
    if prefixes:
        counts = [
            np.diff(each.prefix_first) if each.prefix_first.size else np.zeros(each.count, np.int64)
            for each in (first, later)
        ]
        starts = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)
    hashes = np.concatenate([first.prefix_hashes, later.prefix_hashes])
    return Requests(**columns, prefix_first=starts, prefix_hashes=hashes)
