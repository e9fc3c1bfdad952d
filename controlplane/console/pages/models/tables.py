"""Tables of the models page: endpoints of a model, policies, and tiles."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from controlplane.console.formats import NONE
from controlplane.console.pages.models.selectors import ModelRow, sum_of_known
from controlplane.planning.bundles import CUSTOM, values_of
from controlplane.planning.forecasts.selectors import omitted_from_sums
from controlplane.planning.parts import PARTS
from scheduling.bundles import BUNDLES


def bundle_rows(rows: Sequence[ModelRow]) -> list[dict[str, Any]]:
    """Every bundle with its five parts in words, and the models that have it; then what is custom, if anything is."""
    used: dict[str, list[str]] = {}
    for row in rows:
        used.setdefault(row.present.name, []).append(row.name)
    bundles = [
        {
            "title": bundle.title,
            "about": bundle.about,
            "parts": [part.choice(values_of(bundle)[part.name]).title for part in PARTS],
            "used": used.get(name, []),
        }
        for name, bundle in BUNDLES.items()
    ]
    if CUSTOM in used:
        about = "Values that are no bundle's; an open row shows them."
        bundles.append({"title": "Custom", "about": about, "parts": [NONE] * len(PARTS), "used": used[CUSTOM]})
    return bundles


def tiles(rows: Sequence[ModelRow]) -> dict[str, Any]:
    """The numbers at the head, over all models."""
    policies = Counter(row.present.title for row in rows)
    omitted = omitted_from_sums()
    summed = [row for row in rows if row.name not in omitted]
    below = sorted((row for row in rows if row.below), key=lambda row: -(row.live["slo_burn"] or 0.0))
    return {
        "models": len(rows),
        "endpoints": sum(len(row.there) for row in rows),
        "ready": sum(row.ready for row in rows),
        "most": sum(row.most for row in rows),
        "below": below,
        "demand": sum_of_known(row.demand for row in summed),
        "capacity": sum_of_known(row.capacity for row in summed),
        "usd_per_hour": sum(row.usd_per_hour for row in rows),
        "policies": len(policies),
    }
