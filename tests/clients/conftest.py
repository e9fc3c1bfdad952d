"""A gateway with emulated instances, and clients that run in environments and their own processes, against both."""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.batches.test_api import here  # noqa: F401 (a fixture)
from tests.clients import environments
from tests.gateway.conftest import ServedGateway
from tests.gateway.test_responses import emulated  # noqa: F401 (a fixture)

CALLS = Path(__file__).with_name("calls")
LIMIT_S = 240.0
GATEWAY, INSTANCE = "gateway", "instance"
ADDRESSED = (INSTANCE, GATEWAY)
Run = Callable[..., Awaitable[str]]


def address_of(served: ServedGateway, at: str, model: str = "m") -> str:
    """Return where *model* is asked: at the gateway, or at the instance of it that stands behind."""
    if at == GATEWAY:
        return served.url
    embedder = str(served.extra["embedder_url"])
    return embedder if model == "e" else embedder.removesuffix("/two") + "/one"


@pytest.fixture
def run(emulated: ServedGateway, tmp_path: Path) -> Run:  # noqa: F811
    """`await run(program, *arguments, at=…, **variables)`: its output, with the address and a key in its environment."""

    async def of(*command: str | Path, at: str = GATEWAY, **variables: str) -> str:
        if not os.path.exists(command[0]):  # noqa: ASYNC240 (nothing else runs yet)
            pytest.skip(f"{command[0]} is not there: `make clients` installs it")
        known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        given = {
            "BASE_URL": f"{address_of(emulated, at)}/v1",
            "EMBEDDINGS_URL": f"{address_of(emulated, at, 'e')}/v1",
            "BATCHES": "1" if at == GATEWAY else "",
            "KEY": emulated.secret,
            "HOME": str(tmp_path),
        }
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env=known | given | variables,
            cwd=tmp_path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                printed, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            pytest.fail(f"{command[0]} took more than {LIMIT_S:g} s")
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
