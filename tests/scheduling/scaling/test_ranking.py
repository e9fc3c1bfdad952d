"""What an endpoint takes when it grows: the source that serves soonest as measured, free GPUs last and cheapest first."""

import pytest

from scheduling.scaling.ranking import Source, addition_rank

S = Source


@pytest.mark.parametrize(
    ("sources", "order"),
    [
        ([(S.OWN_SPOT, 60.0), (S.ASLEEP, 5.0), (S.OTHER_SPOT, 600.0)], [S.ASLEEP, S.OWN_SPOT, S.OTHER_SPOT]),
        ([(S.OWN_SPOT, 240.0), (S.OTHER_SPOT, 45.0)], [S.OTHER_SPOT, S.OWN_SPOT]),
        ([(S.OTHER_SPOT, 60.0), (S.OWN_SPOT, 60.0), (S.ASLEEP, 60.0)], [S.OWN_SPOT, S.ASLEEP, S.OTHER_SPOT]),
        ([(S.NEW, 1.0), (S.STOPPED, 1.0), (S.OTHER_SPOT, 600.0)], [S.OTHER_SPOT, S.STOPPED, S.NEW]),
        ([(S.FAILED, 0.0), (S.NEW, 9.0), (S.TAKEN_BACK, 0.0)], [S.TAKEN_BACK, S.NEW, S.FAILED]),
    ],
)
def test_the_source_that_serves_soonest_comes_first(sources, order):
    ranked = sorted(sources, key=lambda each: addition_rank(int(each[0]), each[1], 1.0, False))
    assert [source for source, _ in ranked] == order


def test_free_gpus_are_ranked_by_price_and_a_failed_one_counts_as_stopped_below_the_minimum():
    assert addition_rank(int(S.NEW), 10.0, 2.0, False) > addition_rank(int(S.NEW), 90.0, 1.0, False)
    assert addition_rank(int(S.FAILED), 0.0, 1.0, True) == addition_rank(int(S.STOPPED), 0.0, 1.0, True)
