"""A fleet with two tenants in which everything that may leak has a name or a number that nothing else has."""

import functools
import time
from datetime import timedelta
from typing import Any

from django.core.files.base import ContentFile
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Budget, Membership, Tenant, User
from controlplane.accounts.services import create_api_key, create_sign_in_link
from controlplane.alerts.models import Alert, AlertRule
from controlplane.applications.models import Application, UnitBackend
from controlplane.batches.models import Batch, StoredFile
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.inventory.kinds import REGION
from controlplane.fleet.inventory.services import change
from controlplane.fleet.models import (
    Adapter,
    Deployment,
    Donation,
    Gpu,
    InstanceCommand,
    Maintenance,
    Node,
    Owner,
    Region,
    Rollout,
    ScheduledMinimum,
    Stock,
    Swap,
    SwapGroup,
    WeightedTarget,
)
from controlplane.lengths.models import LengthVersion
from controlplane.simulation.whatif.models import WhatIf
from controlplane.tuning.models import Setting
from controlplane.usage.models import InstanceHour, UsageHour
from tests.console import length_rows, planning_rows
from tests.console.conftest import ledger_row, rows_of
from tests.console.feed import Feed
from tests.inventory import Inventory
from tests.planning import capacity_rows
from tests.simulation.whatif import rows as what_if_rows

RUNNING, REMAINING, KV = 7_391, 8_642_913, 5_317_246
FLEET_REASON = "zephyr-maintenance-window"
WEBHOOK_SECRET = "T0KEN-in-the-address"
LOAD = tuple(form for number in (RUNNING, REMAINING, KV) for form in (str(number), f"{number:,}"))


def trace(names: list[str]) -> list[dict[str, Any]]:
    """A placement that compared every instance and lost the first."""
    seen = [
        {
            "instance": name,
            "accepting": True,
            "room": True,
            "running": RUNNING,
            "remaining_tokens": REMAINING,
            "kv_tokens": KV,
            "score": float(REMAINING),
            "parts": {"prefill_tokens": REMAINING},
        }
        for name in names
    ]
    placement = {
        "region": "us-east",
        "policy": "join_shortest_queue",
        "ordering": "priority",
        "waited_ms": 3.2,
        "waiting": RUNNING,
        "seen": seen,
        "chosen_because": f"The fewest tokens; next is {names[1]} with {REMAINING}.",
        "length": {"tokens": 64, "upper_tokens": 90, "source": "trees 2"},
    }
    return [
        {"instance": names[0], "lost": f"{names[0]}: answered 500: out of memory", **placement},
        {"instance": names[1], **placement},
        {"moved": f"to another region, {names[2]} is full", "pressure": 0.97},
    ]


def make_batch(tenant: Tenant, key: ApiKey) -> Batch:
    file = StoredFile.objects.create(tenant=tenant, filename="in.jsonl", purpose="batch", size_bytes=3)
    file.content.save("in.jsonl", ContentFile(b"{}\n"))
    return Batch.objects.create(
        tenant=tenant,
        api_key=key,
        input_file=file,
        endpoint="/v1/chat/completions",
        model=f"{tenant.name}-tuned-7b",
        completion_window="24h",
        expires_at=timezone.now() + timedelta(hours=24),
        status="in_progress",
        total=1000,
        completed=20,
        moments={"in_progress": int(time.time()) - 60},
    )


