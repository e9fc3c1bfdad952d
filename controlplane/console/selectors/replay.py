"""The newest replay of the ledger, as the Overview and the What-if page show it."""

from typing import Any

from controlplane.console.formats import milliseconds, signed, usd, usd_signed
from controlplane.simulation.whatif import counterfactual
from scheduling.bundles import BUNDLES


def replay() -> dict[str, Any] | None:
    """A sentence, and a row a bundle, the cheapest first; None before the first replay."""
    said = counterfactual.newest()
    if said is None:
        return None
    first = said.rows[0]
    rows = [
        {
            "name": BUNDLES[row.bundle].title if row.bundle in BUNDLES else row.bundle or "As it is",
            "cost": usd(row.cost_usd),
            "saved": usd_signed(-row.saved_usd) if row.bundle else "",
            "missed": f"{row.missed:,}",
            "fewer": signed(-row.fewer_missed) if row.bundle else "",
            "ttft": milliseconds(row.ttft_p95_ms),
        }
        for row in said.rows
    ]
    return {
        "sentence": said.sentence,
        "limits": said.limits,
        "rows": rows,
        "requests": first.requests,
        "made_at": first.made_at.timestamp(),
    }
