"""A request of a tenant that is bound to regions is never placed, moved, deferred, fallen back or simulated outside them."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clocks.both import alike, placements, serve
from tests.clocks.scenarios import draw

KINDS = [["flood", "one-sided"], ["held"], ["spot"], ["fallbacks", "failures"], ["impatient", "weights"]]
ORDERS = ["fcfs", "priority", "vtc", "ssjf", "qlm"]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.sampled_from(KINDS), order=st.sampled_from(ORDERS), threshold=st.floats(0.1, 1.0), seed=st.integers(0, 99)
)
def test_a_bound_request_stays_within_its_regions_under_both_clocks(kinds, order, threshold, seed):
    # The clocks hand the groups of an instance that has failed to other queues at different moments.
    order = "priority" if "spot" in kinds or ("failures" in kinds and order == "qlm") else order
    policies = [{"ordering": order, "region_threshold": threshold}, {"ordering": order}]
    both = serve(draw(seed, policies, [*kinds, "bound"]))
    live, simulated = placements(both)
    assert len(live) == len(simulated)
    assert all(alike(*each) for each in zip(live, simulated, strict=True))
    cluster, requests = both.scenario.cluster, both.scenario.requests
    allowed = [cluster.origins[origin][1] or cluster.regions for origin in requests.region]
    for clock in (live, simulated):
        assert [row for row in clock if row[3] not in allowed[row[1]]] == []
    went = {each.request: each.where for each in both.live.events if each.where in cluster.regions}
    assert went
    assert [number for number, region in went.items() if region not in allowed[number]] == []
    served = {number for number, each in both.live.courses.items() if each.outcome == "done"}
    assert served & {number for number, regions in enumerate(allowed) if len(regions) == 1}, "a bound one is served"
