"""Demand by endpoint and minute, as planners and forecasters see it."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.bursts import arrival_cv
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.workload.requests import CHUNK, Requests

Floats = NDArray[np.float64]
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class DemandMinutes:
    """Demand of each endpoint's region, (endpoints, minutes): tokens a second, and requests."""

    prompt: Floats
    output: Floats
    requests: Floats

    @classmethod
    def of(cls, cluster: Cluster, requests: Requests, classes: Collection[int], minutes: int) -> "DemandMinutes":
        """Return the demand of *requests* of *classes* in the first *minutes*."""
        endpoint_of = np.array(cluster.nearest())
        count = len(cluster.endpoints)
        sums = np.zeros((3, count * minutes))
        for begin in range(0, requests.count, CHUNK):
            part = slice(begin, begin + CHUNK)
            minute = (requests.arrival_s[part] // MINUTE_S).astype(np.int64)
            taken = np.isin(requests.slo_class[part], list(classes)) & (minute < minutes)
            place = (endpoint_of[requests.model[part], requests.region[part]] * minutes + minute)[taken]
            sums[0] += np.bincount(place, requests.prompt_tokens[part][taken], sums.shape[1])
            sums[1] += np.bincount(place, requests.output_tokens[part][taken], sums.shape[1])
            sums[2] += np.bincount(place, minlength=sums.shape[1])
        prompt, output, asked = sums.reshape(3, count, minutes)
        return cls(prompt / MINUTE_S, output / MINUTE_S, asked)

    def after(self, *before: "DemandMinutes") -> "DemandMinutes":
        """Return *before*, in their order, followed by these minutes."""
        each = (*before, self)
        return DemandMinutes(
            *(np.hstack([getattr(one, name) for one in each]) for name in ("prompt", "output", "requests"))
        )

    def last(self, minutes: int) -> "DemandMinutes":
        """Return the last *minutes*."""
        first = self.prompt.shape[1] - minutes
        return DemandMinutes(self.prompt[:, first:], self.output[:, first:], self.requests[:, first:])

    def digest(self) -> bytes:
        """Return a digest of all demand."""
        return hashlib.sha256(b"".join(each.tobytes() for each in (self.prompt, self.output, self.requests))).digest()

    def arrival_cv(self, endpoint: int, now_s: float, behind_s: float = 4 * 3600.0) -> float:
        """Return the CV of arrivals over the *behind_s* before *now_s*, as live plans measure it."""
        until = int(now_s // MINUTE_S)
        return arrival_cv(self.requests[endpoint, max(0, until - round(behind_s / MINUTE_S)) : until])

    def rate(self, endpoint: int, now_s: float, behind_s: float = 3600.0) -> float:
        """Return prompt and output tokens per second over the *behind_s* before *now_s*; 0 at the start."""
        until = int(now_s // MINUTE_S)
        part = slice(max(0, until - round(behind_s / MINUTE_S)), until)
        total = self.prompt[endpoint, part] + self.output[endpoint, part]
        return float(total.mean()) if total.size else 0.0