class World:
    """Rows of everything, and which words no tenant may read."""

    def __init__(self, inventory: Inventory) -> None:
        now, make_instance, deployment = inventory.now, inventory.make_instance, inventory.deployment
        acme, globex = inventory.acme, inventory.globex
        make_request = functools.partial(ledger_row, acme)
        quiet = Region.objects.create(name="eu-zephyr", title="Zephyr")
        far = Deployment.objects.create(
            model=deployment.model, region=quiet, gpu_type=deployment.gpu_type, tensor_parallel=2
        )
        states = ("ready", "ready", "failed", "ready")
        self.instances = [
            make_instance(state=state, name=f"zephyr-{number}", deployment=far if number == 3 else deployment)
            for number, state in enumerate(states)
        ]
        names = [row.name for row in self.instances]
        self.request = make_request(
            instance=names[1], trace=trace(names), attempts=2, outcome="failed", status_code=502, application="atlas",
            error_code="upstream_interrupted", error_message="The instance failed before the answer was complete.",
        )  # fmt: skip
        make_request(instance=names[0], trace=trace(names), queue_ms=1 / 3, itl_ms=200 / 7)
        make_request(tenant=globex, model="globex-tuned-7b", request_id="chatcmpl-of-globex", instance=names[0],
                     trace=trace(names), application="borealis")  # fmt: skip
        self.keys, self.secrets = {}, []
        for tenant in (acme, globex):
            key, secret = create_api_key(tenant, f"key of {tenant.name}", "test")
            self.keys[tenant.name] = key
            self.secrets.append(secret)
        self.key_secrets = dict(zip(self.keys, self.secrets, strict=True))
        hour = now.replace(minute=0, second=0, microsecond=0)
        for tenant, model in ((acme, "llama-3.1-8b"), (globex, "globex-tuned-7b"), (None, "zephyr-34b")):
            UsageHour.objects.create(
                hour=hour, tenant=tenant, api_key=self.keys.get(tenant and tenant.name), model=model, gpu_s=7200.0,
                cost_usd=2.7, requests=5, prompt_tokens=100, slo_class="interactive" if tenant else "",
            )  # fmt: skip
        InstanceHour.objects.create(
            hour=hour, instance=names[0], model="zephyr-34b", gpus=1, gpu_s=3600.0, cost_usd=1.35, work="idle"
        )
        self.batches = {tenant.name: make_batch(tenant, self.keys[tenant.name]) for tenant in (acme, globex)}
        self.budgets = {
            tenant.name: Budget.objects.create(
                tenant=tenant, model=f"{tenant.name}-tuned-7b", kind="usd_per_month", hard=400
            )
            for tenant in (acme, globex)
        }
        Budget.objects.create(model="zephyr-34b", kind="requests_per_minute", soft=7)
        for tenant, name in ((globex, "borealis"), (acme, "atlas")):
            steps = [{"unit": "write", "input_tokens": 120.0, "output_tokens": 40.0}]
            application = Application.objects.create(
                tenant=tenant, name=name, units={"write": {"kind": "llm", "name": "llama-3.1-8b"}}
            )
            self.run = application.runs.create(
                run=f"run of {name}", began_at=now, last_call_at=now, ended_at=now, calls=1, steps=steps
            )
        UnitBackend.objects.create(name="zephyr-python", url="http://zephyr/warm", secret="s3cret")
        self.event = record("instance.moved", self.instances[0], actor="zephyr-bot", reason=FLEET_REASON)
        InstanceCommand.objects.create(instance=self.instances[0], verb="stop", actor="zephyr-bot", reason=FLEET_REASON)
        Rollout.objects.create(
            deployment=deployment, state="failed", actor="zephyr-bot", reason=FLEET_REASON, message="zephyr-1 failed"
        )
        group = SwapGroup.objects.create(name="zephyr-shared")
        self.sharing = make_instance(state="sleeping", name="zephyr-asleep", swap_group=group)
        Swap.objects.create(
            group=group, instance=self.instances[0], state="failed", tier="cpu", actor="zephyr-bot",
            message="zephyr-1 did not wake", ended_at=now,
        )  # fmt: skip
        Donation.objects.create(
            instance=self.instances[1], state="stopped", actor="zephyr-bot", reason=FLEET_REASON, spot_usd_per_hour=1.1,
            donated_at=now - timedelta(hours=1), ended_at=now,
        )  # fmt: skip
        planning_rows.furnish(now, hours=2)
        length_rows.minutes(now, 12, ("acme",), models=("llama-3.1-8b",), each=4)
        length_rows.minutes(now, 12, ("globex",), models=("globex-tuned-7b",), each=4)
        for tenant in (acme, globex):
            length_rows.samples(now, 12, tenant)
        length_rows.versions(now - timedelta(minutes=1))
        self.deployment = deployment
        self.plan = planning_rows.plan(deployment.model, now, "advice")
        in_a_minute = now + timedelta(minutes=1)
        Owner.objects.create(
            role="shard 1", name="zephyr-host:17", token="17", expires_at=in_a_minute, wanted_at=in_a_minute
        )
        Gpu.objects.create(node=Node.objects.get(), name="0")
        self.maintenance = Maintenance.objects.create(
            node=Node.objects.get(), from_at=now + timedelta(hours=1), until=now + timedelta(hours=2),
            reason=FLEET_REASON, created_by="zephyr-bot",
        )  # fmt: skip
        Stock.objects.create(node=Node.objects.get(), name="zephyr-34b", source="zephyr/34b")
        # Names of adapters and targets for all tenants are in `GET /v1/models` of every key.
        Adapter.objects.create(name="public-sql", base=deployment.model, source="zephyr/sql")
        WeightedTarget.objects.create(name="public-chat", target=deployment.model.name)
        ScheduledMinimum.objects.create(
            name="zephyr-hours", model=deployment.model, instances=2, begins="08:00", ends="18:00"
        )
        self.simulation = what_if_rows.draft("zephyr-bot", title="zephyr as it was", seeds=1)
        what_if_rows.furnish("zephyr as it could be", FLEET_REASON, now)
        self.what_if = WhatIf.objects.get(title="zephyr as it could be")
        self.capacity_plan = capacity_rows.done()
        Setting.objects.create(name="PLAN_EPSILON", value=0.7, changed_by="zephyr-bot")
        rule = AlertRule.objects.create(
            name="zephyr-alert", condition="instance", receivers=f"http://127.0.0.1:9/{WEBHOOK_SECRET}"
        )
        somebody = User.objects.create_user("zephyr-user", "zephyr@example.com")
        self.membership = Membership.objects.create(user=somebody, tenant=acme)
        change(REGION, deployment.region, {"title": "US East"}, "zephyr-bot", FLEET_REASON)
        change(REGION, deployment.region, {"zone": "zephyr-zone"}, "zephyr-bot", FLEET_REASON)
        self.alert = Alert.objects.create(rule=rule, subject="zephyr-2", since=now, opened_at=now, seen_at=now)

    def feed(self) -> Feed:
        return Feed([row | {"running": RUNNING} for row in rows_of(self.instances)])

    def sign_in_token(self, user) -> str:
        return create_sign_in_link(user)

    def values(self) -> dict[str, Any]:
        """Return the values of the words in capitals in `expected.py`."""
        return {
            "INSTANCE": self.instances[0].name,
            "INSTANCE_ID": self.instances[0].pk,
            "SHARING_ID": self.sharing.pk,
            "SHARING": self.sharing.name,
            "VERSION": LengthVersion.objects.get(number=3).pk,
            "NODE_ID": Node.objects.get().pk,
            "GPU_ID": Gpu.objects.get().pk,
            "SHARD_ID": Owner.objects.get().pk,
            "STOCK_ID": Stock.objects.get().pk,
            "REQUEST": self.request.pk,
            "PLAN": self.plan.pk,
            "SIMULATION": self.simulation.pk,
            "WHAT_IF": self.what_if.pk,
            "CAPACITY_PLAN": self.capacity_plan.pk,
            "MODEL": self.deployment.model.name,
            "MODEL_ID": self.deployment.model.pk,
            "DEPLOYMENT": self.deployment.pk,
            "MAINTENANCE": self.maintenance.pk,
            "REGION_ID": self.deployment.region_id,
            "ALERT": self.alert.pk,
            "ALERT_RULE": self.alert.rule_id,
            "KEY": self.keys["acme"].pk,
            "EVENT": self.event.pk,
            "BUDGET": self.budgets["acme"].pk,
            "USER": self.membership.user_id,
            "MEMBERSHIP": self.membership.pk,
            "UNDONE": Event.objects.filter(kind="region.changed").latest("pk").pk,
            "BATCH": self.batches["acme"].pk,
            "BATCH_ID": self.batches["acme"].public_id,
            "APPLICATION": self.run.application.pk,
            "RUN": self.run.pk,
        }

    @property
    def of_the_fleet(self) -> tuple[str, ...]:
        """What no tenant reads: instances and their addresses, nodes, regions alongside their own, load, decisions."""
        return ("zephyr", "node-1", *(row.url for row in self.instances if row.url), *LOAD, "lt_ua")

    def of_others(self, tenant: str) -> tuple[str, ...]:
        """Return what only *tenant* and the fleet's people may read."""
        prefix = self.keys[tenant].prefix
        words = {"acme": ("atlas", "Acme"), "globex": ("globex-tuned-7b", "chatcmpl-of-globex", "borealis", "Globex")}
        return (*words[tenant], f"key of {tenant}", prefix)

    def hidden_from_all(self) -> tuple[str, ...]:
        """Return what no role may read: secrets and their hashes."""
        return (WEBHOOK_SECRET, *self.secrets, *(key.sha256 for key in self.keys.values()))
