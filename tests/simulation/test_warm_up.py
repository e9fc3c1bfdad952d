"""What a worker loads before it forks its processes."""

from controlplane.simulation import running
from controlplane.simulation.planner import capabilities
from controlplane.simulation.running import SMALL, warm_up
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.workload.edits import Factor, LengthFactor, Scope
from tests.simulation.whatif.test_arrivals import AT, arrivals, row, stream


def test_kernels_that_are_not_on_disk_are_left_to_the_first_run(monkeypatch):
    ran = []
    monkeypatch.setattr(running, "run_small", lambda: ran.append(True))
    monkeypatch.setattr(running, "_on_disk", lambda kernel: False)
    warm_up()
    assert not ran
    monkeypatch.setattr(running, "_on_disk", lambda kernel: True)
    warm_up()
    assert len(ran) == 1


def test_the_small_scenario_is_planned_and_served():
    ran = running.simulate(Scenario.model_validate(SMALL))
    assert ran.about["requests"] > 1000
    assert ran.tables["plans"].rows
    assert ran.result.counters["failed"] == 0


def test_what_an_instance_serves_is_the_same_for_all_seeds_of_a_fork():
    values = {name: value for name, value in SMALL.items() if name not in ("clients", "demand")}
    scenario = Scenario.model_validate(values | {"demand": {"too_long": "clip"}})
    of = [(100, 40, 40), (300, 80, 80)] * 20
    drawn_from = [row(0.5 * at, "m", "here", "interactive", "acme", *lengths) for at, lengths in enumerate(of)]
    start = Start(kind="fleet", at=AT, scenario=values, arrivals=arrivals(stream(region="here", rows=drawn_from)))

    def of_an_instance(seed, *edits):
        return capabilities(stage_start(start, scenario, seed, edits, 1200.0))

    assert of_an_instance(1) == of_an_instance(2) == of_an_instance(1, Factor(Scope(), by=2.0))
    longer = of_an_instance(1, LengthFactor(Scope(), output=4.0))["m", "g"]
    assert longer.total_tokens_per_s < of_an_instance(1)["m", "g"].total_tokens_per_s
