"""What one instance can serve: learned from the ledger where its limit was seen, else computed from its profile.

The ledger tells the truth but only as far as the load went: the fullest window in which promises were kept is a limit only
if a window of at least that load broke them. Until then the profile's figure stands, if the ledger has not seen more.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Q, Sum
from django.db.models.functions import TruncMinute

from controlplane.fleet.models import Deployment, Instance, SloClass, SloKind
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.planning import inventory

logger = logging.getLogger(__name__)
LEDGER = timedelta(hours=2)
"""How far back windows are read: instances change, and so does what they are asked."""
MINUTE_S = 60
MISSED_SHARE = 0.05
"""A window breaks its promises when more than this share of its judged requests missed theirs."""
FULL = 0.7
"""Share of its sequences at which an instance is planned for: where a reactive strategy would add one more."""
USUAL_LENGTHS = (512, 128)
"""Prompt and output tokens of a request where none has been seen."""
USUAL_ITL_S = 0.2
"""Time between tokens where no interactive class promises one: about the speed of reading."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Prompt and output tokens a second that one instance serves within its promises, and how that is known."""

    tokens_per_s: float
    source: str


def read(fleet: inventory.Fleet, now: datetime) -> dict[tuple[str, str], Capability]:
    """By (model, GPU type); a pair of which neither ledger nor profile tells anything is left out."""
    seen = _limits(now)
    itl_s = _strictest_itl_s()
    found: dict[tuple[str, str], Capability] = {}
    for (model, _, gpu_type), deployment in fleet.deployments.items():
        key = model, gpu_type
        if key in found:
            continue
        lengths = _mean_lengths(model, now)
        computed = by_profile(deployment, *lengths, itl_s)
        limit = seen.get(key)
        if limit is not None and limit.reached:
            found[key] = Capability(limit.tokens_per_s, f"ledger: {limit.windows} windows, its limit was seen")
        elif computed > 0 and (limit is None or computed >= limit.tokens_per_s):
            source = f"profile, for requests of {lengths[0]:.0f} + {lengths[1]:.0f} tokens"
            found[key] = Capability(computed, source)
        elif limit is not None and limit.tokens_per_s > 0:
            found[key] = Capability(limit.tokens_per_s, f"ledger: the most in {limit.windows} windows, all well")
    return found


def by_profile(deployment: Deployment, prompt_tokens: float, output_tokens: float, itl_s: float) -> float:
    """Tokens a second of an instance that runs the same requests all the time, `FULL` of as many as it can at once.

    In the steady state each request costs its prefill and its share of every decode step: n of them at once, of o output
    tokens each, finish 1 / (prefill + o x step / n) a second. Fewer at once where the time between tokens, prefills of
    others included, would pass *itl_s*. 0 without a profile or room.
    """
    row = deployment.profile()
    if row is None or prompt_tokens + output_tokens <= 0:
        return 0.0
    profile = row.coefficients()
    prompt, output = max(1, round(prompt_tokens)), max(1.0, output_tokens)
    prefill_s = profile.step_time_s(prompt, 0, 0)
    context = prompt + output / 2
    room = int(deployment.expected_kv_tokens // (prompt + output))
    best = 0.0
    for sequences in range(1, max(1, int(FULL * min(deployment.max_num_seqs, room))) + 1):
        step_s = profile.step_time_s(0, sequences, int(sequences * context))
        requests_per_s = 1.0 / (prefill_s + output * step_s / sequences)
        if sequences / (requests_per_s * output) > itl_s:
            break
        best = max(best, requests_per_s * (prompt + output))
    return best if room >= 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Limit:
    tokens_per_s: float
    windows: int
    reached: bool


def _limits(now: datetime) -> dict[tuple[str, str], _Limit]:
    """The fullest window that kept its promises, by (model, GPU type), and whether a fuller one broke them."""
    hardware = {
        name: (model, gpu_type)
        for name, model, gpu_type in Instance.objects.values_list(
            "name", "deployment__model__name", "deployment__gpu_type__name"
        )
    }
    kept: dict[tuple[str, str], list[float]] = defaultdict(list)
    broken: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows = LedgerRow.objects.filter(arrived_at__gte=now - LEDGER, arrived_at__lt=now, outcome=Outcome.DONE)
    windows = rows.order_by().annotate(minute=TruncMinute("arrived_at")).values_list("minute", "instance")
    for _, instance, prompt, output, judged, missed in windows.annotate(
        Sum("prompt_tokens"),
        Sum("output_tokens"),
        Count("pk", filter=Q(slo_met__isnull=False)),
        Count("pk", filter=Q(slo_met=False)),
    ):
        key = hardware.get(instance)
        if key is not None and judged:
            (broken if missed > MISSED_SHARE * judged else kept)[key].append((prompt + output) / MINUTE_S)
    return {
        key: _Limit(max(rates), len(rates), any(rate >= max(rates) for rate in broken[key]))
        for key, rates in kept.items()
    }


def _mean_lengths(model: str, now: datetime) -> tuple[float, float]:
    """Mean prompt and output tokens of the requests of *model*, as far back as windows are read."""
    rows = MinuteRow.objects.filter(model=model, minute__gte=now - LEDGER, minute__lt=now)
    sums = rows.aggregate(requests=Sum("requests"), prompt=Sum("prompt_tokens"), output=Sum("output_tokens"))
    if not sums["requests"] or not sums["prompt"] + sums["output"]:
        return USUAL_LENGTHS
    return sums["prompt"] / sums["requests"], sums["output"] / sums["requests"]


def _strictest_itl_s() -> float:
    targets = SloClass.objects.filter(kind=SloKind.INTERACTIVE, itl_target_ms__isnull=False)
    least = targets.order_by("itl_target_ms").values_list("itl_target_ms", flat=True).first()
    return least / 1000 if least else USUAL_ITL_S
