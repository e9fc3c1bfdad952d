"""Samples of the fleet at regular times of a simulation: the series of its result."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.cluster.world import State, World


class Samples:
    """Samples every *step_s* seconds from 0; none for 0.

    Raises ValueError for an invalid step.
    """

    def __init__(self, step_s: float) -> None:
        if not 0 <= step_s < np.inf:
            raise ValueError(f"sample_s must be a number from 0 up, not {step_s}")
        self._step_s = step_s
        self._taken: list[dict[str, NDArray[Any]]] = []
        self.next_s = 0.0 if step_s else np.inf
        """When the next one is taken; infinity for never."""

    def take(self, world: World, states: NDArray[np.int8]) -> None:
        """Take a sample, with up-to-date fleet arrays; *states* are `State` by instance."""
        fleet = world.fleet
        count = world.lives.fits.shape[0]
        endpoint = fleet.endpoint % count  # donated instances count where they are from

        def by_endpoint(values: NDArray[Any]) -> NDArray[np.int64]:
            return np.bincount(endpoint, weights=values, minlength=count).astype(np.int64)

        ready = states == State.READY
        self._taken.append(
            {
                "waiting": world.waiting.size.reshape(-1, count).sum(axis=0),
                "running": by_endpoint(fleet.running),
                "kv_tokens": by_endpoint(fleet.kv_tokens),
                "kv_capacity_tokens": by_endpoint(fleet.kv_capacity_tokens * ready),
                "ready": by_endpoint(ready),
                "instance_running": fleet.running.copy(),
                "instance_kv_tokens": fleet.kv_tokens.astype(np.int32),
                "instance_state": states.copy(),
            }
        )
        self.next_s = len(self._taken) * self._step_s

    def series(self) -> dict[str, NDArray[Any]] | None:
        """Return all samples, samples first, with their times in `t_s`; None without any."""
        if not self._taken:
            return None
        t_s = np.arange(len(self._taken)) * self._step_s
        return {"t_s": t_s} | {name: np.stack([sample[name] for sample in self._taken]) for name in self._taken[0]}
