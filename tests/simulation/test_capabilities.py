"""What an instance serves is measured once in a process, by all that it depends on."""

from dataclasses import replace

import numpy as np

from controlplane.simulation.capabilities import Measurement, measured
from scheduling.simulation.measures.results import Promise
from tests.scheduling.planning.test_simulated_capability import ENGINE

LENGTHS = np.full(20, 100, np.int32).tobytes(), np.full(20, 20, np.int32).tobytes()
WANTED = Measurement(ENGINE, *LENGTHS, Promise(ttft_s=2.0), 95.0, 1.0, (1, 2), 1.1)


def test_a_capability_is_measured_once_for_the_same_inputs(monkeypatch):
    measured.cache_clear()
    made = []
    original = Measurement.made
    monkeypatch.setattr(Measurement, "made", lambda self: made.append(self) or original(self))
    first = measured(WANTED)
    assert measured(replace(WANTED)) is first
    others = [
        replace(WANTED, cv=1.5),
        replace(WANTED, engine=replace(ENGINE, max_num_seqs=7)),
        replace(WANTED, prompt_tokens=LENGTHS[1], output_tokens=LENGTHS[0]),
    ]
    for one in others:
        measured(one)
    assert made == [WANTED, *others]
    measured.cache_clear()
