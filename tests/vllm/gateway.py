"""A gateway in front of servers that run already, or whose instances it starts itself."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Deployment, Instance, Launcher, Model, Node
from tests.gateway import conftest as gateway
from tests.gateway.conftest import ServedGateway
from tests.gateway.rows import make_rows
from tests.vllm.conftest import MAX_MODEL_LEN, MODEL, STOP_GRACE_S, finish, interruptible
from workers.vllm.launcher import ProcessLauncher


@asynccontextmanager
async def gateway_before(
    servers: Mapping[str, str], max_num_seqs: int, *, prepare: Callable[[], object] | None = None, **options: Any
) -> AsyncIterator[ServedGateway]:
    """Run a gateway before *servers*, addresses by name, once all of them are up. *prepare* changes the rows first."""
    backends = [SimpleNamespace(name=name, url=url) for name, url in servers.items()]
    options = {"queue_bound": 1000, "model_name": MODEL, "max_num_seqs": max_num_seqs, **options}
    await database_sync_to_async(make_rows)(backends, regions=["here"] * len(backends), **options)
    await database_sync_to_async(Instance.objects.update)(state="loading")
    if prepare is not None:
        await database_sync_to_async(prepare)()
    async with serving_gateway(backends) as served:
        yield served


@asynccontextmanager
async def serving_gateway(backends: Sequence[Any] = ()) -> AsyncIterator[ServedGateway]:
    """Run a gateway on the existing rows."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600))
    async with gateway.gateway_before(backends, http) as served:
        yield served


@contextmanager
def workers_launcher(
    vllm_python: str, folder: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], **variables: str
) -> Iterator[ProcessLauncher]:
    """The launcher that the workers' tasks will use; the servers *names* end with the test, also on SIGTERM."""
    monkeypatch.setattr(settings, "VLLM_PYTHON", vllm_python)
    monkeypatch.setattr(settings, "STATE_DIR", folder)
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    launcher = ProcessLauncher(vllm_python, folder / "instances")
    with interruptible():
        yield launcher
        for name in names:
            finish(launcher.stop(name, grace_s=STOP_GRACE_S))


def make_stopped_fleet(source: Path, names: Sequence[str], max_num_seqs: int, gpus: int, **deployment: Any) -> None:
    """Write a deployment on a node of *gpus* GPUs, and its stopped instances *names*, without a policy."""
    backends = [SimpleNamespace(name=name, url=f"http://127.0.0.1:{at}") for at, name in enumerate(names, 1)]
    regions = ["here"] * len(names)
    make_rows(backends, regions=regions, max_num_seqs=max_num_seqs, queue_bound=100, model_name=MODEL)
    row = Deployment.objects.get()
    node = Node.objects.create(name="node", region=row.region, gpu_type=row.gpu_type, gpu_count=gpus)
    Model.objects.update(source=str(source), context_tokens=MAX_MODEL_LEN)
    Deployment.objects.update(max_instances=gpus, **deployment)
    Instance.objects.update(launcher=Launcher.PROCESS, node=node, url="", state="stopped")
