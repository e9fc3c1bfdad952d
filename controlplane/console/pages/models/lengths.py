"""Predicted output lengths: one line about a model, the versions that predict, and what can be trained."""

from datetime import datetime
from typing import Any

from controlplane.console.formats import percent
from controlplane.lengths import selectors, services, training
from controlplane.lengths.models import LengthVersion, VersionState
from controlplane.lengths.selectors import PRIOR, SHADOW
from forecasting.lengths import TEXTLESS, unavailable_reason

OVER_H = 24
VERSIONS_SHOWN = 6
MISCALIBRATED = 0.05  # of requests, more or fewer than 90% within the 0.9 quantile
BY_PRIOR = 0.10  # of requests


def line_of(model: str, now: datetime) -> dict[str, Any]:
    """Return the accuracy for *model* over a day, what predicted, and why that is not enough to route and plan by."""
    by_predictor = selectors.by(selectors.scope_of(now, OVER_H, model), "predictor")
    whole = selectors.total(by_predictor.values())
    shares = {name: each.requests / whole.requests for name, each in by_predictor.items() if whole.requests}
    doubts = []
    if (prior := shares.get(PRIOR, 0.0)) > BY_PRIOR:
        doubts.append(f"for {percent(prior)} the length model was late or failed, and the mean of their class stood in")
    if whole.coverage_upper is not None and abs(whole.coverage_upper - 0.9) > MISCALIBRATED:
        doubts.append(f"{percent(whole.coverage_upper)} of answers are within the 0.9 quantile, and 90% should be")
    by = ", ".join(f"{percent(each)} by {name}" for name, each in sorted(shares.items(), key=lambda item: -item[1]))
    return {"measures": whole, "by": by, "doubts": doubts}


def version_rows(now: datetime) -> list[LengthVersion]:
    """Return the newest versions with how they fare live; *gain* is the shadow's, as a share of the active one's error."""
    scope, assigned = selectors.scope_of(now, OVER_H), services.assigned()
    by_predictor = selectors.by(scope, "predictor", shadows=True)
    rows = list(selectors.versions(VERSIONS_SHOWN))
    for row in rows:
        own = [by_predictor[name] for name in (str(row), f"{SHADOW} {row}") if name in by_predictor]
        measured = selectors.total(own)
        in_shadow = row == assigned.shadow
        both = selectors.compared(str(assigned.active), f"{SHADOW} {row}", scope) if in_shadow else None
        gain = selectors.gain(*both) if both else None
        vars(row).update(
            measured={"requests": measured.requests or None, "mae": measured.mae},
            gain=gain,
            gain_percent=percent(abs(gain or 0.0)) if both else "",
            unavailable_reason=unavailable_reason(row.kind),
            chosen=row.state == VersionState.ACTIVE,
        )
    return rows


def kinds() -> list[dict[str, Any]]:
    """Return the kinds that can be trained, with the samples that there are, and how many each still needs."""
    return [
        {
            "name": kind,
            "samples": samples,
            "missing": max(0, wanted - samples),
            "text": kind not in TEXTLESS,  # it learns only from tenants that keep their prompts
            "unavailable_reason": unavailable_reason(kind),
        }
        for kind, samples, wanted in training.ready()
    ]
