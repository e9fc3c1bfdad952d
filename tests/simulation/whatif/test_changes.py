"""A bundle that a future changes to is the bundle that the fleet would have."""

from pathlib import Path

import pytest

from controlplane.fleet.models import Model, Node, PerformanceProfile, WeightedTarget
from controlplane.planning.models import PolicyMode
from controlplane.planning.services import set_policy, switch_bundle
from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes import supply
from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.tuning.services import put
from scheduling.bundles import BUNDLES
from scheduling.scaling import make_strategy
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.scenario.policies import EndpointOf
from scheduling.simulation.workload.edits import Retarget
from tests.examples import at_night_but

pytestmark = pytest.mark.django_db
MODEL = "llama-3.1-8b"


def policies(scenario: Scenario) -> dict[str, object]:
    """Return the policy of the only endpoint."""
    tables = scenario.of_endpoint(MODEL, "us-east")
    values = {name: value for _, one in tables for name, value in one.model_dump(exclude_none=True).items()}
    follows = [one for _, one in tables if one.strategy is not None][-1]
    strategy = make_strategy(follows.strategy or "", follows.parameters)
    return {name: values.get(name) for name in EndpointOf.model_fields} | {"strategy": strategy, "parameters": None}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("bundle", at_night_but(["qlm", "pilothouse"], BUNDLES))
def test_a_bundle_of_a_future_is_the_bundle_of_the_fleet(bundle, tuned, make_instance, operator):
    """Including the parameters that settings give its model, which are stated."""
    instance = make_instance()
    model, before = instance.deployment.model, "pilothouse" if bundle == "qlm" else "qlm"
    set_policy(model, BUNDLES[before].strategy, PolicyMode.AUTO, {}, operator, "it acts")
    switch_bundle(model, before, operator, "before")
    change = {"kind": "policy", "part": "bundle", "value": bundle}
    if tuned:
        for setting, value in (("SCALE_OUT_ABOVE", 0.83), ("SCALE_IN_BELOW", 0.21)):
            put(setting, value, operator, model)
    [words] = in_words(selectors.present_scenario(), parsed([change]))
    assert ("in below 0.21" in words) == tuned
    future = applied(selectors.present_scenario(), parsed([change]), asks=False).scenario
    switch_bundle(model, bundle, operator, "after")
    fleet = check_scenario(selectors.present_scenario(), Path("fleet.toml"), asks=False)
    assert policies(future) == policies(fleet)


def test_a_future_has_other_fallbacks_and_weights(make_instance, slo_class):
    """The scenario of the fleet has those that are live; a change of one sets it, and says from what."""
    deployment, profile = make_instance().deployment, PerformanceProfile.objects.get()
    own, other = Model.objects.get(), Model.objects.get()
    other.pk, other.name = None, "other"
    other.save()
    profile.pk, profile.model, deployment.pk, deployment.model = None, other, None, other
    profile.save()
    deployment.save()
    own.fallback, own.fallback_wait_s = other, 4.0
    own.save()
    for target, weight in ((own.name, 90.0), (other.name, 10.0)):
        WeightedTarget.objects.create(name="chat", target=target, weight=weight)
    now = selectors.present_scenario()
    assert (now["models"][own.name]["fallback"], now["models"][own.name]["fallback_wait_s"]) == (other.name, 4.0)
    assert now["weighted_targets"] == {"chat": {own.name: 90.0, other.name: 10.0}}
    changes = parsed([
        {"kind": "fallback", "model": own.name},
        {"kind": "fallback", "model": other.name, "to": own.name, "wait_s": 2.0},
        {"kind": "weights", "name": "chat", "weights": {other.name: 30.0}},
    ])  # fmt: skip
    assert in_words(now, changes) == [
        f"no fallback of {own.name}",
        f"{own.name} is the fallback of {other.name}, also after a wait of 2 s",
        f"weights of chat: {other.name} 10 to 30",
    ]
    future = applied(now, changes, asks=False)
    assert future.scenario.models[own.name].fallback is None
    assert future.scenario.models[other.name].fallback == own.name
    assert future.edits(1, 60.0) == [Retarget("chat", {own.name: 90.0, other.name: 30.0})]
    for wrong, field in (
        ({"kind": "fallback", "model": own.name, "to": own.name}, "changes[0]"),
        ({"kind": "fallback", "model": own.name, "to": "nothing"}, "changes[0].to"),
        ({"kind": "fallback", "model": own.name, "wait_s": 1.0}, "changes[0]"),
        ({"kind": "weights", "name": "nothing", "weights": {own.name: 1.0}}, "changes[0].name"),
        ({"kind": "weights", "name": "chat", "weights": {"nothing": 1.0}}, "changes[0].weights"),
        ({"kind": "weights", "name": "chat", "weights": {own.name: 0.0, other.name: 0.0}}, "changes[0].weights"),
    ):
        with pytest.raises(ChangeError) as error:
            applied(now, parsed([wrong]), asks=False)
        assert error.value.field.startswith(field)


def test_gpus_are_counted_as_they_are_fitted(make_instance, slo_class):
    """Not as the places that bounds allow, of which there may be more or fewer."""
    own = make_instance().deployment
    own.tensor_parallel, own.max_instances = 2, 9
    own.save()
    Node.objects.create(name="gpu-1", region=own.region, gpu_type=own.gpu_type, gpu_count=8)
    now = selectors.present_scenario()
    (group,) = now["fleet"]
    assert supply._places(group) == 9
    assert supply.gpus_in(now, "us-east", "a100-80gb") == 16

    def after(count: int) -> tuple[int, int]:
        change = {"kind": "gpus", "region": "us-east", "gpu": "a100-80gb", "count": count}
        values = applied(now, parsed([change]), asks=False).values
        return sum(map(supply._places, values["fleet"])), supply.gpus_in(values, "us-east", "a100-80gb")

    assert after(20) == (11, 20)  # two places more
    assert after(16) == (9, 16)
    assert after(10) == (5, 10)  # as many as fit
