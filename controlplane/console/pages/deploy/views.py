"""Deploy: one form from hardware and model to instances that start, then the way to the first token."""

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.html import format_html
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context
from controlplane.console.pages.deploy.forms import ELSEWHERE, DeployForm
from controlplane.fleet.inventory import deploy as deploying
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Deployment, Model
from scheduling.fleet.published_models import PUBLISHED
from scheduling.model_task import Task
from workers.vllm.tasks import PATHS, SPEECH


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.OPERATOR)
def deploy(request: HttpRequest) -> HttpResponse:
    """With a query string, the form is filled from it, and with its defaults: a page with another estimate, and a link that
    can be sent.
    """
    posted, is_admin = request.method == "POST", may(request, Role.ADMIN)
    form = DeployForm(request.POST if posted else None, may_address=is_admin)
    if request.GET and not posted:
        defaults = {name: field.initial for name, field in form.fields.items() if field.initial is not None}
        form = DeployForm(defaults | request.GET.dict(), may_address=is_admin)
        form.overlook_missing()
    resting = deploying.out_of_use(form.wanted()) if posted and form.is_valid() else None
    if posted and form.is_valid():
        try:
            made = deploying.deploy(form.wanted(), user_of(request), form.cleaned_data["reason"])
            return redirect("console:deployed", made.deployment.pk)
        except ValidationError as error:
            for name, texts in error.message_dict.items():
                form.add_error(name if name in form.fields else None, texts)
        except ActionError as error:
            form.add_error(None, str(error))
    wanted = form.wanted()
    context = {
        "form": form,
        "posted": posted,
        "wanted": wanted,
        "old": Model.objects.filter(name=wanted.model, active=True).first(),
        "published": PUBLISHED.items(),
        "wrong": [field for field in form if field.errors] if posted else [],
        "estimate": deploying.estimate(wanted) if form.is_bound else None,
        "out_of_use": resting,
        "elsewhere": ELSEWHERE,
        "places": deploying.place_options(wanted),
    }
    return render(request, "console/deploy/deploy.html", context, status=422 if posted else 200)


@require_safe
@fleet_role(Role.VIEWER)
def deployed(request: HttpRequest, pk: int) -> HttpResponse:
    """The instances of one deployment as they start, and the request to send once one is ready."""
    rows = Deployment.objects.select_related("model", "region", "gpu_type")
    deployment = get_object_or_404(rows, pk=pk)
    instances = list(deployment.instances.exclude(state=InstanceState.STOPPED).order_by("pk"))
    context = {
        **live_context(feed.state(), "instances,events"),
        "deployment": deployment,
        "instances": instances,
        "ready": any(instance.state == InstanceState.READY for instance in instances),
        "failed": [instance for instance in instances if instance.state == InstanceState.FAILED],
        "profile": deployment.profile(),
        "curl": _example(request, deployment.model),
    }
    return render(request, "console/deploy/deployed.html", context)


def _example(request: HttpRequest, model: Model) -> str:
    """Return a curl command for the first call that *model* serves."""
    path = PATHS[Task(model.task)][0]
    if path in SPEECH:
        return format_html(SPEECH_CURL, address=request.build_absolute_uri(path), model=model.name)
    body = json.dumps({"model": model.name} | BODIES[path])
    return format_html(CURL, address=request.build_absolute_uri(path), body=body)


BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"stream": True, "messages": [{"role": "user", "content": "Say hello."}]},
    "/rerank": {"query": "What is a cat?", "documents": ["A cat is an animal.", "The sun is a star."]},
} | {path: {"input": "Say hello."} for path in ("/v1/embeddings", "/pooling", "/classify")}
CURL = """curl -N {address} \\
  -H "Authorization: Bearer $PILOTHOUSE_API_KEY" -H "Content-Type: application/json" \\
  -d '{body}'"""
SPEECH_CURL = """curl {address} \\
  -H "Authorization: Bearer $PILOTHOUSE_API_KEY" \\
  -F model={model} -F file=@speech.wav"""
