"""Waits are estimated, and promises judged, in a fork of a fleet as in the fleet at that moment."""

from dataclasses import replace

import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    Model,
    PerformanceProfile,
    SloClass,
    SloKind,
    SwapGroup,
)
from controlplane.simulation.whatif.fork import fork_of
from controlplane.simulation.whatif.start import Start, stage_start
from controlplane.tuning.services import put
from scheduling.control.admission import AdmissionControl
from scheduling.queueing.waits.waiting_time import Wait
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.simulator import Simulation
from tests.gateway.rows import make_model
from tests.simulation.whatif.rows import as_it_went
from tests.simulation.whatif.test_fork_on_a_virtual_clock import PROFILE, ROUND_TRIP_S, make_fleet, requests
from tests.simulation.whatif.virtual_fleet import RowsFleet

FORKED_S, AFTER_S = 151.3, 60.0
CLOSE = 1e-6


def share_gpus() -> None:
    """Have the models m and n share the GPUs of one instance of m, which is awake."""
    make_model("n", "http://127.0.0.1:1/n")
    PerformanceProfile.objects.create(
        model=Model.objects.get(name="n"), gpu_type=GpuType.objects.get(), tensor_parallel=1, source="test", **PROFILE
    )
    of_m = Deployment.objects.get(model__name="m")
    for name in ("routing_policy", "ordering_policy", "max_num_batched_tokens", "max_num_seqs", "requests_ahead_limit"):
        Deployment.objects.filter(model__name="n").update(**{name: getattr(of_m, name)})
    group, last = SwapGroup.objects.create(name="pair"), Instance.objects.filter(deployment__model__name="m").last()
    asleep = Instance.objects.get(deployment__model__name="n")
    Instance.objects.filter(pk=asleep.pk).update(state=InstanceState.SLEEPING, sleep_level=1, node=last.node)
    Instance.objects.filter(pk__in=(last.pk, asleep.pk)).update(swap_group=group)


def estimates(waits, admission, rows, endpoints):
    """Return the values to compare, as one flat list: of all that wait, by their numbers, and of the next requests."""
    values = []
    for row in rows:
        one = waits.of(row)
        terms, _ = waits.fleet.terms(row)
        wait, late_s = admission.expected(row, terms)
        values += [one.position, one.wait, one.uncorrected_s, one.says_throughput, one.batch, one.serving, wait, late_s]
    for endpoint in endpoints:
        values.append(waits.of_next(endpoint))
    pairs = [
        (one.mean_s, one.variance_s2) if isinstance(one, Wait) else (-1.0 if one is None else one,) for one in values
    ]
    return [float(each) for pair in pairs for each in pair]


@pytest.mark.parametrize(("ordering", "shares"), [("ssjf", False), ("qlm", False), ("qlm", True)])
def test_waits_and_promises_are_those_of_the_fleet(db, ordering, shares):
    """Of what waits, in several classes, with what was learned before: position, mean, variance, verdict."""
    make_fleet("join_shortest_queue", ordering)
    if shares:
        share_gpus()
    Instance.objects.update(kv_capacity_tokens=16 * 1024)
    slow = SloClass.objects.create(
        name="slow", title="Slow", kind=SloKind.INTERACTIVE, priority=1, ttft_target_ms=60_000
    )
    Tenant.objects.get().slo_classes.add(slow)
    SloClass.objects.filter(name="interactive").update(if_unreachable="degrade", degrades_to=slow)
    put("SWAP_BY_QUEUE", shares, "test")
    live = RowsFleet("m", ROUND_TRIP_S)
    asked = [
        replace(each, slo_class="slow" if at % 3 else "interactive", model="n" if shares and at % 4 == 0 else "m")
        for at, each in enumerate(requests(FORKED_S + AFTER_S, 4.2))
    ]
    before = [each for each in asked if each.arrived_s < FORKED_S]
    live.let_come(before, FORKED_S)
    start = Start.model_validate_json(fork_of(live.seen(), AFTER_S).model_dump_json())
    dispatcher = live.dispatcher
    waiting = sorted(
        (one.asked.number, one.row) for endpoint in live.topology.endpoints for one in dispatcher.queue.of(endpoint)
    )
    assert len(waiting) > 20
    keys = [(one.model, one.region) for one in live.topology.endpoints]
    waits = dispatcher.waits.control
    of_fleet = estimates(
        waits, AdmissionControl(dispatcher.fleet, waits), [row for _, row in waiting], range(len(keys))
    )
    assert waits.correction(0, "slow").batches > 2.0
    live.let_come(asked[len(before) :])
    live.write_ledger()
    start = as_it_went(start, AFTER_S)
    staged = stage_start(start, Scenario.model_validate(start.scenario), 0)
    assert staged.requests.judged.any()
    simulation = Simulation(staged.cluster, staged.requests, state=staged.state)
    if shares:
        staged.swapping(simulation)
    simulation.waits.refresh()
    numbers = sorted(int(one.request_id[1:]) for one in start.state.requests)
    rows = [numbers.index(number) for number, _ in waiting]
    of_fork = estimates(
        simulation.waits.control,
        simulation.admission.control,
        rows,
        [staged.cluster.endpoints.index(key) for key in keys],
    )
    assert of_fork == pytest.approx(of_fleet, rel=CLOSE, abs=CLOSE)
