"""Operations on rows: one view carries them out for a reason, and `{% operation %}` draws the button and dialog of each.

Those of a `Resource` are offered as it declares them; those below are only offered on pages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.core.exceptions import PermissionDenied
from django.db.models import Model as Row
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.views.decorators.http import require_POST
from pydantic import ValidationError

from controlplane.accounts.models import Role, User
from controlplane.accounts.selectors import manageable_api_keys, tenants_with_role
from controlplane.alerts import messages
from controlplane.alerts.models import AlertRule
from controlplane.applications import reporting
from controlplane.applications.models import ApplicationRun
from controlplane.batches.models import Batch
from controlplane.batches.services import cancel_batch
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, carried_out
from controlplane.dispatch.queues.operations import RunAction
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.errors import ApiError
from controlplane.resources.alerts import ALERTS
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import DEPLOYMENTS, GPUS, MAINTENANCE, MODELS, NODES, REGIONS, STOCK
from controlplane.resources.jobs import SHARDS
from controlplane.resources.lengths import LENGTH_VERSIONS
from controlplane.resources.plans import PLANS
from controlplane.resources.resource import Nothing, Operation, Resource
from controlplane.resources.undo import ACTIVATE, REVOKE


@dataclass(frozen=True)
class Offer:
    """Operations that pages offer on rows of one kind."""

    rows: Callable[[HttpRequest], QuerySet[Any]]
    """Those that the user may act on."""
    operations: tuple[Operation, ...]
    page: str
    """Name of the page that is shown after it, where the form names none."""
    of_tenants: bool = False
    """Not roles over the fleet but *rows* say who may."""

    def operation(self, verb: str) -> Operation | None:
        return next((each for each in self.operations if each.verb == verb), None)


def of(resource: Resource, page: str, *more: Operation) -> Offer:
    """Offer what *resource* declares that takes a reason alone or has a form, and *more*."""
    model = cast("type[Row]", resource.model)  # its operations have rows
    declared = (each for each in resource.operations if each.takes is Nothing or each.form)
    return Offer(lambda request: model._default_manager.all(), (*declared, *more), page)


def on(model: type[Row], page: str, *operations: Operation) -> Offer:
    return Offer(lambda request: model._default_manager.all(), operations, page)


def cancel(batch: Batch, actor: User, reason: str) -> str:
    try:
        cancel_batch(batch)
    except ApiError as error:
        raise ActionError(error.message) from error
    record("batch.canceled", batch, actor=actor, reason=reason)
    return f"{batch} is being canceled; lines that run finish, and its output stays readable."


def test_receivers(rule: AlertRule, actor: User, reason: str) -> str:
    if not rule.receivers:
        raise ActionError(f"{rule} has no receiver")
    if error := async_to_sync(messages.notify)(rule, messages.sample(rule, timezone.now())):
        raise ActionError(f"The test message of {rule} did not arrive: {error}")
    return f"{rule.receivers_shown} took a test message of {rule}."


def act_on_run(action: RunAction, run: ApplicationRun, actor: User, reason: str) -> str:
    return reporting.acted_on_run(run.run, action, reporting.act_on_run(run, action, actor, reason, timezone.now()))


OFFERS = {
    "alerts": of(ALERTS, "console:alerts"),
    "alert-rules": on(
        AlertRule,
        "console:alerts",
        Operation("test", test_receivers, "A test message is sent.", Role.ADMIN, needs_reason=False),
    ),
    "batches": Offer(
        lambda request: Batch.objects.filter(tenant__in=tenants_with_role(request.user, Role.OPERATOR)),
        (Operation("cancel", cancel, "Lines that run finish, and answers stay readable. This cannot be undone."),),
        "console:batches",
        of_tenants=True,
    ),
    "deployments": of(
        DEPLOYMENTS,
        "console:models",
        ACTIVATE,
    ),
    "gpus": of(GPUS, "console:fleet"),
    "instances": of(INSTANCES, "console:fleet"),
    "keys": Offer(
        lambda request: manageable_api_keys(request.user),
        (REVOKE,),
        "console:keys",
        of_tenants=True,
    ),
    "length-versions": of(LENGTH_VERSIONS, "console:models"),
    "maintenance": of(MAINTENANCE, "console:fleet"),
    "models": of(MODELS, "console:models", ACTIVATE),
    "nodes": of(NODES, "console:fleet"),
    "plans": of(PLANS, "console:scaling"),
    "shards": of(SHARDS, "console:system"),
    "regions": of(REGIONS, "console:fleet"),
    "stock": of(STOCK, "console:fleet"),
    "runs": on(
        ApplicationRun,
        "console:applications",
        Operation(
            "first", partial(act_on_run, RunAction.FIRST), "Its calls are served before all others of their class."
        ),
        Operation("stop", partial(act_on_run, RunAction.STOP), "Its open calls end, and later ones are refused."),
    ),
}
"""By the name in the address."""
LABELS = {
    ("deployments", "roll-back"): "Go back",
    ("deployments", "cancel-rollout"): "Cancel the rollout",
    ("instances", "swap"): "Swap to",
    ("length-versions", "rollback"): "Roll back",
    ("runs", "first"): "Move first",
    ("runs", "stop"): "Stop run",
}
DONE = {"rollback": "is rolled back"}
GRAVE = {"cancel", "cancel-rollout", "cordon", "reject", "retire", "revoke", "rollback", "stop", "undeploy"}
"""Verbs of what is hard to undo."""


def label_of(name: str, verb: str) -> str:
    return LABELS.get((name, verb), verb.replace("-", " ").capitalize())


def sentence_of(verb: str, done: Any) -> str:
    """Say what became of a row: what the operation returned, or that the row is, for example, approved."""
    if isinstance(done, str):
        return done
    return f"{done} {DONE.get(verb) or f'is {verb}' + ('d' if verb.endswith('e') else 'ed')}."


def given(operation: Operation, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what *operation* takes besides a reason, of the *fields* of a form."""
    try:
        return operation.read({name: value for name in operation.takes.model_fields if (value := fields.get(name))})
    except ValidationError as error:
        first = error.errors()[0]
        raise ActionError(f"{first['loc'][0]}: {first['msg']}") from error


@require_POST
@signed_in
def operate(request: HttpRequest, name: str, pk: int, verb: str) -> HttpResponseBase:
    """Carry out an operation on a row; its service records the event."""
    offer = OFFERS.get(name)
    operation = offer.operation(verb) if offer else None
    if offer is None or operation is None:
        raise Http404(f"There is no operation {verb} of {name}.")
    if not offer.of_tenants and not may(request, operation.least):
        raise PermissionDenied(f"Needs the role {operation.least}.")
    row = get_object_or_404(offer.rows(request), pk=pk)
    does = operation

    def carry_out(form: ActionForm) -> str:
        return sentence_of(verb, does.carry_out(row, form.user, form.reason, **given(does, form.fields)))

    return carried_out(request, carry_out, lambda: offer.page, f"{row} is unchanged" if verb != "test" else "")
