"""Shards of models whose new owner waits for what relays have open there.

It places nothing of such a shard before all relays that the last owner had have registered that: what waits at one would get
the room that another's still occupy.
"""

from collections.abc import Callable, Iterable

from controlplane.dispatch.port import Registered


class Registrations:
    """*within_s*: longest wait, as for a relay that has died meanwhile; 0: there are no other relays."""

    def __init__(self, clock: Callable[[], float], within_s: float) -> None:
        self.clock, self.within_s = clock, within_s
        self._awaited: dict[str, tuple[float, set[int], set[int]]] = {}
        """By shard: until when, the relays of its last owner as others say, and those that have registered."""

    def begin(self, shards: Iterable[str]) -> None:
        """Wait for what is open of *shards*, which this process has just taken over."""
        for shard in shards if self.within_s else ():
            self._awaited[shard] = self.clock() + self.within_s, set(), set()

    def take(self, record: Registered) -> None:
        if record.shard in self._awaited:
            _, known, registered = self._awaited[record.shard]
            known.update(record.relays)
            registered.add(record.relay)

    def complete(self, shard: str) -> bool:
        """Whether all that is open of *shard* is known."""
        return shard not in self._awaited

    def look(self) -> bool:
        """Return whether a shard has become complete since the last look, by its last relay or by time."""
        before, now_s = len(self._awaited), self.clock()
        self._awaited = {
            shard: each
            for shard, each in self._awaited.items()
            if now_s < each[0] and not (each[1] and each[1] <= each[2])
        }
        return len(self._awaited) < before
