"""The demo's traffic: its tenants share all of it."""

import pytest

from controlplane.fleet import demo as inventory
from controlplane.planning import demo as planning_demo
from controlplane.planning import demo_traffic as demo
from scheduling.bundles import BUNDLES
from tests import database


def seed() -> None:
    inventory.seed("none")


@pytest.fixture
def sources(db) -> list[demo.Stream]:
    database.write(seed)
    return [stream for tenant in demo.senders() for stream in demo.streams_to(tenant, tenant.name)]


def test_tenants_share_the_traffic(sources) -> None:
    assert {stream.key for stream in sources} == set(demo.SHARES)
    series = {(stream.model, stream.region, stream.slo_class) for stream in sources}
    shares = [sum(each.share for each in sources if (each.model, each.region, each.slo_class) == one) for one in series]
    assert (len(series), {round(each, 6) for each in shares}) == (64, {1.0, demo.ADAPTER_SHARE})
    assert len(sources) > len(series)  # some classes are shared
    assert {stream.key for stream in sources if stream.runs} == {"acme"}
    assert len([stream.region for stream in sources if stream.runs]) == 3


def test_jobs_are_sent_to_a_model_whose_requests_wait_in_groups_one_region_after_the_other(sources) -> None:
    jobs = [each for each in sources if each.job]
    assert {each.key for each in jobs} == {"globex"}
    assert {BUNDLES[planning_demo.GIVEN[each.model][0]].policy["ordering"] for each in jobs} == {"qlm"}
    assert len({each.region for each in jobs}) == len({each.phase for each in jobs}) == len(jobs) == 3
