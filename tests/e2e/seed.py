"""Rows for the browser tests: people of every kind, and a fleet with a history."""

import math
import random
from datetime import timedelta
from typing import Any

from django.contrib.auth.hashers import Argon2PasswordHasher
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Membership, Role, Tenant, User
from controlplane.accounts.services import create_api_key
from controlplane.alerts.models import Alert, AlertRule
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Gpu, Instance, Node, SloClass, SloKind, Stock, StockState
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.demo import seed_all
from controlplane.usage.models import UsageHour, UsageMark

PASSWORD = "a long password for browser tests"
DRAINED, FAILED, LOST, FULL = (
    "llama-3-1-8b-us-east-2",
    "bloom-176b-us-west-2",
    "llama-2-70b-us-west-1",
    "llama-3-1-8b-us-central-2",
)
NODE = "us-east-h100-1"


def people() -> None:
    """An operator and an admin of the fleet, and a member of one tenant."""
    slo_class = SloClass.objects.create(
        name="interactive", title="Interactive", kind=SloKind.INTERACTIVE, ttft_target_ms=500
    )
    operations = Tenant.objects.create(
        name="operations", title="Fleet operations", operates_fleet=True, default_slo_class=slo_class
    )
    acme = Tenant.objects.create(name="acme", title="Acme Assistants", default_slo_class=slo_class)
    # The server has its own settings, and with them the hasher of production.
    password = Argon2PasswordHasher().encode(PASSWORD, "saltsaltsaltsalt")
    for name, tenant, role in (
        ("operator", operations, Role.OPERATOR),
        ("admin", operations, Role.ADMIN),
        ("tenant", acme, Role.OPERATOR),
    ):
        user = User.objects.create(username=name, password=password)
        Membership.objects.create(user=user, tenant=tenant, role=role)


def fleet() -> list[dict[str, Any]]:
    """Write the demonstration fleet, started, with some faults; return the feed's view of it."""
    seed_all()
    operator = User.objects.get(username="operator")
    for row in Instance.objects.exclude(state=InstanceState.STOPPED):  # a member of a swap group
        services.move(row, InstanceState.LOADING, actor="launcher", reason="its server started")
        services.move(row, InstanceState.READY, actor="gateway", reason="it answers health and metrics")
    services.move(Instance.objects.get(name=DRAINED), InstanceState.DRAINING, actor=operator, reason="driver update")
    services.move(
        Instance.objects.get(name=FAILED), InstanceState.FAILED, actor="gateway", reason="3 heartbeats missed"
    )
    now = timezone.now()
    rule, _ = AlertRule.objects.get_or_create(condition="instance", defaults={"name": "Instance down"})
    for subject, by in ((FAILED, ""), (LOST, "admin")):
        Alert.objects.create(
            rule=rule, subject=subject, title=f"{subject} failed", detail="3 heartbeats missed", severity="critical",
            since=now, opened_at=now, seen_at=now,
            acknowledged_by=by, acknowledged_at=now if by else None,
        )  # fmt: skip
    for tenant in Tenant.objects.all():
        create_api_key(tenant, f"{tenant.name} production", operator)
    node = Node.objects.get(name=NODE)
    Gpu.objects.create(node=node, name="3", cordoned="GPU health, fallen off the bus", failed_starts={"a": "Xid 79"})
    for number, state in enumerate(StockState):
        Stock.objects.create(node=node, name=f"model-{number}", source=f"acme/model-{number}", state=state, error="401")
    requests()
    usage()
    rows = []
    for row in Instance.objects.select_related("deployment__model", "deployment__region", "deployment__gpu_type"):
        said = {
            "id": row.pk,
            "name": row.name,
            "model": row.deployment.model.name,
            "region": row.deployment.region.name,
            "gpu_type": row.deployment.gpu_type.name,
            "state": str(row.state),
        }
        if row.name == LOST:
            said["reachable"] = False
        if row.name == FULL:
            said |= {"kv_ratio": 0.968, "waiting": 3}
        rows.append(said)
    return rows


