"""Shards of models whose new owner waits for what relays have open there.

It places nothing of such a shard before all relays that the last owner had have registered that: what waits at one would get
the room that another's still occupies. A relay that does not, because it died meanwhile, is waited for until a limit.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from controlplane.dispatch.port import Registered


class Awaited(Struct, eq=False):
    """*known*: relays that took part before, as those say that have *registered*."""

    until_s: float
    known: set[int]
    registered: set[int]


class Registrations:
    """*within_s*: limit of the wait; 0: there are no other relays."""

    def __init__(self, clock: Callable[[], float], within_s: float) -> None:
        self.clock, self.within_s = clock, within_s
        self._awaited: dict[str, Awaited] = {}
        """By shard."""

    def begin(self, shards: Iterable[str]) -> None:
        """Wait for what is open of *shards*, which this process has just taken over."""
        for shard in shards if self.within_s else ():
            self._awaited[shard] = Awaited(self.clock() + self.within_s, set(), set())

    def take(self, record: Registered) -> None:
        if (awaited := self._awaited.get(record.shard)) is not None:
            awaited.registered.add(record.relay)
            awaited.known.update(record.relays)

    def complete(self, shard: str) -> bool:
        """Whether all that is open of *shard* is known."""
        return not self._awaited or shard not in self._awaited

    def look(self) -> bool:
        """Return whether a shard has become complete since the last look, by its last relay or by time."""
        now_s = self.clock()
        done = [
            shard
            for shard, each in self._awaited.items()
            if (each.known and each.known <= each.registered) or now_s >= each.until_s
        ]
        for shard in done:
            del self._awaited[shard]
        return bool(done)
