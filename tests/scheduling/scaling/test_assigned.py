"""Several strategies as one decide as each would alone."""

from scheduling.scaling import Assigned, EndpointView, Unified

VIEW = EndpointView(
    model="m", region="east", ready=3, coming=0, draining=0, spot=2, spot_other=0, min_instances=1, max_instances=5,
    use=0.9, waiting=0, kv_use=0.5, tokens_per_s=10.0, since_change_s=1e9,
)  # fmt: skip
EAST, WEST = VIEW, VIEW._replace(region="west", use=0.1)


def test_each_endpoint_is_scaled_by_its_own() -> None:
    bold, shy = Unified(patience_s=0.0), Unified(out_above=0.95, in_below=0.05, patience_s=0.0)
    both = Assigned({("m", "east"): shy, ("m", "west"): bold})
    assert both.name == "reactive"
    moves = both.decide(0.0, [WEST, EAST], [None, None])
    assert [(move.endpoint, move.delta) for move in moves] == [(0, -1)]
    moves = Assigned({("m", "east"): bold, ("m", "west"): bold}).decide(0.0, [WEST, EAST], [None, None])
    assert [(move.endpoint, move.delta) for move in moves] == [(0, -1), (1, 1)]


def test_each_decides_at_its_own_ticks() -> None:
    quick, slow = Unified(tick_s=10.0, patience_s=0.0), Unified(tick_s=15.0, patience_s=0.0)
    both = Assigned({("m", "east"): quick, ("m", "west"): slow})
    assert both.tick_s == 5.0
    ticks = (5.0, 10.0, 15.0, 30.0)
    decided = {now_s: [move.endpoint for move in both.decide(now_s, [EAST, WEST], [None, None])] for now_s in ticks}
    assert decided == {5.0: [], 10.0: [0], 15.0: [1], 30.0: [0, 1]}
