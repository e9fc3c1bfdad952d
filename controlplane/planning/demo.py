"""Policy bundles of the demo: several papers' bundles in two modes, to view, approve and compare."""

from collections import Counter
from typing import Literal

from django.db import transaction

from controlplane.fleet.demo import seed as seed_fleet
from controlplane.fleet.models import Model
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.services import set_policy, switch_bundle
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting
from scheduling.bundles import BUNDLES

# PreServe, whose mLSTM needs the models extra, and SSJF are for operators to choose.
GIVEN = {
    "llama-3.1-8b": ("sageserve-lt-ua", PolicyMode.AUTO),  # ARIMA; until its first fit, after some windows, the blend
    "llama-2-70b": ("hermes", PolicyMode.AUTO),  # it serves the applications
    "bloom-176b": ("qlm", PolicyMode.AUTO),
    "llama-3.2-3b": ("pilothouse", PolicyMode.ASK),
    "qwen3-embedding-0.6b": ("pilothouse", PolicyMode.AUTO),
}
"""Bundle and mode by model."""


@transaction.atomic
def seed() -> Counter[str]:
    """Assign bundles to demo models without a policy; operators' policies stay. Return counts of created rows."""
    created: Counter[str] = Counter()
    if not Setting.objects.filter(name="SPOT_DONATE").exists():
        tuning.change("SPOT_DONATE", True, "demo", "the demo shows the spot pool")
        created["settings"] += 1
    with_policy = set(ScalingPolicy.objects.values_list("model__name", flat=True))
    for model in Model.objects.filter(name__in=GIVEN.keys() - with_policy).order_by("name"):
        bundle, mode = GIVEN[model.name]
        set_policy(model, BUNDLES[bundle].strategy, mode, {}, "demo", "the demo shows several modes")
        switch_bundle(model, bundle, "demo", "the demo shows several bundles")
        created["scaling policies"] += 1
    return created


def seed_all(fleet: Literal["none", "emulated"] = "emulated") -> Counter[str]:
    """Create the whole demo, inventory and policies; rows that exist stay. Return counts of created rows."""
    return seed_fleet(fleet) + seed()
