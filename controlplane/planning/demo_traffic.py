"""The demo's traffic: who sends what to which deployments."""

from dataclasses import replace
from typing import Final

from django.conf import settings

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Deployment
from scheduling.model_task import Task
from workers.traffic.waves import EMBEDDINGS, KINDS, Stream, streams

KINDS_OF: Final = {Task.GENERATE: KINDS, Task.EMBED: EMBEDDINGS}
SHARES: Final = {
    "acme": {"interactive": 1.0, "non-interactive": 0.4},
    "globex": {"non-interactive": 0.6, "opportunistic": 1.0},
}
"""Senders of the demo's traffic: a share of each SLO class, summing to one."""
JOBS: Final = {("globex", "bloom-176b", "opportunistic"): 300}
"""Requests of a job by tenant, model and class: more at once than its instances run, so that some wait."""
ADAPTER_SHARE: Final = 0.08
"""Requests for an adapter, of those for its base model."""
RUNS_OF, RUN_CONTEXT_TOKENS = "acme", 4096
"""Sender of runs of applications, to one interactive stream of each region whose model has this context."""


def senders() -> list[Tenant]:
    return list(Tenant.objects.filter(name__in=SHARES, active=True).order_by("name"))


def streams_to(tenant: Tenant, secret: str = "") -> list[Stream]:
    """Return every stream that *tenant* sends to the active deployments that generate or embed, with the API key *secret*.

    A tenant outside the demo sends all of each class that it may use.
    """
    endpoints: dict[str, set[tuple[str, str, int]]] = {task: set() for task in KINDS_OF}
    adapters = set[str]()
    for row in Deployment.objects.filter(active=True, model__task__in=KINDS_OF).select_related("model", "region"):
        own = (
            row.model.adapters.filter(active=True, tenant=None).values_list("name", flat=True) if row.max_loras else ()
        )
        adapters.update(own)
        for name in (row.model.name, *own):
            endpoints[row.model.task].add((name, row.region.name, row.model.context_tokens))
    allowed = {*tenant.slo_classes.values_list("name", flat=True), tenant.default_slo_class.name}
    shares = SHARES.get(tenant.name, dict.fromkeys(KINDS, 1.0))
    keys = {name: secret for name in KINDS if name in allowed and name in shares}
    made, with_runs = [], set[str]()
    for task, kinds in KINDS_OF.items():
        for stream in streams(endpoints[task], keys, settings.DEMO_DAY_S, kinds):
            runs = tenant.name == RUNS_OF and stream.slo_class == "interactive" and not stream.kind.embeds
            runs = runs and stream.context_tokens >= RUN_CONTEXT_TOKENS and stream.region not in with_runs
            with_runs |= {stream.region} if runs else set()
            job = JOBS.get((tenant.name, stream.model, stream.slo_class), 0)
            share = shares[stream.slo_class] * (ADAPTER_SHARE if stream.model in adapters else 1.0)
            made.append(replace(stream, share=share, job=job, runs=runs))
    return made
