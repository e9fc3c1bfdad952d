"""How SLOs were met in the last minutes: of the fleet, each model and each endpoint, by SLO class."""

from collections.abc import Callable, Iterable

from controlplane.fleet.attainment import Attainment
from controlplane.gateway.monitoring.windows import Count, Windows

SLO_WINDOW_S = 300


class ServiceLevels:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows = Windows(histograms=False)
        self._objectives: dict[str, float] = {}  # of classes of which a request was judged, as it was promised last

    def judge(self, scopes: Iterable[str], slo_class: str, objective: float, met: bool) -> None:
        """Count a verdict on a request of *slo_class* for each of *scopes*."""
        self._objectives[slo_class] = objective
        self._windows.advance(self._clock())
        groups = tuple(self._windows.group(_name(scope, slo_class)) for scope in scopes)
        self._windows.count(groups, Count.SLO_JUDGED)
        self._windows.count(groups, Count.SLO_MET, int(met))

    def of(self, scope: str) -> list[Attainment]:
        """Every class of which a request was judged lately in *scope*, by name."""
        windows = self._windows
        windows.advance(self._clock())
        rows = []
        for slo_class, objective in sorted(self._objectives.items()):
            if (group := windows.known(_name(scope, slo_class))) is not None:
                met, judged = (windows.total(group, what, SLO_WINDOW_S) for what in (Count.SLO_MET, Count.SLO_JUDGED))
                rows.append(Attainment(slo_class, met, judged, objective))
        return [row for row in rows if row.judged]


def _name(scope: str, slo_class: str) -> str:
    return f"{slo_class} in {scope}"
