"""The first call with a new key, with a model served now and the tenant's class; for a service key, the fleet."""

import json
import shlex

from django.db.models import Count, Q

from controlplane.accounts.models import Tenant
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Model
from scheduling.model_task import Task

NO_MODEL = "MODEL"


def model_to_try() -> str:
    """The generating model with most instances that are ready, else one that is deployed; `NO_MODEL` where there is none."""
    ready = Count("deployments__instances", filter=Q(deployments__instances__state=InstanceState.READY))
    deployed = Model.objects.filter(deployments__isnull=False, task=Task.GENERATE)
    model = deployed.annotate(ready=ready).order_by("-ready", "name").first()
    return model.name if model is not None else NO_MODEL


def curl(base_url: str, secret: str, tenant: Tenant, model: str) -> str:
    """A streamed chat completion."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    return " \\\n  ".join(
        (
            f"curl -N {shlex.quote(f'{base_url}/v1/chat/completions')}",
            f"-H 'Authorization: Bearer {secret}'",
            "-H 'Content-Type: application/json'",
            f"-H {shlex.quote(f'X-SLO-Class: {tenant.default_slo_class.name}')}",
            f"-d {shlex.quote(json.dumps(body))}",
        )
    )


def python(base_url: str, secret: str, tenant: Tenant, model: str) -> str:
    """The same call with OpenAI's SDK."""
    return f"""\
from openai import OpenAI

client = OpenAI(base_url={json.dumps(f"{base_url}/v1")}, api_key={json.dumps(secret)})
stream = client.chat.completions.create(
    model={json.dumps(model)},
    messages=[{{"role": "user", "content": "Hello"}}],
    stream=True,
    extra_headers={{"X-SLO-Class": {json.dumps(tenant.default_slo_class.name)}}},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


def fleet_curl(base_url: str, secret: str) -> str:
    """The instances of the fleet, with a service key."""
    return f"curl {shlex.quote(f'{base_url}/api/instances')} \\\n  -H 'Authorization: Bearer {secret}'"


def fleet_python(base_url: str, secret: str) -> str:
    """The same with Python alone; what may be done is in `/api/docs`."""
    return f"""\
import json
from urllib.request import Request, urlopen

headers = {{"Authorization": {json.dumps(f"Bearer {secret}")}, "Content-Type": "application/json"}}
with urlopen(Request({json.dumps(f"{base_url}/api/instances")}, headers=headers)) as answer:
    for instance in json.load(answer)["items"]:
        print(instance["name"], instance["state"])
"""
