"""Throughput of a vLLM server's API process, which reads requests and writes tokens next to the engine.

One process serves all connections of an instance. Under many arrivals its share of a core, not the GPU, limits the
instance (measured: docs/plan/simulation.md). An iteration of the engine therefore takes at least as long as the process
needs to write the tokens emitted and, while requests wait to be read, to read one of them. It reads in order of
arrival, between the tokens of the streams: at least one in an iteration, and as many as it has time for. The engine,
and so its priorities, sees a request only then. A burst at an idle server is read at once.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Limits of the API process, each alone; infinity if unknown. Raises ValueError naming an invalid one."""

    requests_per_s: float = math.inf
    tokens_per_s: float = math.inf
    """Output tokens over all streams."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"front_end.{field.name} must be above 0, not {getattr(self, field.name)!r}")

    def time_s(self, tokens: float, requests: float) -> float:
        """Return the seconds to write *tokens* and to read *requests*."""
        return tokens / self.tokens_per_s + requests / self.requests_per_s

    def reads(self, duration_s: float, tokens: int) -> int:
        """Return the requests that are read by the end of an iteration of *duration_s* that emits *tokens*.

        0 without a limit on requests, which are then read at once.
        """
        if self.requests_per_s == math.inf:
            return 0
        return max(1, int((duration_s - tokens / self.tokens_per_s) * self.requests_per_s))


NO_LIMIT = FrontEnd()
