"""Actions on more than one instance: rollouts of deployments."""

from urllib.parse import urlencode

from django.urls import reverse

from controlplane.accounts.models import Role
from controlplane.console.actions import ActionForm, action
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment
from controlplane.fleet.rollouts import services as rollouts

DEPLOYMENTS = Deployment.objects.select_related("model", "region", "gpu_type")
MAX_BAKE_S = 86_400


def instances_of(deployment: Deployment) -> str:
    """Return the address of the list of the instances of *deployment*."""
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return f"{reverse('console:instances')}?{query}"


@action(Role.OPERATOR, DEPLOYMENTS, page=instances_of)
def roll_out(form: ActionForm, deployment: Deployment) -> str:
    """Start the rollout of a deployment."""
    bake_s = form.fields.get("bake_s") or "60"
    if not bake_s.isdecimal() or int(bake_s) > MAX_BAKE_S:
        raise ActionError(f"The time to prove itself is from 0 to {MAX_BAKE_S} seconds")
    back = "bake_s" not in form.fields or "auto_back" in form.fields
    rollouts.start(deployment, form.user, form.reason, bake_s=int(bake_s), auto_back=back)
    return f"The rollout of {deployment} begins within seconds."
