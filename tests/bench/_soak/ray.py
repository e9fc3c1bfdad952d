"""A Ray cluster beside the stack: two machines whose instances serve a model of their own, and a worker that launches them.

A machine is killed with all that runs on it, and comes back once its instance is replaced on the other one. The head is
killed alone, and comes back with its tables, which are in a Redis of their own: what runs is adopted.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from tests.bench._soak.stack import Stack
from tests.bench._soak.streams import SEQUENCES, SPEC
from tests.ray_cluster import ROOT, RayCluster, ray_python
from tests.redis_server import RedisServer

MODEL, MACHINES, GPU = "slow-ray", ("left", "right"), "ray-16gb"
AWAY_S = 5.0
BACK_WITHIN_S = 240.0
ENGINE = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from workers.emulator import __main__ as emulator, spec
given = dict(zip(sys.argv[1:], sys.argv[2:]))
emulator.InstanceSpec = lambda model: spec.read_spec({SPEC!r} | {{"model": model}})
sys.exit(emulator.main(["--single", given["--served-model-name"], "--host", given["--host"], "--port", given["--port"]]))
"""
ROWS = f"""
from controlplane.fleet.models import Deployment, GpuType, Model, Region
gpu = GpuType.objects.create(name="{GPU}", title="Ray", memory_bytes=2**34, on_demand_usd_per_hour=1)
model = Model.objects.create(
    name="{MODEL}", title="Slow, by Ray", source="a/b", weights_bytes=2**27, kv_bytes_per_token=2**14, context_tokens=8192
)
Deployment.objects.create(
    model=model, region=Region.objects.get(name=values[0]), gpu_type=gpu, max_num_seqs={SEQUENCES}, queue_bound=10_000,
    min_instances={len(MACHINES)}, max_instances={len(MACHINES)},
)
answer = None
"""
START = f"""
from controlplane.fleet import services
from controlplane.fleet.models import Deployment, Instance, Node
deployment = Deployment.objects.get(model__name="{MODEL}")
for node in Node.objects.filter(name__in={MACHINES!r}):
    row = Instance.objects.create(
        name=f"{MODEL}-{{node.name}}", deployment=deployment, launcher="ray", node=node, state="stopped"
    )
    services.start(row, "soak", "the first ones")
answer = None
"""
INSTANCES = (
    "SELECT i.name, i.url, i.process_id, n.name AS node FROM fleet_instance i JOIN fleet_node n ON n.id = i.node_id "
    f"WHERE i.launcher = 'ray' AND i.state = 'ready' AND n.name IN {MACHINES!r} ORDER BY i.name"
)
NODES = f"SELECT name, active, ray FROM fleet_node WHERE name IN {MACHINES!r}"
REGION = "us-east"


class Ray:
    """`lost`: of each head that was killed, the instances that were not as before once it was back."""

    def __init__(self, stack: Stack, around: ExitStack) -> None:
        self.stack, self.lost = stack, list[str]()
        redis = RedisServer().start()
        around.callback(redis.stop)
        engine = stack.folder / "ray-engine"
        engine.write_text(ENGINE)
        engine.chmod(0o755)
        self.cluster = RayCluster(ray_python(), stack.folder, redis.url, VLLM_PYTHON=str(engine))
        around.callback(self.cluster.stop)
        self.cluster.head()
        for name in MACHINES:
            self._machine(name)
        environment = os.environ | stack.environment | {
            "PILOTHOUSE_SECRET_KEY": (stack.folder / "secret_key").read_text().strip(),
            "REDIS_URL": stack.redis_url,
            "PILOTHOUSE_STATE_DIR": str(stack.folder / "ray-agent"),
            "RAY_ADDRESS": self.cluster.address,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [ray_python(), "-m", "celery", "-A", "workers.celery", "worker", "-Q", "ray", "--concurrency", "2"]
        log = around.enter_context((stack.folder / "ray-agent.log").open("wb"))
        agent = subprocess.Popen(
            [*command, "-n", "ray@soak", "--loglevel", "info"], env=environment, cwd=ROOT, stdout=log, stderr=log
        )
        around.callback(self._end, agent)

    @staticmethod
    def _end(agent: subprocess.Popen[bytes]) -> None:
        agent.terminate()
        try:
            agent.wait(40)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait(10)

    def _machine(self, name: str) -> None:
        resources = {f"region__{REGION.replace('-', '_')}": 1, f"gpu__{GPU.replace('-', '_')}": len(MACHINES)}
        self.cluster.machine(name, len(MACHINES), **resources)

    def rows(self, query: str) -> list[dict[str, Any]]:
        return self.stack.rows_or_none(query)

    async def prepare(self) -> None:
        """Have one instance ready on each machine."""
        await asyncio.to_thread(self.stack.shell, ROWS, REGION)
        await self._until(lambda: {row["name"] for row in self.rows(NODES)} == {*MACHINES}, "nodes")
        await asyncio.to_thread(self.stack.shell, START)
        await self._until(self.is_whole, "instances")

    def is_whole(self) -> bool:
        return len(self.rows(INSTANCES)) == len(MACHINES)

    async def _until(self, condition: Any, what: str) -> None:
        deadline_s = time.monotonic() + BACK_WITHIN_S
        while not await asyncio.to_thread(condition):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray: {what} do not come: {self.rows(NODES)} {self.rows(INSTANCES)}")
            await asyncio.sleep(0.5)

    async def kill_machine(self) -> None:
        """Kill the machine of an instance, wait until others replace its instances, and start it again."""
        here = self.rows(INSTANCES)[0]["node"]
        await asyncio.to_thread(self.cluster.kill, here)
        await self._until(lambda: not any(row["node"] == here for row in self.rows(INSTANCES)), "losses")
        await self._until(self.is_whole, "replacements")
        await asyncio.to_thread(self._machine, here)
        await self._until(lambda: all(row["active"] for row in self.rows(NODES)), "machines")

    async def kill_head(self) -> None:
        before = self.rows(INSTANCES)
        await asyncio.to_thread(self.cluster.kill, "head")
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(self.cluster.head)

        def groups() -> set[str]:
            return {name for row in self.rows(NODES) for name in json.loads(_text(row["ray"])).get("groups", {})}

        names = {row["name"] for row in before}
        await self._until(lambda: groups() >= names, "groups")
        self.lost += [row["name"] for row in before if row not in self.rows(INSTANCES)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
