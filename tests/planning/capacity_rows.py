"""Rows of capacity plans: one that is done, with a part of its answer that fits no drawing, and a verdict on two regions."""

from typing import Any

from django.utils import timezone

from controlplane.planning.models import CapacityPlan, CapacityState, RegionLoss
from controlplane.planning.sizing.question import Question


def done(**question: Any) -> CapacityPlan:
    """Write a plan of two H200, which the fleet does not have, in us-east."""
    usd = {"on_demand": 5110.0, "reserved": 3066.0, "spot": 2044.0}
    place = {"model": "llama-3.1-8b", "region": "us-east", "gpu_type": "h200-141gb"}
    costs = {f"usd_{name}": value for name, value in usd.items()}
    answer = {
        "demand": {"factor": 1.77, "months": 6, "today_tokens_per_s": 1000.0, "planned_tokens_per_s": 1770.0,
                   "regions": ["us-east"], "remarks": []},
        "offers": [
            place | {"fits": True, "tensor_parallel": 1, "tokens_per_s": 9000.0, "usd_per_million_tokens": 0.108,
                     "estimated": True, "why_not": ""},
            place | {"gpu_type": "l4-24gb", "fits": False, "tensor_parallel": None, "tokens_per_s": 0.0,
                     "usd_per_million_tokens": None, "estimated": False, "why_not": "does not fit 8"},
        ],
        "unserved": [], "first_s": 0.4, "took_s": 9.0, "usd_per_month": usd,
        "fleet": [place | {"tensor_parallel": 1, "instances": 2, "gpus": 2, "usd_per_month": 5110.0, "estimated": True}],
        "gpus": [place | costs | {"needed": 2, "have": 0, "buy": 2, "spot_assumed": True}],
        "check": {"holds": True, "simulations": 40, "one_less_tried": 1, "shares": [
            {"model": "llama-3.1-8b", "slo_class": "interactive", "met_ratio": 0.97, "target_ratio": 0.95, "holds": True}]},
        "frontier": [
            {"attainment": 0.9, "usd_per_month": 5110.0, "why": ""},
            {"attainment": 0.99, "usd_per_month": 7665.0, "why": "the time of the check ended first"},
            {"attainment": 0.999, "usd_per_month": None, "why": "fleets for up to 3 times the demand reach 99.2% for llama"},
        ],
        "scenario": {
            "fleet": [{"model": "llama-3.1-8b", "regions": ["us-east"], "gpu": "h200-141gb", "instances": 2,
                       "kv_tokens": 800_000}],
            "profiles": [{"model": "llama-3.1-8b", "gpu": "h200-141gb", "decode": {"a_s": 0.008},
                          "prefill": {"a_s": 0.02, "b_s_per_token": 4e-5}}],
            "gpus": {"h200-141gb": {"usd_per_hour": 3.5}},
        },
        "buy_by": {"carries": 1.2, "months": 2.0, "date": "2027-01-29", "known": True},
    }  # fmt: skip
    asked = Question(gpus={"h200-141gb": 3.5}, **question).model_dump(mode="json")
    return CapacityPlan.objects.create(question=asked, state=CapacityState.DONE, answer=answer, ended_at=timezone.now())


def lost() -> RegionLoss:
    """Write verdicts: without US East interactive falls, without US West it does not."""
    row = {"slo_class": "interactive", "without_loss_ratio": 0.99}
    return RegionLoss.objects.create(regions=[
        row | {"region": "us-east", "title": "US East", "survives": False, "slo_met_ratio": 0.81, "below_target_s": 2400.0},
        row | {"region": "us-west", "title": "US West", "survives": True, "slo_met_ratio": 0.97, "below_target_s": 0.0},
    ])  # fmt: skip
