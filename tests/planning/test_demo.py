"""The demo's bundles: none is Custom, and an operator's own stay."""

import pytest

from controlplane.fleet.models import Deployment
from controlplane.planning import demo, services
from controlplane.planning.bundles import present
from controlplane.planning.demo import seed_all
from controlplane.planning.models import ScalingPolicy

pytestmark = pytest.mark.django_db


@pytest.fixture
def seeded(db):
    seed_all()


def test_every_model_has_a_bundle_and_there_is_something_to_approve(seeded):
    policies = ScalingPolicy.objects.select_related("model")
    assert {row.model.name: (present(row.model).name, row.mode) for row in policies} == demo.GIVEN
    bundles, modes = zip(*demo.GIVEN.values(), strict=True)
    assert len(set(bundles)) >= 3
    assert set(modes) == {"auto", "ask"}
    for deployment in Deployment.objects.all():  # and there is room to move
        assert deployment.min_instances < deployment.instances.count() < deployment.max_instances


@pytest.mark.nightly
def test_twice_is_once_and_what_an_operator_set_stays(seeded):
    row = ScalingPolicy.objects.select_related("model").get(model__name="llama-2-70b")
    services.set_policy(row.model, "reactive", "off", {}, "an operator")
    assert demo.seed() == {}
    row.refresh_from_db()
    assert (row.strategy, row.mode) == ("reactive", "off")
