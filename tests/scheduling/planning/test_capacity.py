import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.planning.capacity import (
    LEAST_WINDOWS,
    MEASURED,
    SIMULATED,
    UNKNOWN,
    Capability,
    arrivals_over_s,
    instances_needed,
    profile_capability,
)

# Llama-2-70B on eight A100, from the Splitwise measurements.
LLAMA = Profile(0.0654, 0.0412, 9.597e-5, 1.09e-8, 0.0444, 2.37e-4, 2.49e-7)
LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_capacity_tokens": 400_000}


def windows(count=LEAST_WINDOWS, **changes):
    fields = {
        "prompt_tokens": np.full(count, 60_000.0),
        "output_tokens": np.full(count, 6_000.0),
        "violations": np.zeros(count),
        "requests": np.full(count, 50.0),
        "instances": np.full(count, 2.0),
        "window_s": 600.0,
    }
    return {**fields, **changes}


def test_the_most_of_each_kind_without_violation():
    prompt, output = np.full(20, 60_000.0), np.full(20, 6_000.0)
    prompt[3], output[7] = 120_000.0, 24_000.0
    broken = np.zeros(20)
    prompt[11], output[11], broken[11] = 900_000.0, 900_000.0, 1  # too much of it: a promise broke
    measured = profile_capability(**windows(20, prompt_tokens=prompt, output_tokens=output, violations=broken))
    assert measured == Capability(100.0, 20.0, 105.0, MEASURED, 19, instances=2.0)


def test_a_share_of_violations_may_be_allowed():
    broken = np.zeros(20)
    broken[0] = 1
    prompt = np.full(20, 60_000.0)
    prompt[0] = 120_000.0
    strict = profile_capability(**windows(20, prompt_tokens=prompt, violations=broken))
    lenient = profile_capability(**windows(20, prompt_tokens=prompt, violations=broken), violations_allowed=0.02)
    assert (strict.prompt_tokens_per_s, lenient.prompt_tokens_per_s) == (50.0, 100.0)


def test_gaps_and_idle_windows_teach_nothing():
    prompt = np.full(20, 60_000.0)
    prompt[:4] = np.nan
    requests = np.full(20, 50.0)
    requests[4:7] = 0
    serving = np.full(20, 2.0)
    serving[7:9] = 0
    broken = np.zeros(20)
    broken[-1], prompt[-1] = 1, 70_000.0
    measured = profile_capability(
        **windows(20, prompt_tokens=prompt, requests=requests, instances=serving, violations=broken)
    )
    assert measured.windows == 10


def test_few_windows_fall_back_to_the_profile_and_say_so():
    expected = Capability(1000.0, 100.0, 900.0, SIMULATED, 0, "from the performance profile")
    capability = profile_capability(**windows(3), expected=expected)
    assert (capability.source, capability.windows, capability.total_tokens_per_s) == (SIMULATED, 3, 900.0)
    assert capability.note == "3 of 12 windows without violation are known; from the performance profile"


def test_few_windows_without_profile_are_better_than_none():
    capability = profile_capability(**windows(3))
    assert (capability.source, capability.prompt_tokens_per_s) == (MEASURED, 50.0)
    assert "no performance profile" in capability.note
    none = profile_capability(**windows(3, violations=np.ones(3)))
    assert (none.source, none.total_tokens_per_s) == (UNKNOWN, 0.0)
    with pytest.raises(ValueError, match="no performance profile"):
        instances_needed(none, 1.0, 0.0)


def test_idle_instances_do_not_look_weak():
    expected = Capability(1000.0, 100.0, 900.0, SIMULATED)
    idle = profile_capability(**windows(), expected=expected)
    assert (idle.source, idle.total_tokens_per_s) == (SIMULATED, 900.0)
    assert "no window of 12 shows a limit" in idle.note
    broken = np.zeros(13)
    broken[0] = 1
    prompt = np.full(13, 60_000.0)
    prompt[0] = 70_000.0
    tried = profile_capability(**windows(13, prompt_tokens=prompt, violations=broken), expected=expected)
    assert (tried.source, tried.total_tokens_per_s) == (MEASURED, 55.0)
    better = profile_capability(**windows(), expected=Capability(10.0, 1.0, 9.0, SIMULATED))
    assert better.source == MEASURED


def test_windows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        profile_capability(**windows(violations=np.zeros(3)))
    with pytest.raises(ValueError, match="window_s"):
        profile_capability(**windows(window_s=0.0))


@pytest.mark.parametrize(
    ("prompt", "output", "needed"),
    [
        (0.0, 0.0, 0),
        (900.0, 0.0, 1),  # both together: 900 / 900
        (900.1, 0.0, 2),
        (2050.0, 0.0, 3),
        (0.0, 250.0, 3),  # output: 250 / 100
        (10.0, 100.0, 1),
        (1300.0, 180.0, 2),
    ],
)
def test_the_tightest_of_three_limits_decides(prompt, output, needed):
    assert instances_needed(Capability(1000.0, 100.0, 900.0, MEASURED), prompt, output) == needed


def test_a_wrong_forecast_is_refused():
    able = Capability(1000.0, 100.0, 900.0, MEASURED)
    for prompt, output in ((-1.0, 0.0), (0.0, float("nan"))):
        with pytest.raises(ValueError, match="forecast"):
            instances_needed(able, prompt, output)
    with pytest.raises(ValueError, match="prompt_share"):
        able.at(1.5)


positive = st.floats(1.0, 1e5)


@given(positive, positive, positive, st.floats(0.0, 1.0), st.floats(0.1, 1e6))
def test_demand_by_theta_is_the_number_of_instances(prompt, output, total, share, demand):
    able = Capability(prompt, output, total, MEASURED)
    exact = demand / able.at(share)
    needed = instances_needed(able, share * demand, (1 - share) * demand)
    assert exact * (1 - 1e-9) <= needed < exact * (1 + 1e-9) + 1


@pytest.mark.parametrize(
    ("deadlines_s", "over_s"), [([], 3600.0), ([600.0], 3600.0), ([7200.0, 3600.0], 7200.0), ([1e6], 86_400.0)]
)
def test_arrivals_are_averaged_over_the_longest_deadline_from_an_hour_to_a_day(deadlines_s, over_s):
    assert arrivals_over_s(deadlines_s) == over_s
