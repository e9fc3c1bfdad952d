"""`manage.py simulate --fit`: from published measurements and from our own ledger to rows that the simulator takes."""

import json
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.demo import seed
from controlplane.fleet.models import GpuType, Instance, Model, PerformanceProfile
from controlplane.gateway.models import LedgerRow
from controlplane.simulation.services import find_gpu_type, find_model
from scheduling.fleet.profile import Profile
from tests import database
from tests.gateway.rows import served_row

TRUE = Profile(0.05, 0.016, 8.4e-5, 0.0, 0.029, 2.5e-4, 4e-8)


@pytest.fixture
def demo(db):
    database.write(seed)


def splitwise(folder: Path, model: str = "llama2-70b", gpu: str = "h100-80gb", slower: float = 1.0) -> Path:
    """Return rows of the published form, made from TRUE."""
    path = folder / "perf.csv"
    lines = ["model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel"]
    for prompt, batch in [(size, 1) for size in (128, 512, 1024, 2048, 4096, 8192)] + [(512, n) for n in (2, 8, 32)]:
        first_ms = 1000 * slower * TRUE.step_time_s(prompt * batch, 0, 0)
        between_ms = 1000 * slower * TRUE.step_time_s(0, batch, batch * (prompt + 64))
        lines.append(f"{model},{gpu},{prompt},{batch},128,{first_ms},{between_ms},{128 * between_ms},4")
    path.write_text("\n".join(lines))
    return path


def run(*arguments: str, **options) -> str:
    out = StringIO()
    call_command("simulate", *arguments, stdout=out, **options)
    return out.getvalue()


def test_fits_are_shown_and_nothing_is_stored(demo, tmp_path: Path) -> None:
    before = list(PerformanceProfile.objects.values())
    text = run(str(splitwise(tmp_path)), "--fit", "splitwise")
    assert "llama2-70b" in text
    assert "TTFT, 1 series" in text
    assert list(PerformanceProfile.objects.values()) == before


def test_fits_are_stored_in_the_place_of_older_ones(demo, tmp_path: Path) -> None:
    row = PerformanceProfile.objects.get(model__name="llama-2-70b", gpu_type__name="h100-80gb", tensor_parallel=4)
    others = PerformanceProfile.objects.exclude(pk=row.pk).count()
    old = row.decode_a_s
    answer = json.loads(run(str(splitwise(tmp_path, slower=2.0)), "--fit", "splitwise", "--write", "--json"))
    assert answer["stored"] == ["llama-2-70b on 4 x H100 80 GB"]
    row.refresh_from_db()
    assert row.decode_a_s == pytest.approx(2 * TRUE.decode_a_s, rel=0.01)
    assert row.prefill_b_s_per_token == pytest.approx(2 * TRUE.prefill_b_s_per_token, rel=0.01)
    assert row.source == "fit of perf.csv"
    assert row.prefill_error_pct is not None
    assert 0 < row.prefill_error_pct < 20  # without the shortest prompt nothing shows the floor
    assert PerformanceProfile.objects.exclude(pk=row.pk).count() == others
    event = Event.objects.get(kind="profile.fitted")
    assert event.before["decode_a_s"] == old
    assert event.after["decode_a_s"] == row.decode_a_s


def test_models_we_do_not_have_are_not_stored(demo, tmp_path: Path) -> None:
    path = splitwise(tmp_path, model="gpt-9")
    assert json.loads(run(str(path), "--fit", "splitwise", "--write", "--json"))["stored"] == []


def test_names_of_publications(demo) -> None:
    models, gpu_types = list(Model.objects.all()), list(GpuType.objects.all())

    def model(name: str) -> str | None:
        row = find_model(name, models)
        return row.name if row else None

    def gpu(name: str) -> str | None:
        row = find_gpu_type(name, gpu_types)
        return row.name if row else None

    assert model("meta-llama/Llama-3.1-8B-Instruct") == "llama-3.1-8b"
    assert model("llama2-70b") == "llama-2-70b"
    assert model("meta-llama/Llama-3.1-70B") is None
    assert gpu("h100_sxm") == gpu("H100") == gpu("h100-80gb") == "h100-80gb"
    assert gpu("A100-80") == "a100-80gb"
    assert gpu("a100-40gb") is None
    assert gpu("h100-80gb-pcap") is None
    assert gpu("h200_sxm") == "h200-141gb"
    assert gpu("b200_sxm") is None
    GpuType.objects.create(name="h100-nvl", title="H100 NVL", memory_bytes=94 * 2**30, on_demand_usd_per_hour=3)
    assert find_gpu_type("h100_sxm", list(GpuType.objects.all())) is None  # which of the two?


