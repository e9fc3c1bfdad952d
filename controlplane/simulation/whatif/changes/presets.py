"""Predefined futures: each paper's system, its baselines, and ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.planning.bundles import values_of
from controlplane.planning.parts import unavailable_reasons
from scheduling.bundles import BUNDLES


@dataclass(frozen=True, slots=True)
class Preset:
    """Predefined *changes* of a future, described by the sentence *about*."""

    name: str
    title: str
    about: str
    changes: Sequence[dict[str, Any]]

    @property
    def unavailable_reason(self) -> list[str]:
        """Return why parts of its bundle are unavailable; simulations use the fallback too."""
        return (
            unavailable_reasons({"FORECASTER": values_of(BUNDLES[self.name])["FORECASTER"]})
            if self.name in BUNDLES
            else []
        )


def _policy(part: str, value: str) -> dict[str, Any]:
    return {"kind": "policy", "part": part, "value": value}


_ARIMA: Final = _policy("forecaster", "arima")
BASELINES: Final = (
    Preset(
        "reactive", "Reactive", "Adds an instance when use passes 70%, takes one away under 30%. No forecast.",
        [_policy("strategy", "reactive")],
    ),
    Preset(
        "fcfs-jsq", "FCFS and JSQ",
        "First come, first served, to the instance with the fewest tokens left: the baseline of QLM and SSJF.",
        [_policy("ordering", "fcfs"), _policy("routing", "join_shortest_queue")],
    ),
    Preset("edf", "EDF", "The earliest deadline first: a baseline of QLM.", [_policy("ordering", "deadline")]),
    Preset(
        "round-robin", "Round robin", "Each instance in turn: the baseline of PreServe's router.",
        [_policy("routing", "round_robin")],
    ),
    Preset(
        "least-request", "Least request", "To the instance with the fewest requests: a baseline of PreServe's router.",
        [_policy("routing", "least_request")],
    ),
    Preset("lt-i", "LT-I", "To the number of the hourly plan at once (SageServe).", [_policy("strategy", "lt_i"), _ARIMA]),
    Preset("lt-u", "LT-U", "Towards the hourly plan by use (SageServe).", [_policy("strategy", "lt_u"), _ARIMA]),
)  # fmt: skip
PRESETS: Final = {
    preset.name: preset
    for preset in (
        *(Preset(each.name, each.title, each.about, (_policy("bundle", each.name),)) for each in BUNDLES.values()),
        *BASELINES,
    )
}
