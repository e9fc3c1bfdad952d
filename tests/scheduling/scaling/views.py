"""Views of endpoints and advice for tests."""

from math import inf

from hypothesis import strategies as st

from scheduling.scaling import Advice, EndpointView

CALM = EndpointView(
    model="llama",
    region="east",
    ready=4,
    coming=0,
    draining=0,
    spot=10,
    spot_other=5,
    min_instances=2,
    max_instances=12,
    use=0.5,
    waiting=0,
    kv_use=0.5,
    tokens_per_s=1000.0,
    since_change_s=inf,
)


def view(**changes) -> EndpointView:
    """Return an endpoint of four instances, half used and never scaled, with *changes*."""
    return CALM._replace(**changes)


def advice(target: int, *, forecast: float = 1000.0, made: float = 0.0, until: float = 3600.0, **more) -> Advice:
    return Advice(target, forecast, made, until, **more)


shares = st.one_of(st.sampled_from([0.0, 0.29, 0.3, 0.31, 0.69, 0.7, 0.71, 0.9, 1.0, inf]), st.floats(0, 3))
views = st.builds(
    EndpointView,
    model=st.sampled_from(["llama", "bloom"]),
    region=st.sampled_from(["east", "west"]),
    ready=st.integers(0, 14),
    coming=st.integers(0, 6),
    draining=st.integers(0, 3),
    spot=st.integers(0, 10),
    spot_other=st.integers(0, 10),
    min_instances=st.integers(0, 3),
    max_instances=st.integers(3, 12),
    use=shares,
    waiting=st.integers(0, 50),
    kv_use=st.floats(0, 1),
    tokens_per_s=st.floats(0, 20_000),
    since_change_s=st.one_of(st.sampled_from([0.0, 14.9, 15.0, 1000.0, inf]), st.floats(0, 100)),
    overloaded_instances=st.integers(0, 6),
    peak_kv_sum=st.floats(0, 10),
    peak_kv_most=st.floats(0, 1.2),
)
advices = st.none() | st.builds(
    Advice,
    target_instances=st.integers(0, 20),
    forecast_tokens_per_s=st.floats(0, 20_000),
    made_at_s=st.floats(0, 3000),
    valid_until_s=st.floats(0, 8000),
    soon_instances=st.none() | st.integers(0, 20),
    deferred_tokens_per_s=st.floats(0, 20_000),
)
