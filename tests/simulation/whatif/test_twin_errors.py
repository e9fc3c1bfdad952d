"""Errors of the simulator against the ledger's measurements."""

from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, GpuType, Instance, Model, PerformanceProfile
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.whatif import twin_errors
from controlplane.simulation.whatif.models import TwinError
from scheduling.fleet.profile import Profile
from tests.gateway.rows import make_rows, served_row

PROFILE = Profile(0.1, 0.05, 1e-3, 0.0, 0.1, 0.0, 0.0)
COUNT = 120


@pytest.fixture
def now(db):
    """Write a fleet of one instance, and a ledger of requests that met it idle: one every 10 s, as by their profile."""
    make_rows([SimpleNamespace(name="m-0", url="http://m-0")], regions=["east"], max_num_seqs=8, queue_bound=100)
    columns = {name: getattr(PROFILE, name) for name in PROFILE.__dataclass_fields__}
    PerformanceProfile.objects.create(
        model=Model.objects.get(), gpu_type=GpuType.objects.get(), tensor_parallel=1, source="test", **columns
    )
    Deployment.objects.update(min_instances=1, max_instances=1)
    now, tenant, random = timezone.now(), Tenant.objects.get(), np.random.default_rng(0)
    rows = []
    for number in range(COUNT):
        prompt, output = int(random.integers(20, 400)), int(random.integers(10, 50))
        ttft_ms = 1000 * max(PROFILE.prefill_t0_s, PROFILE.prefill_a_s + PROFILE.prefill_b_s_per_token * prompt)
        rows.append(
            served_row(
                request_id=f"r{number}",
                arrived_at=now - timedelta(seconds=10 * (COUNT - number) + 40),
                tenant=tenant,
                instance="m-0",
                prompt_tokens=prompt,
                output_tokens=output,
                predicted_prompt_tokens=prompt,
                predicted_output_tokens=output,
                queue_ms=0.0,
                ttft_ms=ttft_ms,
                itl_ms=100.0,
                e2e_ms=ttft_ms + 100.0 * (output - 1),
                slo_met=True,
                attempts=1,
                trace=[{"instance": "m-0", "seen": [{"instance": "m-0", "running": 0}]}],
            )
        )
    LedgerRow.objects.bulk_create(rows)
    return now


def test_measurements_equal_to_the_profile_have_no_error(now):
    (row,) = twin_errors.judge(now)
    assert (row.model, row.gpu, row.requests) == ("m", "h100", COUNT)
    assert row.errors["itl_p50"] == pytest.approx(0.0, abs=1e-3)
    assert row.errors["ttft_p50"] == pytest.approx(0.0, abs=0.02)
    assert row.errors["slo_met"] == 0.0
    assert twin_errors.fleet_error()["ttft_p95"] < 0.02


def test_requests_that_no_simulation_takes_are_left_out(now):
    """One that was cancelled while held has no region; a fallback may have served a model that is gone."""
    middle, tenant = now - timedelta(seconds=600), Tenant.objects.get()
    more = {"arrived_at": middle, "tenant": tenant, "model": "m", "streamed": False, "prompt_tokens": 9}
    cancelled = {"outcome": Outcome.CANCELLED, "status_code": 499}
    LedgerRow.objects.create(request_id="held", slo_class="interactive", **more, **cancelled)
    LedgerRow.objects.create(request_id="gone", slo_class="gone", region="east", **more, **cancelled)
    LedgerRow.objects.create(
        request_id="fell",
        slo_class="interactive",
        region="east",
        asked_model="gone",
        model_rule="failure",
        **more,
        **cancelled,
    )
    (row,) = twin_errors.judge(now)
    assert row.requests == COUNT


def test_a_profile_that_is_off_shows(now):
    PerformanceProfile.objects.update(decode_a_s=0.15)
    (row,) = twin_errors.judge(now)
    assert row.errors["itl_p50"] == pytest.approx(0.5, abs=0.01)


def test_there_are_as_many_instances_as_served(now):
    """Half of the requests on another instance: each is as idle as before, whatever would scale the fleet now."""
    Instance.objects.create(
        name="m-1", deployment=Deployment.objects.get(), url="http://m-1", state=InstanceState.STOPPED
    )
    for number in range(0, COUNT, 2):
        LedgerRow.objects.filter(request_id=f"r{number}").update(instance="m-1")
    values = scenario_of(inventory.read({"m"}), LedgerRow.objects.all())
    rows = list(LedgerRow.objects.order_by("arrived_at"))
    made = twin_errors._as_served(values, rows)
    assert [(table["instances"], table["empty"]) for table in made["fleet"]] == [(2, 0)]
    assert "scaling" not in made
    assert not any("strategy" in endpoint for endpoint in made["endpoints"])
    short = [row for row in rows if row.instance == "m-0" or row.request_id == "r0"]
    assert [table["instances"] for table in twin_errors._as_served(values, short)["fleet"]] == [1]
    twin_errors.judge(now)
    assert twin_errors.fleet_error()["slo_met"] == 0.0


def test_too_few_requests_say_nothing(now):
    LedgerRow.objects.exclude(request_id__in=[f"r{number}" for number in range(10)]).delete()
    assert twin_errors.judge(now) == []


def test_a_band_is_what_nine_of_ten_windows_were_within(db):
    now = timezone.now()
    for error in (0.02, -0.04, 0.06, -0.5):
        TwinError.objects.create(
            model="m",
            gpu="h100",
            from_at=now,
            to_at=now,
            requests=100,
            measured={"ttft_p95": 100.0, "slo_met": 0.9},
            simulated={"ttft_p95": 100.0 * (1 + error), "slo_met": 0.95},
        )
    band = twin_errors.twin_errors()["m", "h100"]
    assert band.windows == 4
    assert band.last["ttft_p95"] == pytest.approx(-0.5)
    assert 0.06 < band.within["ttft_p95"] < 0.5
    assert twin_errors.fleet_error()["slo_met"] == pytest.approx(0.05)


def test_it_is_due_when_its_time_has_passed(db, settings):
    settings.TWIN_ERROR_EVERY_S = 600.0
    now = timezone.now()
    assert twin_errors.due(now)
    TwinError.objects.create(model="m", gpu="g", from_at=now, to_at=now, requests=9, measured={}, simulated={})
    assert not twin_errors.due(now)
    assert twin_errors.due(now + timedelta(seconds=601))
    settings.TWIN_ERROR_EVERY_S = 0.0
    assert not twin_errors.due(now + timedelta(days=1))
