"""The smallest inventory that a gateway can serve from."""

from collections.abc import Sequence
from typing import Any

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.fleet.models import Deployment, GpuType, Instance, Model, Region, SloClass
from controlplane.gateway.ledger.entry import COLUMNS, Row
from controlplane.gateway.models import LedgerRow, Outcome

SECRET = "ph_test-secret"


def ledger_row(row: Row | None = None, **values: Any) -> Row:
    """*row* of the ledger as it is written, with other *values* by column; without one, the defaults."""
    row = row or [LedgerRow._meta.get_field(name).get_default() for name in COLUMNS]
    return [values.get(name, value) for name, value in zip(COLUMNS, row, strict=True)]


def served_row(**values: Any) -> LedgerRow:
    """A request of the model m that was served, to be written."""
    usual = {"model": "m", "slo_class": "interactive", "region": "east", "streamed": True, "status_code": 200}
    return LedgerRow(**{"outcome": Outcome.DONE} | usual | values)


def make_rows(
    backends: Sequence[Any],
    *,
    regions: list[str],
    max_num_seqs: int,
    queue_bound: int,
    secret: str = SECRET,
    max_concurrent_requests: int = 256,
    model_name: str = "m",
    requests_ahead_limit: int | None = 0,
    ordering_policy: str = "priority",
) -> None:
    """One model on an instance for each of *backends* (which have a name and a url), one tenant, one key."""
    interactive = SloClass.objects.create(
        name="interactive",
        title="Interactive",
        kind="interactive",
        service_tier="priority",
        ttft_target_ms=1000,
        priority=0,
    )
    flexible = SloClass.objects.create(
        name="flexible", title="Flexible", kind="non_interactive", service_tier="flex", deadline_s=3600, priority=5
    )
    SloClass.objects.create(name="forbidden", title="Forbidden", kind="opportunistic", priority=9)
    tenant = Tenant.objects.create(
        name="acme", default_slo_class=interactive, max_concurrent_requests=max_concurrent_requests
    )
    tenant.slo_classes.set([interactive, flexible])
    ApiKey.objects.create(tenant=tenant, name="test", prefix=secret[:11], sha256=hash_secret(secret))
    gpu = GpuType.objects.create(name="h100", title="H100", memory_bytes=80 * 2**30, on_demand_usd_per_hour=2)
    model = Model.objects.create(
        name=model_name, title=model_name, weights_bytes=2**30, kv_bytes_per_token=2**17, context_tokens=8192
    )
    deployments = {}
    for name in dict.fromkeys(regions):
        deployments[name] = Deployment.objects.create(
            model=model,
            region=Region.objects.create(name=name, title=name),
            gpu_type=gpu,
            max_num_seqs=max_num_seqs,
            queue_bound=queue_bound,
            requests_ahead_limit=requests_ahead_limit,
            ordering_policy=ordering_policy,
        )
    for backend, region in zip(backends, regions, strict=True):
        Instance.objects.create(name=backend.name, deployment=deployments[region], url=backend.url, state="ready")


def make_model(name: str, *urls: str, max_num_seqs: int | None = None, queue_bound: int = 100, **model: Any) -> None:
    """One more model, with an instance in the region of the others at each of *urls*."""
    first = Deployment.objects.select_related("region", "gpu_type").first()
    assert first is not None
    values = {"title": name, "weights_bytes": 2**27, "kv_bytes_per_token": 2**14, "context_tokens": 8192} | model
    row = Model.objects.create(name=name, **values)
    deployment = Deployment.objects.create(
        model=row,
        region=first.region,
        gpu_type=first.gpu_type,
        max_num_seqs=max_num_seqs or first.max_num_seqs,
        queue_bound=queue_bound,
    )
    for number, url in enumerate(urls):
        Instance.objects.create(name=f"{name}-{number}", deployment=deployment, url=url, state="ready")
