"""Tables of output lengths: measures by model and tenant, versions side by side, and kinds to train."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.console.formats import percent
from controlplane.lengths import selectors, services, training
from controlplane.lengths.models import LengthVersion, Measures, VersionState
from controlplane.lengths.selectors import SHADOW, Scope
from forecasting.lengths import TEXTLESS, unavailable_reason

VERSIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Line:
    """One model of one tenant."""

    model: str
    tenant: str
    measures: Measures


def lines(by_series: Mapping[tuple[str, str], Measures]) -> list[Line]:
    """Return rows of *by_series*, which is by model and tenant."""
    return [Line(*names, measures) for names, measures in sorted(by_series.items(), key=lambda item: item[0])]


def version_rows(by_predictor: Mapping[str, Measures], scope: Scope | None = None) -> list[LengthVersion]:
    """Return the newest versions with how they fare live.

    *gain* is the shadow's, as a share of the active version's error in *scope*.
    """
    assigned = services.assigned()
    rows = list(selectors.versions(VERSIONS_SHOWN))
    for row in rows:
        own = [by_predictor[name] for name in (str(row), f"{SHADOW} {row}") if name in by_predictor]
        measured = selectors.total(own)
        shadowing = row == assigned.shadow
        both = selectors.compared(str(assigned.active), f"{SHADOW} {row}", scope) if scope and shadowing else None
        gain = selectors.gain(*both) if both else None
        vars(row).update(
            measured={"requests": measured.requests or None, "mae": measured.mae, "acc_100": measured.acc_100},
            gain=gain,
            gain_percent=percent(abs(gain or 0.0)) if both else "",
            unavailable_reason=unavailable_reason(row.kind),
            chosen=row.state == VersionState.ACTIVE,
        )
    return rows


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that can be trained; *missing* is the number of samples it still needs."""

    name: str
    samples: int
    missing: int
    text: bool
    """It reads prompts, so it learns only from tenants that keep them."""
    unavailable_reason: str
    """Reason why it cannot be trained or used here; empty if it can."""


def kinds() -> list[Kind]:
    """The kinds of model that can be trained, with the samples available for each."""
    return [
        Kind(kind, samples, max(0, wanted - samples), kind not in TEXTLESS, unavailable_reason(kind))
        for kind, samples, wanted in training.ready()
    ]
