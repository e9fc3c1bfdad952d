"""Regions that go dark: nearly all of their instances stop answering at about the same time. Such a region is left as a
whole, and returned to with care.

One silent instance may hang; a region of them has lost its network or its power, and its instances did not fail one by one.
The evidence is silence while instances elsewhere answer, so a gateway that hears nothing at all blames no region. A region
that answers again for a while (longer after each departure) is given a growing share of what its instances run at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

LOOK_S: Final = 0.2
"""Period of `look`."""
LATE_S: Final = 0.35
"""Time since the last look from which one is late: the gateway itself was busy, and what it has not heard says nothing."""
LOOKS: Final = 2
"""Looks in a row that must see the silence: the first may come before answers that are there already are read."""
SILENT_S: Final = 1.5
"""Silence after which an instance counts; with a heartbeat a second, the region is left within 2 s."""
UNANSWERED_S: Final = 0.5
"""Least age of the heartbeat that it leaves unanswered."""
SILENT_SHARE: Final = 0.9
MIN_INSTANCES: Final = 2
"""Instances of a region below which each is judged alone."""
RETURN_S: Final = 2.0
"""Time for which a region must answer before it gets requests, after its first departure; doubled for each further one."""
MAX_RETURN_S: Final = 300.0
FORGIVEN_S: Final = 600.0
"""Time since the last return after which a departure counts as a first."""
FIRST_SHARE: Final = 1 / 16
DOUBLED_S: Final = 3.0
"""Period in which the share of a returning region doubles."""


class Sight(NamedTuple):
    """Instances of a region that should answer, and those of them that are silent."""

    instances: int
    silent: int

    @property
    def is_silent(self) -> bool:
        return self.instances >= MIN_INSTANCES and self.silent >= SILENT_SHARE * self.instances


@dataclass(slots=True)
class _Region:
    dark: bool = False
    looks: int = 0  # in a row that saw it silent
    answers_s: float = math.inf  # since when it has answered, while it is dark
    returned_s: float = -math.inf
    departures: int = 0  # in a row

    @property
    def wait_s(self) -> float:
        return min(MAX_RETURN_S, RETURN_S * 2.0 ** (self.departures - 1))


class DarkRegions:
    """Call `look` every `LOOK_S`."""

    def __init__(self) -> None:
        self._regions: dict[str, _Region] = {}
        self._looked_s = -math.inf

    def remember(self, region: str) -> None:
        """Take over a *region* that another process left as dark."""
        self._regions[region] = _Region(dark=True, departures=1)

    def return_wait_s(self, region: str) -> float:
        """Return the time for which *region*, which is dark, must answer before it gets requests."""
        return self._regions[region].wait_s

    def look(self, seen: Mapping[str, Sight], now_s: float) -> dict[str, bool]:
        """Return the regions that changed: True where one went dark, False where it is returned to."""
        late, self._looked_s = now_s - self._looked_s > LATE_S, now_s
        answering = {name for name, sight in seen.items() if sight.silent < sight.instances and not sight.is_silent}
        changed = dict[str, bool]()
        for name in seen.keys() | self._regions.keys():
            sight, region = seen.get(name, Sight(0, 0)), self._regions.setdefault(name, _Region())
            if region.dark:
                region.answers_s = math.inf if sight.is_silent else min(region.answers_s, now_s)
                if now_s - region.answers_s >= region.wait_s:
                    region.dark, region.returned_s = False, now_s
                    changed[name] = False
                continue
            region.looks = region.looks + 1 if sight.is_silent and answering - {name} and not late else 0
            if region.looks >= LOOKS:
                first = now_s - region.returned_s > FORGIVEN_S
                region.dark, region.looks, region.answers_s = True, 0, math.inf
                region.departures = 1 if first else region.departures + 1
                changed[name] = True
        return changed

    def is_suspect(self, region: str) -> bool:
        """Whether the next look may find *region* dark."""
        return self._regions[region].looks > 0

    def share(self, region: str, now_s: float) -> float:
        """Return the share of what its instances run at once that *region* is given: 0 while dark, 1 long after."""
        known = self._regions.get(region)
        if known is None or known.dark:
            return 1.0 if known is None else 0.0
        since_s = min(now_s - known.returned_s, FORGIVEN_S)
        return min(1.0, math.ldexp(FIRST_SHARE, int(since_s / DOUBLED_S)))
