"""Limits of a tenant: concurrent sequences, tokens a minute."""

import pytest

from controlplane.dispatch.allowances.limits import Exceeded, Limits


def enter(limits: Limits, now_s: float, tokens: int = 100, **changes) -> None:
    terms = {"max_concurrent": 2, "tokens_per_minute": 600} | changes
    limits.enter(1, now_s, tokens=tokens, **terms)


def test_concurrency():
    limits = Limits()
    enter(limits, 0)
    enter(limits, 0)
    with pytest.raises(Exceeded) as refused:
        enter(limits, 0)
    assert refused.value.code == "concurrency_limit_exceeded"
    limits.leave(1, tokens_per_minute=600, predicted=100, used=100)
    enter(limits, 0)


@pytest.mark.parametrize(
    ("open_ones", "asks", "enters"),
    [([], 1, True), ([], 500, True), ([1], 4, False), ([1], 3, True), ([2, 1], 2, False), ([500], 1, False)],
)
def test_sequences_count_and_what_exceeds_the_whole_limit_is_alone(open_ones, asks, enters):
    limits = Limits()
    for sequences in open_ones:
        enter(limits, 0, tokens=1, max_concurrent=4, sequences=sequences)
    if enters:
        enter(limits, 0, tokens=1, max_concurrent=4, sequences=asks)
        assert limits.sequences(1) == sum(open_ones) + asks
    else:
        with pytest.raises(Exceeded, match=f"{sum(open_ones)} sequences .* {asks} of this request .* limit of 4"):
            enter(limits, 0, tokens=1, max_concurrent=4, sequences=asks)
    for sequences in open_ones:
        limits.leave(1, tokens_per_minute=600, predicted=1, used=1, sequences=sequences)
    assert limits.sequences(1) == (asks if enters else 0)


def test_the_bucket_refills_evenly_and_says_when():
    limits = Limits()
    enter(limits, 0, tokens=600, max_concurrent=9)
    with pytest.raises(Exceeded) as refused:
        enter(limits, 5, tokens=100, max_concurrent=9)
    assert refused.value.retry_after_s == pytest.approx(5.0)  # 50 of 100 tokens are there; 10 come each second
    enter(limits, 10, tokens=100, max_concurrent=9)


def test_overpredicted_tokens_are_returned():
    limits = Limits()
    enter(limits, 0, tokens=600)
    limits.leave(1, tokens_per_minute=600, predicted=600, used=100)
    enter(limits, 0, tokens=500)


def test_a_refused_request_is_not_counted():
    limits = Limits()
    enter(limits, 0, tokens=600)
    with pytest.raises(Exceeded):
        enter(limits, 0, tokens=1)
    assert limits.sequences(1) == 1
