"""Contradictions between the tables of a scenario."""

from typing import Any

from scheduling.simulation.scenario.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import Key


def loose_ends(scenario: Scenario) -> list[tuple[Key, str]]:
    """Names that nothing stands behind, and other contradictions between tables: (key, what is wrong)."""
    wrong: list[tuple[Key, str]] = []

    def known(key: Key, name: str, names: Any, kind: str) -> None:
        if name not in names:
            wrong.append((key, f"there is no {kind} {name!r}; there is {', '.join(names)}"))

    for number, profile in enumerate(scenario.profiles):
        known(("profiles", number, "model"), profile.model, scenario.models, "model")
        known(("profiles", number, "gpu"), profile.gpu, scenario.gpus, "GPU")
    profiles = {(profile.model, profile.gpu, profile.tensor_parallel) for profile in scenario.profiles}
    if len(profiles) < len(scenario.profiles):
        wrong.append((("profiles",), "two profiles are for one model, GPU and tensor_parallel"))
    for number, group in enumerate(scenario.fleet):
        known(("fleet", number, "model"), group.model, scenario.models, "model")
        known(("fleet", number, "gpu"), group.gpu, scenario.gpus, "GPU")
        for region in group.regions:
            known(("fleet", number, "regions"), region, scenario.regions, "region")
        if (group.model, group.gpu, group.tensor_parallel) not in profiles:
            setting = f"{group.model} on {group.tensor_parallel} x {group.gpu}"
            wrong.append((("fleet", number, "gpu"), f"there is no profile of {setting}"))
    served = {group.model for group in scenario.fleet}
    for origin, targets in scenario.latency_ms.items():
        known(("latency_ms", origin), origin, scenario.regions, "region")
        for target in targets:
            known(("latency_ms", origin, target), target, scenario.regions, "region")
    for number, client in enumerate(scenario.clients):
        known(("clients", number, "slo_class"), client.slo_class, scenario.classes, "class")
        known(("clients", number, "model"), client.model, scenario.models, "model")
        if client.model in scenario.models and client.model not in served:
            wrong.append((("clients", number, "model"), f"no instance of the fleet serves {client.model}"))
        for region in client.regions:
            known(("clients", number, "regions"), region, scenario.regions, "region")
        if client.regions and not any(client.regions.values()):
            wrong.append((("clients", number, "regions"), "all shares are 0"))
    for number, burst in enumerate(scenario.bursts):
        for model in burst.models:
            known(("bursts", number, "models"), model, scenario.models, "model")
    if scenario.trace is None and not scenario.clients:
        wrong.append(((), "there is no demand: give [trace] or [[clients]]"))
    if scenario.trace is not None and scenario.clients:
        wrong.append((("trace",), "give [trace] or [[clients]], not both"))
    if scenario.clients and scenario.demand.duration_h is None:
        wrong.append((("demand",), "duration_h is missing: how long the clients send"))
    if (trace := scenario.trace) is not None:
        for name, kind, names in (
            ("model", "model", scenario.models),
            ("region", "region", scenario.regions),
            ("slo_class", "class", scenario.classes),
        ):
            value = getattr(trace, name)
            if value is not None:
                known(("trace", name), value, names, kind)
        for theirs, ours in trace.models.items():
            known(("trace", "models", theirs), ours, scenario.models, "model")
    return wrong
