"""Several strategies as one, assigned by endpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from scheduling.scaling.each import ByEndpoint
from scheduling.scaling.endpoint import Advice, EndpointView, Move


class Assigned:
    """Strategies by (model, region). Each decides at multiples of its `tick_s`, for its endpoints together."""

    def __init__(self, strategies: Mapping[tuple[str, str], ByEndpoint]) -> None:
        self._of = dict(strategies)
        self._all = list({id(each): each for each in strategies.values()}.values())
        self.name = ", ".join(dict.fromkeys(each.name for each in self._all))
        self.tick_s = gcd(*(_tick_ms(each) for each in self._all)) / 1000
        self.uses_advice = any(each.uses_advice for each in self._all)
        self.looks_ahead = any(each.looks_ahead for each in self._all)

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`."""
        moves: list[Move] = []
        places: dict[int, list[int]] = {id(strategy): [] for strategy in self._all}
        for at, view in enumerate(views):
            if (strategy_of_it := self._of.get((view.model, view.region))) is not None:
                places[id(strategy_of_it)].append(at)
        for strategy in self._all:
            if round(1000 * now_s) % _tick_ms(strategy):
                continue
            own = places[id(strategy)]
            made = strategy.decide(now_s, [views[at] for at in own], [advice[at] for at in own])
            moves += [replace(move, endpoint=own[move.endpoint]) for move in made]
        return sorted(moves, key=lambda move: move.endpoint)


def _tick_ms(strategy: ByEndpoint) -> int:
    return max(1, round(1000 * strategy.tick_s))
