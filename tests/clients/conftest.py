"""A gateway with instances, emulated or real, and clients that run in environments and their own processes, against both."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from channels.db import database_sync_to_async

from controlplane.fleet.models import Model
from forecasting.lengths.encoder import _minilm_folder
from scheduling.model_task import Task
from tests.batches.test_api import here  # noqa: F401 (a fixture)
from tests.clients import environments, talker
from tests.gateway.conftest import ServedGateway, do_once, gateway_before
from tests.gateway.rows import make_model, make_rows
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)
from tests.vllm.conftest import TOOLS, servers_of, vllm_python  # noqa: F401 (a fixture)

CALLS = Path(__file__).with_name("calls")
LIMIT_S = 240.0
REAL = os.environ.get("VLLM") == "1"
"""Whether instances are real vLLM servers, of the model that `talker` trains."""
GATEWAY, INSTANCE = "gateway", "instance"
ADDRESSED = (INSTANCE, GATEWAY)
Run = Callable[..., Awaitable[str]]


def address_of(served: ServedGateway, at: str, model: str = "m") -> str:
    """Return where *model* is asked: at the gateway, or at the instance of it that stands behind."""
    if at == GATEWAY:
        return served.url
    return str(served.extra["embedder_url" if model == "e" else "url"])


def train_talker(python: str, folder: Path) -> None:
    command = [python, "-m", "tests.clients.talker", str(folder)]
    subprocess.run(command, cwd=environments.ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=900, check=True)


@pytest.fixture(scope="session")
def real_servers(
    vllm_python: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, str]]:
    """Addresses of real vLLM servers: of "m", which generates and calls tools, and of "e", which embeds."""
    folder = tmp_path_factory.mktemp("vllm")
    train_talker(vllm_python, folder / "m")
    with (
        servers_of(vllm_python, folder / "run-m", folder / "m") as talkers,
        servers_of(vllm_python, folder / "run-e", _minilm_folder()) as embedders,
    ):
        limits = {"max_model_len": talker.CONTEXT_TOKENS, "max_num_batched_tokens": 8192}
        urls = {
            "m": talkers.start("m", model="m", extra_args=TOOLS, **limits),
            "e": embedders.start("e", model="e", task=Task.EMBED, max_model_len=256, max_num_batched_tokens=1024),
        }
        talkers.wait("m", urls["m"])
        embedders.wait("e", urls["e"])
        yield urls


@pytest_asyncio.fixture
async def real(
    transactional_db: None, real_servers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServedGateway]:
    """A gateway before them."""
    do_once(monkeypatch)
    backend = SimpleNamespace(name="m-0", url=real_servers["m"])
    await database_sync_to_async(make_rows)([backend], regions=["here"], max_num_seqs=4, queue_bound=100)
    await database_sync_to_async(Model.objects.update)(context_tokens=talker.CONTEXT_TOKENS)
    await database_sync_to_async(make_model)("e", real_servers["e"], task="embed", context_tokens=256)
    extra = {"url": real_servers["m"], "embedder_url": real_servers["e"]}
    async with gateway_before([backend] * 2, **extra) as served:
        yield served


@pytest.fixture
def served(request: pytest.FixtureRequest, transactional_db: None) -> ServedGateway:
    """A gateway with an instance of "m", which generates, and one of "e", which embeds; with `VLLM=1` both are real."""
    served: ServedGateway = request.getfixturevalue("real" if REAL else "emulated")
    return served


@pytest.fixture
def run(served: ServedGateway, tmp_path: Path) -> Run:
    """`await run(program, *arguments, at=…, **variables)`: its output, with the address and a key in its environment."""

    async def of(*command: str | Path, at: str = GATEWAY, **variables: str) -> str:
        if not os.path.exists(command[0]):  # noqa: ASYNC240 (nothing else runs yet)
            pytest.skip(f"{command[0]} is not there: `make clients` installs it")
        known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        given = {
            "BASE_URL": f"{address_of(served, at)}/v1",
            "EMBEDDINGS_URL": f"{address_of(served, at, 'e')}/v1",
            "BATCHES": "1" if at == GATEWAY else "",
            "KEY": served.secret,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks another host for prices
            "HOME": str(tmp_path),
        }
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env=known | given | variables,
            cwd=tmp_path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                printed, errors = await process.communicate()
        except TimeoutError:
            pytest.fail(f"{command[0]} took more than {LIMIT_S:g} s")
        finally:  # a load generator's own processes outlive it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert process.returncode == 0, printed.decode()[-4000:] + errors.decode()[-8000:]
        return printed.decode()

    return of


OURS = {"models"}
"""Parts of a report in which a gateway answers otherwise than an instance."""


def check_alike(through: dict[str, Any], directly: dict[str, Any]) -> None:
    """Check that a client's report through the gateway is the one of the instance alone, but for codes of errors."""
    for name, part in directly.items():
        if name == "errors":
            expected = {each: error[:2] for each, error in part.items()}
            assert {each: through[name][each][:2] for each in part} == expected
        elif name not in OURS:
            assert through[name] == part, name


@pytest.fixture
def said(run: Run) -> Callable[..., Awaitable[dict[str, Any]]]:
    """`await said(script, environment)`: the report of a script in `calls/` through the gateway, alike without it."""

    async def of(script: str, environment: str) -> dict[str, Any]:
        program: str | Path | None = environments.python_of(environment)
        variables = {}
        if script.endswith(".mjs"):
            program, variables["PACKAGES"] = (
                shutil.which("node"),
                str(environments.FOLDER / environment / "package.json"),
            )
            if program is None or not os.path.exists(variables["PACKAGES"]):  # noqa: ASYNC240
                pytest.skip("there is no Node, or `make clients` was not run")
        assert program is not None
        reports = {
            at: json.loads((await run(program, CALLS / script, at=at, **variables)).splitlines()[-1])
            for at in ADDRESSED
        }
        check_alike(reports[GATEWAY], reports[INSTANCE])
        report: dict[str, Any] = reports[GATEWAY]
        return report

    return of
