"""Batches in every state, a spot pool and held work: what the pages of batches are looked at with."""

import time
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.batches.models import Batch, BatchStatus, StoredFile
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Donation, DonationState, Instance
from scheduling.queueing import held_work

MODELS = ("bloom-176b", "llama-2-70b", "llama-3.1-8b", "llama-3.2-3b")
REGIONS = ("us-central", "us-east", "us-west")
DUPLICATE = {"line": 812, "code": "duplicate_custom_id", "message": "The custom_id is that of line 3.", "param": None}
MINUTE_S, HOUR_S = 60.0, 3600.0


def batch(tenant: Tenant, model: str, *, done: int, total: int, due_in_s: float, status: str, **values: Any) -> Batch:
    """Write a batch that began 10 minutes ago and has done its lines at an even pace."""
    now = time.time()
    began = now - 10 * MINUTE_S
    content = StoredFile.objects.create(tenant=tenant, filename="in.jsonl", purpose="batch", size_bytes=4_096)
    running = status == BatchStatus.IN_PROGRESS
    return Batch.objects.create(
        tenant=tenant, input_file=content, endpoint="/v1/chat/completions", completion_window="24h", status=status,
        model=model, total=total, completed=done - values.get("failed", 0), lines_read=total,
        samples=[(began + 20 * step, done * step // 30) for step in range(31)] if done else [(began, 0)],
        moments={"in_progress": began, status: began if running else now - 2 * MINUTE_S},
        created_at=timezone.now() - timedelta(minutes=11),
        expires_at=timezone.now() + timedelta(seconds=due_in_s), **values,
    )  # fmt: skip


def batches() -> None:
    acme, globex = (Tenant.objects.get(name=name) for name in ("acme", "globex"))
    running, done = BatchStatus.IN_PROGRESS, BatchStatus.COMPLETED
    batch(acme, "bloom-176b", done=6_200, total=12_000, due_in_s=9.4 * MINUTE_S, status=running, failed=41)
    batch(globex, "llama-2-70b", done=1_120, total=8_000, due_in_s=40 * MINUTE_S, status=running, failed=3)
    batch(acme, "llama-3.1-8b", done=31_400, total=50_000, due_in_s=5 * HOUR_S, status=running)
    batch(acme, "", done=50, total=30_000, due_in_s=23 * HOUR_S, status=running)
    batch(acme, "", done=0, total=0, due_in_s=24 * HOUR_S, status=BatchStatus.VALIDATING)
    batch(globex, "llama-3.2-3b", done=800, total=900, due_in_s=HOUR_S, status=BatchStatus.CANCELLING)
    batch(globex, "llama-2-70b", done=9_600, total=9_600, due_in_s=HOUR_S, status=done, failed=22)
    batch(acme, "llama-3.1-8b", done=3_310, total=5_000, due_in_s=HOUR_S, status=BatchStatus.CANCELLED)
    batch(acme, "llama-3.1-8b", done=8_410, total=12_000, due_in_s=-MINUTE_S, status=BatchStatus.EXPIRED)
    batch(globex, "bloom-176b", done=0, total=0, due_in_s=HOUR_S, status=BatchStatus.FAILED, errors=[DUPLICATE])


def spot() -> list[Instance]:
    """Donate two instances, one of which is reclaimed, with reclaims of the last days; return the two."""
    now = timezone.now()
    chosen = list(Instance.objects.filter(state=InstanceState.READY, deployment__model__name=MODELS[3])[:2])
    for number in range(40):
        taken_s = 20 + 7 * (number % 9) + (90 if number % 13 == 0 else 0)
        asked_at = now - timedelta(hours=3 * number + 2)
        Donation.objects.create(
            instance=chosen[number % 2], actor="planner", reason="the plan asks for one fewer",
            state=DonationState.RECLAIMED, spot_usd_per_hour="2.3000", donated_at=asked_at - timedelta(hours=1),
            reclaim_at=asked_at, ended_at=asked_at + timedelta(seconds=taken_s), evicted_requests=number % 5,
        )  # fmt: skip
    for number, row in enumerate(chosen):
        Donation.objects.create(
            instance=row, actor="planner", reason="the plan asks for one fewer", spot_usd_per_hour="2.3000",
            state=DonationState.RECLAIMING if number else DonationState.DONATED,
            donated_at=now - timedelta(minutes=40 + number), reclaim_at=now - timedelta(seconds=21) if number else None,
        )  # fmt: skip
        state = InstanceState.RECLAIMING if number else InstanceState.DONATED
        Instance.objects.filter(pk=row.pk).update(state=state)
    return chosen


def held(now_s: float) -> dict[str, Any]:
    """Return the part of the gateway's summary that says of held work: every gate, every age and every rule."""
    return {
            "model": list(MODELS[:3]), "count": [5_730, 6_610, 40_120], "announced": [52, 6_880, 18_600],
            "opportunistic": [0, 0, 120], "slack_s": [45.0, 5_220.0, 15_540.0],
            "next_s": [0.4, 8.0, 0.1], "oldest_s": [38_460.0, 9_200.0, 12_000.0],
            "due_s": [165.0, 5_400.0, 15_900.0],
            "last": [
                {"at": now_s - 3, "region": REGIONS[1], "why": held_work.DUE, "use_ratio": 0.72},
                {"at": now_s - 9, "region": REGIONS[2], "why": held_work.USED, "use_ratio": 0.54},
                {"at": now_s - 1, "region": REGIONS[0], "why": held_work.TROUGH, "use_ratio": 0.38},
            ],
            "reason": [
                "Slack 45 s: use is overruled", "Use 54%, releases below 60%",
                "US Central takes as many as fit below 60%",
            ],
    }  # fmt: skip


def furnish() -> list[Instance]:
    """Write all of it; return the donated instances."""
    batches()
    return spot()
