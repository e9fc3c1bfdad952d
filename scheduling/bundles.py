"""Policy bundles: the router, order, strategy, forecaster and length model of one paper, applied to a model together.

A bundle holds only values, by their names in live rows and scenario files. Their sources are in
docs/papers (routing, ordering, scaling, forecasting, length-models).
"""

from dataclasses import dataclass, field
from typing import Any, Final

from scheduling.policy import EndpointPolicy
from scheduling.queueing.release_rule import SLACK, USE

SAID: Final = ("routing", "ordering", "region_threshold", "eviction_limit")
"""Knobs that every bundle sets, so that nothing of the previous bundle stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """*about* describes the effect in one sentence."""

    name: str
    title: str
    about: str
    policy: dict[str, Any]
    """Knobs of `scheduling.policy.EndpointPolicy`."""
    strategy: str
    parameters: dict[str, float] = field(default_factory=dict)
    forecaster: str
    plan_demand: str = "strategy"
    release: str = SLACK
    """Of non-interactive work (`scheduling.queueing.release_rule`)."""
    niw_share: float = 1.0
    """Of deferred work, which plans have room for (SageServe's beta is a tenth)."""

    donates: bool = False
    """Whether instances that scaling removes are lent out as spot."""

    def __post_init__(self) -> None:
        usual = {name: getattr(EndpointPolicy(), name) for name in SAID}
        object.__setattr__(self, "policy", usual | self.policy)


SAGESERVE: Final = "to the instance with the least tokens left, by the priority of the class"
BUNDLES: Final = {
    bundle.name: bundle
    for bundle in (
        Bundle(
            name="sageserve-lt-ua",
            title="SageServe LT-UA",
            about=f"Requests go {SAGESERVE}; instances follow hourly plans by ARIMA, towards them by use and by the gap, "
            "to and from the spot pool.",
            policy={"routing": "join_shortest_queue", "ordering": "priority"},
            strategy="lt_ua",
            forecaster="arima",
            release=USE,
            niw_share=0.1,
            donates=True,
        ),
        Bundle(
            name="sageserve-reactive",
            title="SageServe reactive",
            about=f"Requests go {SAGESERVE}; an instance comes from spot above 70% use and goes there below 30%.",
            policy={"routing": "join_shortest_queue", "ordering": "priority"},
            strategy="reactive",
            forecaster="blend",
            release=USE,
            niw_share=0.1,
            donates=True,
        ),
        Bundle(
            name="preserve",
            title="PreServe",
            about="Requests go, as they come, where the look-ahead map has the least load; instances follow the mLSTM's "
            "next window, and one comes for each that the map shows overloaded.",
            policy={"routing": "preserve", "ordering": "fcfs"},
            strategy="preserve",
            forecaster="mlstm",
        ),
        Bundle(
            name="ssjf",
            title="SSJF",
            about="The shortest predicted request goes first, with aging, to the instance with the least tokens left. The "
            "paper has one instance: here they come and go by use alone.",
            policy={"routing": "join_shortest_queue", "ordering": "ssjf"},
            strategy="reactive",
            forecaster="blend",
        ),
        Bundle(
            name="qlm",
            title="QLM",
            about="Requests wait in groups, in a virtual queue for each instance, in the order that keeps the most in time; "
            "what runs and can wait leaves for what would be late. The paper has a fixed fleet: here instances come and go "
            "by use.",
            policy={"routing": "join_shortest_queue", "ordering": "qlm", "eviction_limit": 2},
            strategy="reactive",
            forecaster="blend",
        ),
        Bundle(
            name="hermes",
            title="Hermes",
            about="Calls of the application run with the lowest Gittins rank go first, where they delay themselves and "
            "others the least, with prefixes; what likely calls need is warmed before. The paper has a fixed "
            "fleet: here instances come and go by use.",
            policy={"routing": "least_delay", "ordering": "hermes"},
            strategy="reactive",
            forecaster="blend",
        ),
        Bundle(
            name="pilothouse",
            title="Pilothouse",
            about="The shortest predicted request goes first, where it delays itself and others the least, with prefixes; "
            "instances follow plans of the blend's band and pooled load.",
            policy={"routing": "least_delay", "ordering": "ssjf"},
            strategy="pilothouse",
            forecaster="blend",
        ),
    )
}


def bundle_named(name: str) -> Bundle:
    """Return the bundle with that name or title. Raise ValueError, naming the known bundles, if there is none."""
    bundle = BUNDLES.get(name.lower().replace(" ", "-"))
    if bundle is None:
        raise ValueError(f"must be one of {', '.join(BUNDLES)}, not {name!r}")
    return bundle
