"""Tables of output lengths: measures by model and tenant, versions side by side, and trainings."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from django.utils import timezone

from controlplane.console.formats import percent
from controlplane.fleet.models.serving import LengthModelKind
from controlplane.lengths import selectors, services, training
from controlplane.lengths.models import LengthTraining, LengthVersion, Measures, VersionState
from controlplane.lengths.selectors import SHADOW, Duel, Scope
from forecasting.lengths import TEXTLESS, rests

VERSIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Line:
    """One model of one tenant."""

    model: str
    tenant: str
    measures: Measures
    drifting: bool = False


def lines(by_series: Mapping[tuple[str, str], Measures], drifting: set[tuple[str, str]]) -> list[Line]:
    """Return rows of *by_series*, which is by model and tenant."""
    return [
        Line(model, tenant, measures, (model, tenant) in drifting)
        for (model, tenant), measures in sorted(by_series.items(), key=lambda item: item[0])
    ]


def version_rows(by_predictor: Mapping[str, Measures], duels: Mapping[int, Duel]) -> list[LengthVersion]:
    """Return the newest versions with how they fare live, and the models that they answer for.

    *gain* is a shadow's, as a share of the active version's error.
    """
    models: dict[int, list[str]] = defaultdict(list)
    for model, version_in_use in services.assigned().of_model.items():
        models[version_in_use.number].append(model)
    rows = list(selectors.versions(VERSIONS_SHOWN))
    for row in rows:
        own = [by_predictor[name] for name in (str(row), f"{SHADOW} {row}") if name in by_predictor]
        measured = selectors.total(own)
        duel = duels.get(row.number)
        vars(row).update(
            measured={"requests": measured.requests or None, "mae": measured.mae, "acc_100": measured.acc_100},
            gain=duel.gain if duel else None,
            gain_percent=percent(abs(duel.gain or 0.0)) if duel else "",
            models=sorted(models[row.number]),
            rests=rests(row.kind),
            chosen=row.state == VersionState.ACTIVE,
        )
    return rows


def compare(scope: Scope) -> dict[int, Duel]:
    """Compare each shadow with the active version on requests that both predicted; by number, newest first."""
    assigned = services.assigned()
    duels = {
        shadow.number: selectors.duel(str(assigned.active), f"{SHADOW} {shadow}", scope) for shadow in assigned.shadows
    }
    return {number: duel for number, duel in duels.items() if duel is not None}


# Trainings

TRAININGS_SHOWN: Final = 5
SHOWN_FOR: Final = timedelta(hours=1)
"""After a training has ended."""


def training_rows() -> list[LengthTraining]:
    """Return trainings that wait, run or ended within the last hour, newest first."""
    since = timezone.now() - SHOWN_FOR
    rows = selectors.trainings(TRAININGS_SHOWN)
    return [row for row in rows if row.ended_at is None or row.ended_at > since]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that can be trained; *missing* is the number of samples it still needs."""

    name: str
    title: str
    samples: int
    missing: int
    text: bool
    """It reads prompts, so it learns only from tenants that keep them."""
    rests: str
    """Reason why it cannot be trained or used here; empty if it can."""


def kinds() -> list[Kind]:
    """The kinds of model that can be trained, with the samples available for each."""
    titles = dict(LengthModelKind.choices)
    return [
        Kind(kind, titles[kind], samples, max(0, wanted - samples), kind not in TEXTLESS, rests(kind))
        for kind, samples, wanted in training.ready()
        if kind in titles
    ]
