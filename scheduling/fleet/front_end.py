"""Throughput of a vLLM server's API process, which reads requests and writes tokens next to the engine.

One process serves all connections of an instance. Under many arrivals its share of a core, not the GPU, limits the
instance (measured: docs/simulation.md). An iteration of the engine therefore takes at least as long as the process
needs for the tokens emitted, and for the requests that start and were read while others ran: a burst at an idle server
is read at once, a request among streams between their tokens.
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


NO_LIMIT = FrontEnd()
