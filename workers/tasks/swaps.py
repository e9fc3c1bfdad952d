"""Swaps of models on shared GPUs; sent by beat, and by every change of an instance that shares its GPUs."""

from controlplane.fleet.models import SwapState
from controlplane.fleet.swaps import services as swaps
from controlplane.fleet.swaps.selectors import open_swaps
from workers.celery import app


@app.task
def advance_swaps() -> int:
    """Advance every swap by one move, in a transaction each; return how many are in progress."""
    return sum(swaps.advance(row).state == SwapState.IN_PROGRESS for row in open_swaps())
