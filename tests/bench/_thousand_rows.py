"""What an operator and his workers do in `thousand`, in a process of their own: rows of the fleet, and rollouts.

python -m tests.bench._thousand_rows seed JSON      rows of a new database
python -m tests.bench._thousand_rows roll MODEL...  roll the models out everywhere at once, and print one JSON object
"""

import json
import sys
import threading
import time
from dataclasses import asdict

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.utils import timezone  # noqa: E402

from controlplane.accounts.models import ApiKey, Tenant, hash_secret  # noqa: E402
from controlplane.fleet.lifecycle import launching  # noqa: E402
from controlplane.fleet.models import (  # noqa: E402
    CommandState,
    Deployment,
    GpuType,
    Instance,
    InstanceCommand,
    Model,
    Node,
    PerformanceProfile,
    Region,
    Rollout,
    RolloutState,
    SloClass,
)
from controlplane.fleet.rollouts import services as rollouts  # noqa: E402
from controlplane.fleet.rollouts.selectors import open_rollouts  # noqa: E402
from controlplane.planning.execution import executor  # noqa: E402
from tests.bench.gateway import KEY  # noqa: E402
from workers.emulator.spec import DEFAULT_PROFILE  # noqa: E402
from workers.tasks import fleet as tasks  # noqa: E402
from workers.tasks.rollouts import advance_rollouts  # noqa: E402
from workers.vllm.launcher import EmulatedLauncher  # noqa: E402

STEP_S = 0.5


def seed(regions: dict[str, str], models: list[str], instances: dict[str, list[str]], nodes: int) -> None:
    """Write the inventory: *instances* (by region, in turn of *models*) in emulators at *regions*' addresses, on *nodes*."""
    call_command("migrate", verbosity=0)
    interactive = SloClass.objects.create(
        name="interactive", title="Interactive", kind="interactive", service_tier="priority", ttft_target_ms=1000
    )
    tenant = Tenant.objects.create(name="acme", default_slo_class=interactive, max_concurrent_requests=4096)
    tenant.slo_classes.set([interactive])
    ApiKey.objects.create(tenant=tenant, name="bench", prefix=KEY[:11], sha256=hash_secret(KEY))
    gpu = GpuType.objects.create(name="h100", title="H100", memory_bytes=80 * 2**30, on_demand_usd_per_hour=2)
    rows = [
        Model.objects.create(name=name, title=name, weights_bytes=2**33, kv_bytes_per_token=2**17, context_tokens=8192)
        for name in models
    ]
    for model in rows:
        PerformanceProfile.objects.create(model=model, gpu_type=gpu, tensor_parallel=1, **asdict(DEFAULT_PROFILE))
    for at, (name, url) in enumerate(regions.items()):
        region = Region.objects.create(name=name, title=name.title())
        per_node = -(-len(instances[name]) * len(regions) // nodes)
        places = [
            Node.objects.create(name=f"{name}-{n}", region=region, gpu_type=gpu, gpu_count=per_node + 2)
            for n in range(nodes // len(regions) + (at < nodes % len(regions)))
        ]
        for n, model in enumerate(rows):
            count = len(instances[name][n :: len(rows)])
            Deployment.objects.create(
                model=model, region=region, gpu_type=gpu, max_num_seqs=64, queue_bound=4096, min_instances=count,
                max_instances=count + 4,
            )  # fmt: skip
        deployments = {one.model_id: one for one in Deployment.objects.filter(region=region)}
        Instance.objects.bulk_create(
            Instance(
                name=instance, deployment=deployments[rows[n % len(rows)].pk], node=places[n % len(places)],
                launcher="emulated", url=f"{url}/{instance}", state="ready",
            )
            for n, instance in enumerate(instances[name])
        )  # fmt: skip


def carry_out(ended: threading.Event) -> None:
    """Run the commands, and stop what is drained, as Celery's workers do beside beat's task."""
    while not ended.wait(STEP_S / 2):
        for command in InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk"):
            tasks.run_command(command.pk)
        for row in executor.drained():
            waited = timezone.now() - row.state_changed_at
            executor.finish_drain(row, 0 if waited > 2 * executor.DRAIN_SETTLE else None, executor.PLANNER)


def roll(*models: str) -> dict[str, float]:
    """Roll *models* out in every region, doing what beat and workers would do."""
    addresses = {row.region.name: row.instances.first().url.rpartition("/")[0] for row in Deployment.objects.all()}
    tasks.launcher_for = lambda row: EmulatedLauncher(addresses[row.deployment.region.name])
    launching.EMULATED_STARTUP_S = 0.0
    ended = threading.Event()
    worker = threading.Thread(target=carry_out, args=[ended], daemon=True)
    rolled = Deployment.objects.filter(model__name__in=models)
    rolled.update(max_num_seqs=63)
    began_s, work_s = time.monotonic(), time.process_time()
    begun = [rollouts.start(one, "bench", "roll", bake_s=0) for one in rolled]
    worker.start()
    while open_rollouts():
        advance_rollouts()
        time.sleep(STEP_S)
        done = sum(one.up_to_date for one in Rollout.objects.filter(pk__in=[each.pk for each in begun]))
        print(f"roll: {done} after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    ended.set()
    worker.join()
    for one in begun:
        one.refresh_from_db()
        if one.state != RolloutState.SUCCEEDED:
            raise RuntimeError(f"{one}: {one.message}")
    return {
        "instances": sum(one.total for one in begun),
        "seconds": time.monotonic() - began_s,
        "workers_cpu_s": time.process_time() - work_s,
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["seed", text]:
            seed(**json.loads(text))
        case ["roll", *names]:
            print(json.dumps(roll(*names)))
