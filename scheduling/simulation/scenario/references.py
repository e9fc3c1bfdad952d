"""Contradictions between the tables of a scenario."""

from collections.abc import Collection

from scheduling.simulation.scenario.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import Key


def unresolved(scenario: Scenario, asks: bool = True) -> list[tuple[Key, str]]:
    """Return undefined names and other contradictions between tables: (key, problem).

    *asks*: whether it has its own requests, so that it needs clients or a trace.
    """
    checks = _Checks(scenario)
    checks.fleet()
    checks.demand(asks)
    checks.policies()
    checks.timed_events()
    return checks.wrong


class _Checks:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.wrong: list[tuple[Key, str]] = []
        self.places = {(group.model, region) for group in scenario.fleet for region in group.regions}

    def known(self, key: Key, name: str | None, names: Collection[str], kind: str) -> None:
        if name is not None and name not in names:
            self.wrong.append((key, f"there is no {kind} {name!r}; there is {', '.join(names)}"))

    def model(self, *key: str | int, name: str | None) -> None:
        self.known(key, name, self.scenario.models, "model")

    def region(self, *key: str | int, name: str | None) -> None:
        self.known(key, name, self.scenario.regions, "region")

    def gpu(self, *key: str | int, name: str) -> None:
        self.known(key, name, self.scenario.gpus, "GPU")

    def fleet(self) -> None:
        scenario, wrong = self.scenario, self.wrong
        for number, profile in enumerate(scenario.profiles):
            self.model("profiles", number, "model", name=profile.model)
            self.gpu("profiles", number, "gpu", name=profile.gpu)
        profiles = {(profile.model, profile.gpu, profile.tensor_parallel) for profile in scenario.profiles}
        for number, profile in enumerate(scenario.profiles):
            if profile.decode is None and profile.model in scenario.models and profile.model not in scenario.pooling:
                wrong.append((("profiles", number, "decode"), f"is missing: {profile.model} generates"))
        if len(profiles) < len(scenario.profiles):
            wrong.append((("profiles",), "two profiles are for one model, GPU and tensor_parallel"))
        for number, group in enumerate(scenario.fleet):
            self.model("fleet", number, "model", name=group.model)
            self.gpu("fleet", number, "gpu", name=group.gpu)
            for region in group.regions:
                self.region("fleet", number, "regions", name=region)
            if (group.model, group.gpu, group.tensor_parallel) not in profiles:
                setting = f"{group.model} on {group.tensor_parallel} x {group.gpu}"
                wrong.append((("fleet", number, "gpu"), f"there is no profile of {setting}"))
        shared = {group.sharing.group for group in scenario.fleet if group.sharing is not None}
        for name in scenario.swap_groups.keys() - shared:
            wrong.append((("swap_groups", name), "no group of the fleet shares its GPUs by this name"))
        self.shared_gpus()
        for origin, targets in scenario.latency_ms.items():
            self.region("latency_ms", origin, name=origin)
            for target in targets:
                self.region("latency_ms", origin, target, name=target)

    def shared_gpus(self) -> None:
        """Check the swap groups: their instances have the same GPUs, and one at most has them at the start."""
        gpus: dict[tuple[str, str], tuple[str, int]] = {}
        taken: set[tuple[str, str, int]] = set()
        for number, group in enumerate(self.scenario.fleet):
            if group.sharing is None:
                continue
            asleep = range(group.instances, group.instances + group.asleep)
            awake = set(range(group.instances + group.asleep + group.spot)) - set(asleep)
            for place in ((group.sharing.group, region) for region in group.regions):
                own = group.gpu, group.tensor_parallel
                if gpus.setdefault(place, own) != own:
                    self.wrong.append((("fleet", number, "gpu"), f"is not that of all that share GPUs as {place[0]}"))
                if taken & (places := {(*place, at) for at in awake}):
                    what = f"another group that shares GPUs as {place[0]} has them at the start: let these be asleep"
                    self.wrong.append((("fleet", number, "instances"), what))
                taken |= places

    def demand(self, asks: bool) -> None:
        scenario, wrong = self.scenario, self.wrong
        served = {model for model, _ in self.places}
        for name, one in scenario.models.items():
            self.model("models", name, "fallback", name=one.fallback)
            if (other := scenario.models.get(one.fallback or "")) is None:
                continue
            if other is one:
                wrong.append((("models", name, "fallback"), "is the model itself"))
            elif one.fallback not in served:
                wrong.append((("models", name, "fallback"), f"no instance of the fleet serves {one.fallback}"))
            elif other.task != one.task:
                what = f"the task of {one.fallback} is {other.task}, that of {name} is {one.task}"
                wrong.append((("models", name, "fallback"), what))
        for name, weights in scenario.weighted_targets.items():
            for model in weights:
                self.model("weighted_targets", name, model, name=model)
                if model in scenario.models and model not in served:
                    wrong.append((("weighted_targets", name, model), f"no instance of the fleet serves {model}"))
            if len({scenario.models[model].task for model in weights if model in scenario.models}) > 1:
                wrong.append((("weighted_targets", name), "its models have different tasks"))
            if not any(weights.values()):
                wrong.append((("weighted_targets", name), "all weights are 0"))
        served |= scenario.weighted_targets.keys()
        for number, client in enumerate(scenario.clients):
            self.known(("clients", number, "slo_class"), client.slo_class, scenario.classes, "class")
            self.known(("clients", number, "model"), client.model, scenario.names, "model")
            if client.model in scenario.models and client.model not in served:
                wrong.append((("clients", number, "model"), f"no instance of the fleet serves {client.model}"))
            task = scenario.task_of(client.model)
            if task.pools and client.output is not None:
                what = f"is of requests that generate; the task of {client.model} is {task}"
                wrong.append((("clients", number, "output"), what))
            elif client.model in scenario.names and not task.pools and not client.has_lengths:
                wrong.append((("clients", number, "output"), f"is missing: {client.model} generates"))
            for region in client.regions:
                self.region("clients", number, "regions", name=region)
            if client.regions and not any(client.regions.values()):
                wrong.append((("clients", number, "regions"), "all shares are 0"))
        for number, application in enumerate(scenario.applications):
            self.known(("applications", number, "slo_class"), application.slo_class, scenario.classes, "class")
            self.model("applications", number, "model", name=application.model)
            for unit in application.models:
                self.model("applications", number, "models", unit, name=application.models[unit])
            for key, name in (("model", application.model), *application.models.items()):
                if name in scenario.models and name not in served:
                    place = ("model",) if name == application.model else ("models", key)
                    wrong.append((("applications", number, *place), f"no instance of the fleet serves {name}"))
            for region in application.regions:
                self.region("applications", number, "regions", name=region)
            if application.regions and not any(application.regions.values()):
                wrong.append((("applications", number, "regions"), "all shares are 0"))
            if application.window_h is None and scenario.demand.duration_h is None and scenario.until_h is None:
                wrong.append((("applications", number), "window_h is missing: how long runs begin"))
        for number, burst in enumerate(scenario.bursts):
            for model in burst.models:
                self.model("bursts", number, "models", name=model)
        if asks and scenario.trace is None and not scenario.clients and not scenario.applications:
            wrong.append(((), "there is no demand: give [trace], [[clients]] or [[applications]]"))
        if scenario.trace is not None and scenario.clients:
            wrong.append((("trace",), "give [trace] or [[clients]], not both"))
        if scenario.clients and scenario.demand.duration_h is None:
            wrong.append((("demand",), "duration_h is missing: how long the clients send"))
        if (trace := scenario.trace) is not None:
            self.known(("trace", "model"), trace.model, scenario.names, "model")
            self.region("trace", "region", name=trace.region)
            self.known(("trace", "slo_class"), trace.slo_class, scenario.classes, "class")
            for theirs, ours in trace.models.items():
                self.known(("trace", "models", theirs), ours, scenario.names, "model")
            if scenario.forecast.history_days:
                wrong.append((("forecast", "history_days"), "is drawn from [[clients]]; a trace has no past"))

    def policies(self) -> None:
        scenario, wrong = self.scenario, self.wrong
        for name, of_class in scenario.classes.items():
            self.known(("classes", name, "degrades_to"), of_class.degrades_to, scenario.classes, "class")
            seen, following = [name], of_class.degrades_to
            while following in scenario.classes and following not in seen:
                seen.append(following)
                following = scenario.classes[following].degrades_to
            if following == name:
                wrong.append((("classes", name, "degrades_to"), "leads back to this class: it degrades in a circle"))
        scaling = scenario.scaled
        if scaling is not None and scaling.strategy is None:
            for model, region in sorted(self.places):
                if all(one.strategy is None for _, one in scenario.of_endpoint(model, region)):
                    what = f"is missing: {model} in {region} has no bundle"
                    wrong.append((("scaling", "strategy"), what))
        for number, one in enumerate(scenario.capabilities):
            self.model("capabilities", number, "model", name=one.model)
            self.gpu("capabilities", number, "gpu", name=one.gpu)
        for number, schedule in enumerate(scenario.schedules):
            self.model("schedules", number, "model", name=schedule.model)
            self.region("schedules", number, "region", name=schedule.region)
            if scaling is None:
                wrong.append((("schedules", number), "needs [scaling], which says what scales"))
        for number, endpoint in enumerate(scenario.endpoints):
            self.model("endpoints", number, "model", name=endpoint.model)
            self.region("endpoints", number, "region", name=endpoint.region)
            if endpoint.region is not None and (endpoint.model, endpoint.region) not in self.places:
                what = f"no instance of the fleet serves {endpoint.model} in {endpoint.region}"
                wrong.append((("endpoints", number, "region"), what))
            if scaling is None:
                for name in ("strategy", "min_instances", "max_instances", "floor_above", "floor_cooldown_s"):
                    if getattr(endpoint, name) is not None:
                        wrong.append(
                            (("endpoints", number, name), "needs [scaling], which says what scales the others")
                        )
                continue
            least = scaling.min_instances if endpoint.min_instances is None else endpoint.min_instances
            most = scaling.max_instances if endpoint.max_instances is None else endpoint.max_instances
            if least > most:
                what = f"min_instances ({least}) is above max_instances ({most})"
                wrong.append((("endpoints", number), what))

    def timed_events(self) -> None:
        for number, failure in enumerate(self.scenario.failures):
            self.model("failures", number, "model", name=failure.model)
            self.region("failures", number, "region", name=failure.region)
        for number, redeploy in enumerate(self.scenario.redeploys):
            self.region("redeploys", number, "region", name=redeploy.region)
            for key, model in (("from_model", redeploy.from_model), ("to_model", redeploy.to_model)):
                self.model("redeploys", number, key, name=model)
                if model in self.scenario.models and (model, redeploy.region) not in self.places:
                    what = f"no instance of the fleet serves {model} in {redeploy.region}"
                    self.wrong.append((("redeploys", number, key), what))