def ledger(instance: str, rows: int = 120, noise: float = 0.03) -> None:
    """Write requests as the gateway does, served by an instance with the profile TRUE."""
    random = np.random.default_rng(1)
    tenant = Tenant.objects.first()
    written = []
    for number in range(rows):
        running = int(random.integers(0, 3) * random.integers(1, 20))
        prompt, output = int(random.integers(100, 3000)), int(random.integers(20, 300))
        context = prompt + output / 2 + running * (1550 + 80)
        noisy = np.exp(noise * random.standard_normal(2))
        queue_ms = float(random.integers(0, 500))
        written.append(
            served_row(
                request_id=f"r{number}",
                arrived_at=datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=number),
                tenant=tenant,
                model="llama-2-70b",
                region="us-east",
                instance=instance,
                prompt_tokens=prompt,
                output_tokens=output,
                queue_ms=queue_ms,
                ttft_ms=queue_ms + 1000 * TRUE.step_time_s(prompt, 0, 0) * noisy[0],
                itl_ms=1000 * TRUE.step_time_s(0, running + 1, int(context)) * noisy[1],
                e2e_ms=5000.0,
                attempts=1,
                trace=[
                    {"instance": "another", "lost": "no answer", "seen": []},
                    {
                        "instance": instance,
                        "seen": [{"instance": "another", "running": 99}, {"instance": instance, "running": running}],
                    },
                ],
            )
        )
    LedgerRow.objects.bulk_create(written)


def test_our_own_ledger_refits_the_profile(demo) -> None:
    instance = Instance.objects.filter(
        deployment__model__name="llama-2-70b", deployment__region__name="us-east"
    ).first()
    ledger(instance.name)
    LedgerRow.objects.filter(request_id="r7").update(outcome="failed", ttft_ms=1e6)  # not a measurement
    answer = json.loads(run("--fit", "ledger", "--write", "--json"))
    assert answer["stored"] == ["llama-2-70b on 4 x H100 80 GB"]
    row = PerformanceProfile.objects.get(model__name="llama-2-70b", gpu_type__name="h100-80gb", tensor_parallel=4)
    assert row.source == "own ledger"
    for tokens in (200, 1000, 2500):
        assert row.coefficients().step_time_s(tokens, 0, 0) == pytest.approx(TRUE.step_time_s(tokens, 0, 0), rel=0.08)
    for batch in (1, 10, 30):
        expected = TRUE.step_time_s(0, batch, batch * 1630)
        assert row.coefficients().step_time_s(0, batch, batch * 1630) == pytest.approx(expected, rel=0.05)


def test_embeddings_fit_a_profile_of_prefills(demo) -> None:
    instance = Instance.objects.filter(deployment__model__name="qwen3-embedding-0.6b").first()
    ledger(instance.name)
    LedgerRow.objects.update(model="qwen3-embedding-0.6b", surface="embeddings", output_tokens=0, itl_ms=None)
    LedgerRow.objects.filter(request_id="r7").update(surface="tokenize", ttft_ms=1.0)  # the engine computes nothing
    answer = json.loads(run("--fit", "ledger", "--write", "--json"))
    assert answer["stored"] == ["qwen3-embedding-0.6b on 1 x A100 80 GB"]
    (fit,) = answer["fits"]
    assert (fit["decodes"], fit["decode_error"], fit["points"]) == (False, None, fit["points"])
    row = PerformanceProfile.objects.get(model__name="qwen3-embedding-0.6b")
    assert (row.estimated, row.source, row.decode_error_pct) == (False, "own ledger", None)
    assert 0 < row.prefill_error_pct < 10
    for tokens in (200, 1000, 2500):
        assert row.coefficients().step_time_s(tokens, 0, 0) == pytest.approx(TRUE.step_time_s(tokens, 0, 0), rel=0.08)
    assert "TTFT, 1 series" in run("--fit", "ledger")


def test_an_empty_ledger_fits_nothing(demo) -> None:
    assert json.loads(run("--fit", "ledger", "--write", "--json")) == {
        "fits": [],
        "failed": {},
        "summary": [],
        "stored": [],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give a scenario file"),
        (["--fit", "splitwise"], "Give a file of measurements"),
        (["x.csv", "--fit", "ledger"], "Give a file of measurements"),
        (["x.csv", "--fit", "splitwise"], "x.csv: No such file"),
    ],
)
def test_wrong_arguments(db, arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*arguments)
