"""Which regions have the weights of a model, and how long a start takes longer where they are missing.

A region has them once an instance became ready there, or where `Model.weights_in` names it. Of a model in no region nothing
is known, and its weights count as near everywhere (SageServe 7.1: remote weights take two hours).
"""

from controlplane.fleet.models import Instance, Model, Region
from controlplane.tuning.selectors import tuned


def pull_s(model: Model, region: Region) -> float:
    """Return the seconds to pull the weights of *model* into *region*; 0 where they are, or nothing is known of them."""
    known = {row.pk for row in model.weights_in.all()}
    return 0.0 if not known or region.pk in known else model.weights_bytes / 1e9 / tuned().WEIGHTS_GB_PER_S


def remote() -> dict[tuple[str, str], float]:
    """Return the seconds of a pull by (model, region) name, where the weights are missing."""
    regions = list(Region.objects.filter(active=True))
    models = Model.objects.filter(active=True, weights_in__isnull=False).distinct().prefetch_related("weights_in")
    times = {(model.name, region.name): pull_s(model, region) for model in models for region in regions}
    return {place: seconds for place, seconds in times.items() if seconds > 0}


def record_ready(instance: Instance) -> None:
    """Record that *instance*, which has become ready, has loaded the weights in its region."""
    instance.deployment.model.weights_in.add(instance.deployment.region)
