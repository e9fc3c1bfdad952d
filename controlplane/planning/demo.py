"""Scaling policies of the demo: one of each mode, so that there is something to see, approve and compare."""

from collections import Counter

from django.db import transaction

from controlplane.fleet.models import Model
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.services import set_policy

POLICIES = {
    "llama-3.1-8b": ("pilothouse", PolicyMode.AUTO),
    "llama-2-70b": ("lt_ua", PolicyMode.AUTO),
    # PreServe goes by KV memory, which is what fills first on this model's instances.
    "bloom-176b": ("preserve", PolicyMode.AUTO),
    "llama-3.2-3b": ("lt_i", PolicyMode.ASK),
}
"""Strategy and mode by model."""


@transaction.atomic
def seed() -> Counter[str]:
    """Give the demo's models a policy where they have none; what an operator set stays. Returns the rows created."""
    created: Counter[str] = Counter()
    with_policy = set(ScalingPolicy.objects.values_list("model__name", flat=True))
    for model in Model.objects.filter(name__in=POLICIES.keys() - with_policy).order_by("name"):
        strategy, mode = POLICIES[model.name]
        set_policy(model, strategy, mode, {}, "seed_demo", "the demo shows each mode")
        created["scaling policies"] += 1
    return created
