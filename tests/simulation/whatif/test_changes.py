"""A bundle that a future changes to is the bundle that the fleet would have."""

from pathlib import Path

import pytest

from controlplane.planning.models import PolicyMode
from controlplane.planning.services import set_policy, switch_bundle
from controlplane.simulation.whatif import selectors
from controlplane.simulation.whatif.changes.applying import applied, parsed
from scheduling.bundles import BUNDLES
from scheduling.scaling import make_strategy
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.scenario.policies import EndpointOf

pytestmark = pytest.mark.django_db
MODEL = "llama-3.1-8b"


def policies(scenario: Scenario) -> dict[str, object]:
    """What decides at the only endpoint."""
    tables = scenario.of_endpoint(MODEL, "us-east")
    values = {name: value for _, one in tables for name, value in one.model_dump(exclude_none=True).items()}
    strategy = make_strategy(values.pop("strategy"), values.pop("parameters", {}))
    return {name: values.get(name) for name in EndpointOf.model_fields} | {"strategy": strategy}


@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_bundle_of_a_future_is_the_bundle_of_the_fleet(bundle, make_instance, operator):
    instance = make_instance()
    model, before = instance.deployment.model, "pilothouse" if bundle == "qlm" else "qlm"
    set_policy(model, BUNDLES[before].strategy, PolicyMode.AUTO, {}, operator, "it acts")
    switch_bundle(model, before, operator, "before")
    change = {"kind": "policy", "part": "bundle", "value": bundle}
    future = applied(selectors.present_scenario(), parsed([change]), asks=False).scenario
    switch_bundle(model, bundle, operator, "after")
    fleet = check_scenario(selectors.present_scenario(), Path("fleet.toml"), asks=False)
    assert policies(future) == policies(fleet)