def requests(count: int = 70) -> None:
    dice = random.Random(11)
    acme, key = Tenant.objects.get(name="acme"), ApiKey.objects.get(tenant__name="acme")
    instances = list(Instance.objects.select_related("deployment__model", "deployment__region"))
    for number in range(count):
        chosen = dice.choice(instances)
        others = [row for row in instances if row.deployment_id == chosen.deployment_id]
        queue_ms = dice.uniform(0.2, 60)
        ttft_ms = queue_ms + dice.uniform(80, 600)
        output_tokens = dice.randint(5, 800)
        outcome = dice.choices(list(Outcome), [90, 4, 4, 4])[0]
        rejected = outcome == Outcome.REJECTED
        LedgerRow.objects.create(
            request_id=f"chatcmpl-{dice.getrandbits(96):024x}",
            arrived_at=timezone.now() - timedelta(seconds=20 * (count - number)),
            tenant=acme,
            api_key=key,
            model=chosen.deployment.model.name,
            slo_class="interactive",
            region=chosen.deployment.region.name,
            instance="" if rejected else chosen.name,
            streamed=True,
            outcome=outcome,
            status_code={"done": 200, "failed": 502, "cancelled": 499, "rejected": 429}[outcome],
            error_code={"failed": "instance_lost", "rejected": "queue_full"}.get(outcome, ""),
            prompt_tokens=dice.randint(20, 4000),
            output_tokens=0 if rejected else output_tokens,
            predicted_output_tokens=dice.randint(50, 400),
            queue_ms=queue_ms,
            ttft_ms=None if rejected else ttft_ms,
            itl_ms=None if rejected else dice.uniform(15, 40),
            e2e_ms=None if rejected else ttft_ms + output_tokens * 25,
            slo_met=None if outcome in (Outcome.REJECTED, Outcome.CANCELLED) else dice.random() > 0.1,
            attempts=0 if rejected else 1,
            trace=[]
            if rejected
            else [
                {
                    "instance": chosen.name,
                    "region": chosen.deployment.region.name,
                    "policy": "join_shortest_queue",
                    "ordering": "priority",
                    "waited_ms": queue_ms,
                    "waiting": dice.randint(0, 9),
                    "seen": [
                        {
                            "instance": row.name,
                            "accepting": True,
                            "running": dice.randint(3, 60),
                            "remaining_tokens": 900 if row is chosen else dice.randint(1000, 30000),
                            "kv_tokens": dice.randint(9000, 90000),
                        }
                        for row in others
                    ],
                }
            ],
        )


USED_BY = {"acme": ("interactive", "non-interactive"), "globex": ("non-interactive", "opportunistic")}
TOP_TENANT = "globex"


def usage(hours: int = 30) -> None:
    """Write two tenants that use four models by day, and idle instances at night."""
    dice = random.Random(5)
    now = timezone.now().replace(minute=0, second=0, microsecond=0)
    keys = {key.tenant.name: key for key in ApiKey.objects.select_related("tenant")}
    for back in range(hours):
        light = 0.6 - 0.35 * math.cos(2 * math.pi * (back + 3) / 24)
        for model, usd in (("llama-2-70b", 38.0), ("bloom-176b", 50.0), ("llama-3.1-8b", 20.0), ("llama-3.2-3b", 12.0)):
            gpus = usd / 1.35
            for tenant, classes in USED_BY.items():
                for slo_class in classes:
                    share = light * dice.uniform(0.15, 0.25) * (1.4 if tenant == TOP_TENANT else 1.0)
                    UsageHour.objects.create(
                        hour=now - timedelta(hours=back), tenant=keys[tenant].tenant, api_key=keys[tenant],
                        model=model, gpu_type="h100-80gb", slo_class=slo_class, requests=int(4_000 * share),
                        prompt_tokens=int(3_000_000 * share), output_tokens=int(800_000 * share), kv_token_s=9e6 * share,
                        gpu_s=gpus * 3600 * share, cost_usd=usd * share, charged_usd=usd * share * 0.5,
                    )  # fmt: skip
            UsageHour.objects.create(
                hour=now - timedelta(hours=back),
                model=model,
                gpu_type="h100-80gb",
                gpu_s=gpus * 3600 * 0.2,
                cost_usd=usd * 0.2,
            )
    UsageMark.objects.create(counted_until=timezone.now())
