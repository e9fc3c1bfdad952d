"""The five parts of how a model is served, with every choice and a sentence about it, for pages.

A bundle sets all of them (`bundles`); `services.switch_parts` sets single ones. The choices are described in
docs/papers/routing.md, docs/papers/ordering.md, docs/papers/scaling.md and docs/papers/forecasting.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from controlplane.planning.execution import strategies
from controlplane.planning.titles import TITLES, title_of
from controlplane.tuning.selectors import choices_of
from scheduling.applications.suite import SUITE
from scheduling.bundles import BUNDLES
from scheduling.policy import LIVE_CHOICES


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """One value of a part. *about*: its effect; *unavailable_reason*: why a fallback answers here instead."""

    value: str
    title: str
    about: str
    unavailable_reason: str = ""


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """A part named as in `bundles.values_of`; *values* are its choices with titles."""

    name: str
    title: str
    abouts: Mapping[str, str]
    values: Callable[[], Mapping[str, str]]
    unavailable_reason: Callable[[str], str] = lambda value: ""

    def choices(self) -> list[PolicyChoice]:
        return [
            PolicyChoice(value, title, self.abouts[value], self.unavailable_reason(value))
            for value, title in self.values().items()
        ]

    def choice(self, value: Any) -> PolicyChoice:
        """Return the choice for *value*; for one that cannot be chosen, such as mixed deployments, the value itself."""
        known = next((choice for choice in self.choices() if choice.value == value), None)
        if known is not None:
            return known
        return PolicyChoice(
            str(value), OTHERS.get(value, str(value)), self.abouts.get(value, "Its deployments differ.")
        )


OTHERS: Final = {"none": "None"}
"""Titles of values that may be present but cannot be chosen."""
ROUTERS: Final = {
    "none": "It has no deployment.",
    "round_robin": "Each instance of the endpoint in turn.",
    "least_request": "The instance with the fewest requests.",
    "minimum_use": "The instance whose sequences and KV cache are used the least.",
    "join_shortest_queue": "The instance with the fewest tokens left to do.",
    "preserve": "The instance whose look-ahead map has the least load in the steps to come.",
    "least_delay": "The instance where a request delays itself and others the least, cached prefixes counted.",
}
ORDERS: Final = {
    "none": "It has no deployment.",
    "fcfs": "By arrival, whatever the class.",
    "priority": "By the priority of the SLO class, then by arrival.",
    "ssjf": "By class, then the shortest predicted answer first; aging lets no long one wait for ever.",
    "deadline": "The one whose deadline comes first.",
    "slack": "The one with the least time to spare before its deadline.",
    "qlm": "By groups of alike requests in virtual queues, ordered so that most meet their deadlines.",
    "application": "The application run that began first, all its requests together (Parrot).",
    "srpt": "By class, then the application run with the least expected work left; aging lets no long one wait for ever.",
    "hermes": "By class, then the application run with the lowest Gittins rank: the least service per run that ends by it.",
    "run_deadline": "The application run that is due first.",
    "run_slack": "The application run with the least time to spare if it takes the longest path to its end.",
    "vtc": "The tenant that was served the fewest tokens, output counted twice; its requests as they came.",
    "wfq": "Tenants by the service time that they were given, over their weights.",
}
STRATEGIES: Final = {
    "reactive": "One instance more above 70% use, one less below 30%; no forecast.",
    "lt_i": "To the number of the hourly plan at once.",
    "lt_u": "Towards the hourly plan one by one, more only above 70% use, fewer only below 30%.",
    "lt_ua": "Towards the hourly plan by use; late in the hour also when demand is far from its forecast.",
    "proactive": "To the next ten-minute window's number at its start.",
    "hybrid": "The next window's number, and between windows by use.",
    "preserve": "The next window's number, and one more for each instance that the look-ahead map shows overloaded.",
    "pilothouse": "Plans every 20 minutes from the forecast's band; an instance leaves only if no plan soon needs it back.",
    "none": "The floor alone: one instance more above 70% use, one less after a minute below 30%.",
}
FORECASTERS: Final = {
    "": "What does best in backtests, the blend.",
    "seasonal_naive": "The same time of the day before.",
    "arima": "ARIMA, its orders found once, fitted again every day.",
    "seasonal_arima": "ARIMA with the rhythm of the day.",
    "ets": "Exponential smoothing of level, trend and day.",
    "mlstm": "A multiplicative LSTM over the last windows (PreServe).",
    "blend": "Many simple forecasts and trees, weighted by how well each did lately.",
}
NAMES: Final = (
    {TITLES[name]: about for name, about in (ORDERS | STRATEGIES | FORECASTERS).items() if name in TITLES}
    | {each.title: each.about for each in BUNDLES.values()}
    | {name: each.title for name, each in SUITE.items()}
)
"""What policies, and Hermes' applications, are that pages call by a name alone."""


def _titled(names: list[str], of: str = "") -> dict[str, str]:
    return {name: title_of(name) if name else of for name in names}


def _forecaster_unavailable_reason(name: str) -> str:
    from forecasting.workload import unavailable_reason  # takes half a second

    return unavailable_reason(name)


PARTS: Final = (
    PolicyPart("routing_policy", "Router", ROUTERS, lambda: LIVE_CHOICES["routing_policy"]),
    PolicyPart("ordering_policy", "Order", ORDERS, lambda: LIVE_CHOICES["ordering_policy"]),
    PolicyPart("strategy", "Strategy", STRATEGIES, lambda: _titled(strategies.names())),
    PolicyPart(
        "FORECASTER",
        "Forecaster",
        FORECASTERS,
        lambda: _titled(list(choices_of("FORECASTER")), "Best in backtests"),
        _forecaster_unavailable_reason,
    ),
)


def unavailable_reasons(values: Mapping[str, Any]) -> list[str]:
    """Return why parts among *values* (named as in `bundles.values_of`) are unavailable, one sentence each."""
    reasons = (part.unavailable_reason(values[part.name]) for part in PARTS if part.name in values)
    return [reason for reason in reasons if reason]
