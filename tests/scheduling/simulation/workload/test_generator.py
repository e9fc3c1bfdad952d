"""Synthetic demand has the rates, the burstiness and the lengths that were asked for, and depends on its seed only."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.workload.generator import (
    DAY_S,
    WEEK_S,
    Burst,
    Client,
    EmpiricalLengths,
    LengthsByClass,
    Lognormal,
    generate,
    random_bursts,
)
from tests.examples import costly

LENGTHS = LengthsByClass(Lognormal(1000, 4000, maximum=20_000), Lognormal(200, 600))


def client(**values) -> Client:
    return Client(
        **{"tenant": "a", "model": "m", "slo_class": "iw", "requests_per_s": 5.0, "lengths": LENGTHS, **values}
    )


def equal(one, other) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "prompt_tokens", "output_tokens")
    )


@given(
    rate=st.floats(2, 20),
    cv=st.floats(0.3, 3),
    gaps=st.sampled_from(["gamma", "weibull"]),
    seed=st.integers(0, 1000),
)
def test_rate_and_cv_come_out(rate: float, cv: float, gaps: str, seed: int) -> None:
    duration_s = 20_000 / rate
    workload = generate([client(requests_per_s=rate, cv=cv, gaps=gaps)], duration_s, seed=seed)
    workload.check()
    # The count of a renewal process deviates by cv times its root; five times that is as good as never.
    assert abs(len(workload) - 20_000) < 5 * cv * math.sqrt(20_000)
    between_s = np.diff(workload.arrival_s)
    assert between_s.min() >= 0
    assert between_s.std() / between_s.mean() == pytest.approx(cv, rel=0.25 if cv > 1.5 else 0.1)
    assert workload.arrival_s[-1] <= duration_s


@costly(20)
@given(seed=st.integers(0, 2**31))
def test_the_same_seed_gives_the_same_requests(seed: int) -> None:
    clients = [client(), client(tenant="b", cv=2.0, gaps="weibull")]
    assert equal(generate(clients, 200.0, seed=seed), generate(clients, 200.0, seed=seed))
    assert not equal(generate(clients, 200.0, seed=seed), generate(clients, 200.0, seed=seed + 1))


def test_a_further_client_leaves_the_others_as_they_were() -> None:
    alone = generate([client()], 500.0, seed=4)
    both = generate([client(tenant="b"), client()], 500.0, seed=4)
    mine = both.tenant.codes == both.tenant.names.index("a")
    assert np.array_equal(both.arrival_s[mine], alone.arrival_s)
    assert np.array_equal(both.prompt_tokens[mine], alone.prompt_tokens)


def test_equal_clients_are_two_streams() -> None:
    workload = generate([client(), client()], 500.0)
    assert np.unique(workload.arrival_s).size == len(workload)


def by_hour(workload, hours: int) -> np.ndarray:
    return np.bincount((workload.arrival_s // 3600).astype(int), minlength=hours)


def test_a_day_has_its_peak_where_it_belongs_and_later_in_another_region() -> None:
    regions = {"east": 1.0, "west": 1.0}
    workload = generate(
        [client(requests_per_s=4.0, daily_swing=0.8, peak_h=14.0, regions=regions)],
        DAY_S,
        shifts_h={"west": 3.0},
        seed=2,
    )
    for region, peak_h in (("east", 14), ("west", 17)):
        hourly = by_hour(workload.select(workload.region.codes == workload.region.names.index(region)), 24)
        angles = 2 * np.pi * (np.arange(24) + 0.5) / 24
        found_h = np.angle((hourly * np.exp(1j * angles)).sum()) * 12 / np.pi % 24
        assert found_h == pytest.approx(peak_h, abs=0.3)
        assert hourly.max() / hourly.min() == pytest.approx(1.8 / 0.2, rel=0.4)


def test_weekends_are_quieter_and_the_mean_is_kept() -> None:
    workload = generate([client(requests_per_s=0.5, weekend=0.4)], WEEK_S, seed=3)
    daily = np.bincount((workload.arrival_s // DAY_S).astype(int), minlength=7)
    assert daily[5:].mean() / daily[:5].mean() == pytest.approx(0.4, rel=0.1)
    assert len(workload) / WEEK_S == pytest.approx(0.5, rel=0.02)


def test_a_burst_multiplies_the_rate_while_it_lasts() -> None:
    other = client(tenant="b", model="other")
    bursts = [Burst(1000.0, 500.0, 8.0, frozenset({"m"}))]
    workload = generate([client(), other], 3000.0, bursts=bursts, seed=5)
    inside = (workload.arrival_s >= 1000) & (workload.arrival_s < 1500)
    hit = workload.model.codes == workload.model.names.index("m")
    assert (inside & hit).sum() == pytest.approx(8 * 5 * 500, rel=0.05)
    assert (~inside & hit).sum() == pytest.approx(5 * 2500, rel=0.05)
    assert (inside & ~hit).sum() == pytest.approx(5 * 500, rel=0.1)


def test_random_bursts_fit_into_the_time() -> None:
    bursts = random_bursts(10_000.0, 5, 600.0, seed=1)
    assert bursts == random_bursts(10_000.0, 5, 600.0, seed=1)
    assert all(0 <= burst.start_s <= 9400 and burst.factor == 8 for burst in bursts)
    assert [burst.start_s for burst in bursts] == sorted(burst.start_s for burst in bursts)


def test_the_mix_of_classes_and_tenants() -> None:
    clients = [client(requests_per_s=8.0), client(tenant="b", slo_class="niw", requests_per_s=2.0)]
    workload = generate(clients, 2000.0, seed=6)
    niw = workload.slo_class.codes == workload.slo_class.names.index("niw")
    assert niw.mean() == pytest.approx(0.2, abs=0.02)
    assert np.array_equal(niw, workload.tenant.codes == workload.tenant.names.index("b"))


def test_lengths_have_median_and_tail() -> None:
    workload = generate([client(requests_per_s=20.0)], 2000.0, seed=7)
    prompts = workload.prompt_tokens
    assert np.median(prompts) == pytest.approx(1000, rel=0.05)
    assert np.percentile(prompts, 95) == pytest.approx(4000, rel=0.05)
    assert prompts.min() >= 1
    assert prompts.max() <= 20_000


def test_empirical_lengths_come_in_pairs() -> None:
    lengths = EmpiricalLengths(np.array([10, 20], np.int32), np.array([1, 2], np.int32))
    workload = generate([client(lengths=lengths)], 200.0)
    assert set(zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)) == {(10, 1), (20, 2)}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"requests_per_s": 0.0}, "requests_per_s"),
        ({"requests_per_s": math.nan}, "requests_per_s"),
        ({"cv": 0.0}, "cv"),
        ({"daily_swing": 1.5}, "daily_swing"),
        ({"weekend": -1.0}, "weekend"),
        ({"regions": {"a": 0.0}}, "regions"),
    ],
)
def test_impossible_clients_are_refused(values, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        client(**values)


def test_impossible_demand_is_refused() -> None:
    with pytest.raises(ValueError, match="no clients"):
        generate([], 10.0)
    with pytest.raises(ValueError, match="duration_s"):
        generate([client()], math.inf)
    with pytest.raises(ValueError, match="median"):
        Lognormal(10, 5)
    with pytest.raises(ValueError, match="minimum"):
        Lognormal(10, 20, minimum=9, maximum=8)
    with pytest.raises(ValueError, match="burst"):
        Burst(-1.0, 5.0)
    with pytest.raises(ValueError, match="empirical"):
        EmpiricalLengths(np.empty(0, np.int32), np.empty(0, np.int32))
