"""What an instance serves is measured once in a process, by all that it depends on."""

from dataclasses import replace

import numpy as np

from controlplane.simulation import capabilities
from scheduling.queueing.promises import Promise
from tests.scheduling.planning.test_simulated_capability import ENGINE

ALL = np.ones(20, np.bool_).tobytes()
PROMPTS, OUTPUTS = np.full(20, 100, np.int32).tobytes(), np.full(20, 20, np.int32).tobytes()
REST = Promise(ttft_s=2.0), 95.0


def test_a_capability_is_measured_once_for_the_same_inputs(monkeypatch):
    capabilities.measured.cache_clear()
    made = []
    monkeypatch.setattr(
        capabilities.measuring, "simulated_capability", lambda *given, **more: made.append(given) or more
    )
    for _ in range(2):
        for engine, prompts, outputs, cv in (
            (ENGINE, PROMPTS, OUTPUTS, 1.0),
            (ENGINE, PROMPTS, OUTPUTS, 1.5),
            (replace(ENGINE, max_num_seqs=7), PROMPTS, OUTPUTS, 1.0),
            (ENGINE, OUTPUTS, PROMPTS, 1.0),
        ):
            assert capabilities.measured(engine, prompts, outputs, ALL, *REST, cv, 2, 1.1)["cv"] == cv
    assert len(made) == 4
    capabilities.measured.cache_clear()
