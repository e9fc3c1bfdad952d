"""What requests wait longer for their model losing the GPUs, alongside draws of the same."""

import math

import numpy as np
import pytest

from scheduling.queueing.swapping.losing import MOST_LOSSES, lost
from scheduling.queueing.waits.waiting_time import Wait


@pytest.mark.parametrize(
    ("mean_s", "sigma_s", "keeps_s", "again_s"), [(10.0, 3.0, 8.0, 20.0), (50.0, 6.0, 5.0, 12.0), (4.0, 1.0, 9.0, 9.0)]
)
def test_the_gpus_are_lost_as_often_as_draws_say(mean_s, sigma_s, keeps_s, again_s):
    random = np.random.default_rng(5)
    own_s = random.normal(mean_s, sigma_s, 300_000)
    times = np.where(own_s > keeps_s, 1 + np.floor((own_s - keeps_s) / again_s), 0).astype(int)
    away_s = times * 30.0 + np.sqrt(times) * random.normal(0.0, 2.0, times.size)
    longer = lost(Wait(mean_s, sigma_s**2), keeps_s, again_s, Wait(30.0, 4.0))
    assert longer.mean_s == pytest.approx(away_s.mean(), rel=0.01, abs=0.05)
    assert longer.variance_s2 == pytest.approx(away_s.var(), rel=0.02, abs=0.5)


def test_at_the_edges():
    away = Wait(30.0, 4.0)
    assert lost(Wait(5.0), 6.0, 10.0, away) == Wait(), "it is known that it is over by then"
    assert lost(Wait(5.0), 4.0, 10.0, away).mean_s == 30.0
    assert lost(Wait(5.0, 100.0), math.inf, 10.0, away) == Wait()
    assert lost(Wait(1e9, 1.0), 1.0, 1.0, away).mean_s == MOST_LOSSES * 30.0, "no estimate is for ever"
